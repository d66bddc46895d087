"""Merging: the model that is written says what base and adapter say, or there is none."""

import math
import re
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from panjue.finetune.trained import read_trained
from panjue.prompts.fingerprint import base_files, base_sha256, model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.prompts.plumbing.records import RunRecord
from panjue.serve.merge import (
    changed_by,
    logits,
    merge,
    named_for_vllm,
    served_model,
    write_merged,
)

# Of peft, for an adapter of a kind that is hard to merge; here such adapters are merged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LAYERS = ["q_proj", "v_proj", "down_proj"]
ALL_TIED = ["embed_tokens", "lm_head"]

KINDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "embedding": (Qwen3Config, {"target_modules": [*LAYERS, "embed_tokens"]}),
    "whole head": (Qwen3Config, {"target_modules": LAYERS, "modules_to_save": ["lm_head"]}),
    "experts": (
        Qwen3MoeConfig,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
    "tied head": (Qwen3Config, {"target_modules": [*LAYERS, "lm_head"]}),
    "all tied": (Qwen3Config, {"target_modules": LAYERS, "modules_to_save": ALL_TIED}),
}
"""Name -> the class of the base's config, and settings of the adapter."""


def make(
    folder: Path,
    config: type[PreTrainedConfig] = Qwen3Config,
    dtype: torch.dtype = torch.float32,
    *,
    tied: bool = True,
    **settings: Any,
) -> tuple[Path, Path, Path]:
    """Write a random base and a random adapter of it; return both and a folder for the merge."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": tied,
    }
    model = AutoModelForCausalLM.from_config(config(**shape)).to(dtype)
    model.save_pretrained(folder / "base", max_shard_size="8KB")
    adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder / "adapter")
    (folder / "out").mkdir()
    return folder / "base", folder / "adapter", folder / "out"


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_has_the_outputs_of_base_and_adapter(kind: str, tmp_path: Path) -> None:
    """An adapter of a head that is tied to the embedding may be refused instead."""
    config, settings = KINDS[kind]
    is_tied = "tied" in kind
    base, adapter, out = make(tmp_path, config, tied=is_tied, **settings)
    with suppress(UserError) if is_tied else nullcontext():
        write_merged(base, adapter, out, range(40))
        ids = torch.arange(40)[None]
        base_model = AutoModelForCausalLM.from_pretrained(base)
        plain = logits(base_model, ids)
        adapted = logits(PeftModel.from_pretrained(base_model, str(adapter)), ids)
        assert (plain - adapted).norm() > 0.01 * plain.norm(), "the adapter does something"
        merged = logits(AutoModelForCausalLM.from_pretrained(out), ids)
        torch.testing.assert_close(merged, adapted)


def weights_folder(folder: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights.update(load_file(path))
    return weights


def test_sums_are_computed_in_float32_and_other_weights_stay(tmp_path: Path) -> None:
    base, adapter, out = make(tmp_path, dtype=torch.bfloat16, target_modules=LAYERS)
    assert len([*base.glob("*.safetensors")]) > 3
    write_merged(base, adapter, out, range(40))
    old = weights_folder(base)
    new = weights_folder(out)
    matrices = weights_folder(adapter)
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


def test_weights_that_a_model_keeps_in_float32_stay_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = make(tmp_path, dtype=torch.bfloat16, tied=False, target_modules=LAYERS)
    kept = ("model.norm", "lm_head")
    monkeypatch.setattr(Qwen3ForCausalLM, "_keep_in_fp32_modules_strict", [*kept])
    write_merged(*places, range(40))
    for key, weight in weights_folder(tmp_path / "out").items():
        assert weight.dtype == (torch.float32 if key.startswith(kept) else torch.bfloat16), key


def test_what_peft_cannot_merge_is_an_error_of_one_line(tmp_path: Path) -> None:
    places = make(tmp_path, target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(UserError, match=r"Impossible to merge LoRA .* Use adapter=lora"):
        write_merged(*places, range(40))


def test_a_rare_token_whose_outputs_round_far_off_says_nothing_of_the_merge() -> None:
    before = torch.arange(1.0, 41.0).reshape(1, 20, 2)
    for far_off, is_refused in ((1, False), (3, False), (5, True), (20, True)):
        after = before.clone()
        after[0, -far_off:] *= -1
        assert (changed_by(before, after) > 0.1) == is_refused, far_off
    assert changed_by(before, before * 1.5) == pytest.approx(0.5)
    assert math.isnan(changed_by(before, before * math.nan))


def test_a_merge_with_other_outputs_is_refused_and_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    with pytest.raises(UserError, match=r"merging it changes the outputs \(by"):
        merge(read_trained(adapter))
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["adapter"]


@pytest.mark.usefixtures("three_threads")
def test_a_tiny_model_is_merged_by_two_threads_of_three(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def counted(model: Any, ids: torch.Tensor) -> torch.Tensor:
        counts.append(torch.get_num_threads())
        return logits(model, ids)

    monkeypatch.setattr("panjue.serve.merge.logits", counted)
    merge(read_trained(shutil.copytree(trained / "adapter", tmp_path / "adapter")))
    assert counts == [2, 2], "with the adapter, and merged"


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"{}"),
        ("adapter_model.safetensors", b""),
    ],
)
def test_a_broken_adapter_is_named_in_one_line(name: str, raw: bytes, tmp_path: Path) -> None:
    base, adapter, out = make(tmp_path, target_modules=LAYERS)
    (adapter / name).write_bytes(raw)
    with pytest.raises(UserError, match=re.escape(str(adapter))) as error:
        write_merged(base, adapter, out, range(40))
    assert "\n" not in str(error.value)


def test_a_merge_is_made_once_and_keeps_sampling_settings_that_transformers_drops(
    trained: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    base = shutil.copytree(workshop / "base/model", tmp_path / "base")
    file = base / "generation_config.json"
    write_json(file, {**read_json(file), "do_sample": False, "temperature": 0.9, "top_p": 0.6})
    files = base_files(base)
    digest = {"base": str(base), "base_sha256": base_sha256(files), "base_files": files}
    RunRecord.read(adapter).model_copy(update=digest).write(adapter)
    before = model_sha256(adapter)
    out = merge(read_trained(adapter))
    assert out == adapter / "merged", "another one may lie beside it"
    for same in (file, *base.glob("tokenizer*"), *base.glob("*.jinja")):
        assert (out / same.name).read_bytes() == same.read_bytes()
    assert read_json(out / "config.json")["rope_theta"] == 10_000, "where transformers 4 reads it"
    made = (out / "model.safetensors").stat().st_mtime_ns
    assert merge(read_trained(adapter)) == out
    monkeypatch.chdir(adapter)
    assert served_model(read_trained(Path()), "merge").model == out
    monkeypatch.setattr("panjue.serve.merge.is_part", lambda _: True)
    assert (named_for_vllm(Path(), base) / "labels.json").exists()
    assert model_sha256(adapter) == before
    assert (out / "model.safetensors").stat().st_mtime_ns == made
