"""Merging: the model that is written says what base and adapter say, or there is none."""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from panjue.prompts.model import model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.prompts.plumbing.run import RunRecord
from panjue.serve.merge import Served, merge, write_merged

# Of peft, for an adapter of a kind that is hard to merge; here such adapters are merged.
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
TIED, UNTIED = ({**SHAPE, "tie_word_embeddings": tied} for tied in (True, False))
LAYERS = ["q_proj", "v_proj", "down_proj"]

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "embedding": (Qwen3Config(**UNTIED), {"target_modules": [*LAYERS, "embed_tokens"]}),
    "whole head": (
        Qwen3Config(**UNTIED),
        {"target_modules": LAYERS, "modules_to_save": ["lm_head"]},
    ),
    "experts": (
        Qwen3MoeConfig(**TIED, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2),
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
}


def make(
    folder: Path,
    config: Any,
    dtype: torch.dtype = torch.float32,
    shards: str = "1GB",
    **settings: Any,
) -> tuple[Path, Path, Path]:
    """Write a random base and a random adapter of it; return both and a folder for the merge."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder / "base", max_shard_size=shards)
    adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder / "adapter")
    (folder / "out").mkdir()
    return folder / "base", folder / "adapter", folder / "out"


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.arange(40)[None]).logits
    return logits


def check_merge(base: Path, adapter: Path, out: Path) -> None:
    """Merge, and compare the outputs with those of base and adapter."""
    write_merged(base, adapter, out, range(40))
    base_model = AutoModelForCausalLM.from_pretrained(base)
    plain = logits_of(base_model)
    adapted = logits_of(PeftModel.from_pretrained(base_model, str(adapter)))
    assert (plain - adapted).norm() > 0.01 * plain.norm(), "the adapter does something"
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(out)), adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_has_the_outputs_of_base_and_adapter(kind: str, tmp_path: Path) -> None:
    config, settings = KINDS[kind]
    check_merge(*make(tmp_path, config, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": [*LAYERS, "lm_head"]},
        {"target_modules": [*LAYERS, "embed_tokens"]},
        {"target_modules": LAYERS, "modules_to_save": ["lm_head"]},
        {"target_modules": LAYERS, "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=str,
)
def test_an_adapter_of_a_head_tied_to_the_embedding_is_merged_rightly_or_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with suppress(UserError):
        check_merge(*make(tmp_path, Qwen3Config(**TIED), **settings))


def test_sums_are_computed_in_float32_and_other_weights_stay(tmp_path: Path) -> None:
    base, adapter, out = make(
        tmp_path, Qwen3Config(**TIED), torch.bfloat16, "8KB", target_modules=LAYERS
    )
    assert len([*base.glob("*.safetensors")]) > 3
    write_merged(base, adapter, out, range(40))
    old, new = (
        {
            key: weight
            for path in folder.glob("*.safetensors")
            for key, weight in load_file(path).items()
        }
        for folder in (base, out)
    )
    matrices = load_file(adapter / "adapter_model.safetensors")
    assert new.keys() == old.keys()
    for key, before in old.items():
        layer = f"base_model.model.{key.removesuffix('.weight')}"
        expected = before
        if f"{layer}.lora_A.weight" in matrices:
            a, b = (matrices[f"{layer}.lora_{matrix}.weight"].float() for matrix in "AB")
            scale = 2  # lora_alpha / r, 8 / 4
            expected = (before.float() + scale * (b @ a)).bfloat16()
            assert not torch.equal(expected, before)
        assert torch.equal(new[key], expected)


def test_what_peft_cannot_merge_is_an_error_of_one_line(tmp_path: Path) -> None:
    places = make(tmp_path, Qwen3Config(**TIED), target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(UserError, match=r"Impossible to merge LoRA .* Use adapter=lora"):
        write_merged(*places, range(40))


def test_a_merge_with_other_outputs_is_refused_and_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    with pytest.raises(UserError, match=r"merging it changes the outputs \(by"):
        merge(trained / "adapter", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"{}"),
        ("adapter_model.safetensors", b""),
        ("adapter_model.safetensors", b"version https://git-lfs.github.com/"),
    ],
)
def test_a_broken_adapter_is_named_in_one_line(name: str, raw: bytes, tmp_path: Path) -> None:
    base, adapter, out = make(tmp_path, Qwen3Config(**TIED), target_modules=LAYERS)
    (adapter / name).write_bytes(raw)
    with pytest.raises(UserError, match=re.escape(str(adapter))) as error:
        write_merged(base, adapter, out, range(40))
    assert "\n" not in str(error.value)
    if raw == b"{}":
        with pytest.raises(UserError, match="has no rank"):
            _ = Served(base, adapter).lora_rank


def test_a_merge_is_made_once(trained: Path, merged: Path) -> None:
    before = (merged / "model.safetensors").stat().st_mtime_ns
    assert merge(trained / "adapter", merged) == merged
    assert (merged / "model.safetensors").stat().st_mtime_ns == before


def test_sampling_settings_that_transformers_does_not_save_are_kept(
    trained: Path, workshop: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    base = shutil.copytree(workshop / "base/model", tmp_path / "base")
    file = base / "generation_config.json"
    write_json(file, {**read_json(file), "do_sample": False, "temperature": 0.9, "top_p": 0.6})
    digest = {"base": str(base), "base_sha256": model_sha256(base)}
    RunRecord.read(tmp_path / "adapter").model_copy(update=digest).write(tmp_path / "adapter")
    out = merge(tmp_path / "adapter", tmp_path / "merged")
    assert (out / file.name).read_bytes() == file.read_bytes()
