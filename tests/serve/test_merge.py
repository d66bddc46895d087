"""Merging: the model that is written says what base and adapter say, or there is none."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.serve import merge as merging
from panjue.serve.merge import fold, merge

# Of peft, where an adapter is of a kind that is hard to merge: here it is merged, and looked at.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
LAYERS = ["q_proj", "v_proj", "down_proj"]


def make(folder: Path, config: Any, **settings: Any) -> tuple[Path, Path]:
    """Write a random base and a random adapter of it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder / "adapter")
    (folder / "out").mkdir()
    return folder / "base", folder / "adapter"


def said(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.arange(40)[None]).logits
    return logits


def apart_and_merged(base: Path, adapter: Path, out: Path) -> tuple[torch.Tensor, torch.Tensor]:
    how = {"dtype": torch.float32}
    whole = AutoModelForCausalLM.from_pretrained(base, **how)
    plain = said(whole)
    apart = said(PeftModel.from_pretrained(whole, str(adapter)))
    assert (plain - apart).norm() > 0.01 * plain.norm(), "the adapter does something"
    return apart, said(AutoModelForCausalLM.from_pretrained(out, **how))


Kinds = dict[str, tuple[Any, dict[str, Any]]]
"""Of base and adapter: the config of one, the settings of the other."""

TIED, UNTIED = ({**SHAPE, "tie_word_embeddings": tied} for tied in (True, False))
BY_FILE: Kinds = {
    "plain": (Qwen3Config(**TIED), {"target_modules": "all-linear"}),
    "rank-stabilized": (Qwen3Config(**TIED), {"target_modules": LAYERS, "use_rslora": True}),
    "dora": (Qwen3Config(**TIED), {"target_modules": LAYERS, "use_dora": True}),
    "ranks": (Qwen3Config(**TIED), {"target_modules": LAYERS, "rank_pattern": {"q_proj": 2}}),
    "beside biases": (Qwen2Config(**TIED), {"target_modules": LAYERS}),
    "with a bias": (Qwen2Config(**TIED), {"target_modules": ["q_proj"], "lora_bias": True}),
    "head": (Qwen3Config(**UNTIED), {"target_modules": [*LAYERS, "lm_head"]}),
    "embedding": (Qwen3Config(**UNTIED), {"target_modules": [*LAYERS, "embed_tokens"]}),
    "whole blocks": (
        Qwen3Config(**TIED),
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["mlp"]},
    ),
    "whole head": (
        Qwen3Config(**UNTIED),
        {"target_modules": LAYERS, "modules_to_save": ["lm_head"]},
    ),
}
WHOLE: Kinds = {
    "all biases": (Qwen2Config(**TIED), {"target_modules": LAYERS, "bias": "all"}),
    "transposed weights": (
        GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64),
        {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    ),
    "experts": (
        Qwen3MoeConfig(**TIED, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2),
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
}


@pytest.mark.parametrize("kind", BY_FILE)
def test_a_merged_model_says_what_base_and_adapter_say(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, settings = BY_FILE[kind]
    base, adapter = make(tmp_path, config, **settings)
    monkeypatch.setattr(merging, "fold_whole", None)  # the base is never loaded whole
    fold(base, adapter, tmp_path / "out")
    torch.testing.assert_close(*apart_and_merged(base, adapter, tmp_path / "out"))


@pytest.mark.parametrize("kind", WHOLE)
def test_so_does_one_of_a_base_whose_files_name_weights_otherwise(
    kind: str, tmp_path: Path
) -> None:
    config, settings = WHOLE[kind]
    base, adapter = make(tmp_path, config, **settings)
    fold(base, adapter, tmp_path / "out")
    torch.testing.assert_close(*apart_and_merged(base, adapter, tmp_path / "out"))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": [*LAYERS, "lm_head"]},
        {"target_modules": [*LAYERS, "embed_tokens"]},
        {"target_modules": LAYERS, "modules_to_save": ["lm_head"]},
        {"target_modules": LAYERS, "modules_to_save": ["embed_tokens"]},
        {"target_modules": LAYERS, "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=str,
)
def test_where_head_and_embedding_are_one_an_adapter_of_either_is_merged_rightly_or_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    base, adapter = make(tmp_path, Qwen3Config(**TIED), **settings)
    with suppress(UserError):
        fold(base, adapter, tmp_path / "out")
        torch.testing.assert_close(*apart_and_merged(base, adapter, tmp_path / "out"))


def test_files_stay_as_they_are_but_for_the_layers_that_change(tmp_path: Path) -> None:
    base, adapter = make(tmp_path, Qwen3Config(**TIED), target_modules=LAYERS)
    half = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "halves", max_shard_size="8KB")
    fold(tmp_path / "halves", adapter, tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "halves").glob("*.safetensors"))
    assert len(files) > 3
    assert files == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    matrices = load_file(adapter / "adapter_model.safetensors")
    for name in files:
        new = load_file(tmp_path / "out" / name)
        for key, before in load_file(tmp_path / "halves" / name).items():
            layer = f"base_model.model.{key.removesuffix('.weight')}"
            if f"{layer}.lora_A.weight" in matrices:
                a, b = (matrices[f"{layer}.lora_{matrix}.weight"] for matrix in "AB")
                scale = 2  # lora_alpha / r, 8 / 4
                assert torch.equal(new[key], (before.float() + scale * (b @ a)).bfloat16())
            else:
                assert torch.equal(new[key], before)


def test_a_layer_whose_weights_lie_in_two_files_is_folded_in_both(tmp_path: Path) -> None:
    base, adapter = make(tmp_path, Qwen2Config(**TIED), **BY_FILE["with a bias"][1])
    weights = load_file(base / "model.safetensors")
    parts = {"a.safetensors": "bias", "b.safetensors": "weight"}
    places = {k: f for k in weights for f, end in parts.items() if k.endswith(end)}
    index = {"metadata": {}, "weight_map": places}
    for name, end in parts.items():
        part = {key: weight for key, weight in weights.items() if key.endswith(end)}
        save_file(part, base / name, metadata={"format": "pt"})
    (base / "model.safetensors").unlink()
    write_json(base / "model.safetensors.index.json", index)
    fold(base, adapter, tmp_path / "out")
    torch.testing.assert_close(*apart_and_merged(base, adapter, tmp_path / "out"))


def test_weights_of_other_programs_beside_the_models_are_left_out(tmp_path: Path) -> None:
    base, adapter = make(tmp_path, Qwen3Config(**TIED), target_modules=LAYERS)
    for other in ("consolidated.safetensors", "model.fp16.safetensors"):
        shutil.copy(base / "model.safetensors", base / other)
    fold(base, adapter, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("settings", [{}, {"bias": "lora_only"}], ids=["by file", "whole"])
def test_what_peft_cannot_merge_is_one_line(settings: dict[str, Any], tmp_path: Path) -> None:
    given = {"target_modules": ["q_proj"], "lora_bias": True, **settings}
    base, adapter = make(tmp_path, Qwen3Config(**TIED), **given)
    with pytest.raises(UserError, match=r"Impossible to merge LoRA .* Use adapter=lora"):
        fold(base, adapter, tmp_path / "out")


def test_a_merge_that_fails_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linear, "merge", lambda self: self.merged_adapters.append("default"))
    with pytest.raises(UserError, match="changes the outputs"):
        merge(trained / "adapter", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_merge_is_made_once(trained: Path, merged: Path) -> None:
    before = (merged / "model.safetensors").stat().st_mtime_ns
    assert merge(trained / "adapter", merged) == merged
    assert (merged / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("whole", [False, True])
def test_a_merge_that_makes_another_model_is_refused(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = make(tmp_path, Qwen3Config(**TIED), target_modules=LAYERS)
    monkeypatch.setattr(merging, "can_fold_by_file", lambda *_: not whole)
    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    monkeypatch.setattr(Linear, "merge", lambda self: self.merged_adapters.append("default"))
    complaint = r"merging it changes the outputs \(by"
    with pytest.raises(UserError, match=complaint):
        fold(base, adapter, tmp_path / "out")


def test_no_adapter_is_folded_into_packed_bits(tmp_path: Path) -> None:
    base, adapter = make(tmp_path, Qwen3Config(**TIED), target_modules=LAYERS)
    config = read_json(base / "config.json")
    write_json(base / "config.json", {**config, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(
        UserError, match="quantized, no adapter can be merged into it; use adapter=lora"
    ):
        fold(base, adapter, tmp_path / "out")
