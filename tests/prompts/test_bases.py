"""Folders of base models that are broken, and settings that libraries refuse: one line each."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from panjue.finetune.model import load_base
from panjue.finetune.trained import open_trained
from panjue.prompts.architecture import load_language_model, text_config
from panjue.prompts.model import load_tokenizer, model_folder
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_folder, read_json, write_json
from panjue.prompts.render import prompt_ids, template_args
from panjue.serve.merge import served_model
from tests.finetune.conftest import lend_rows

UNEVALUATED = ("trainer.max_steps=1", "trainer.eval_strategy='no'", "trainer.save_strategy='no'")
Panjue = Callable[..., CompletedProcess[str]]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 8467464\n"


@pytest.fixture
def base(workshop: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny base that may be broken."""
    return shutil.copytree(workshop / "base/model", tmp_path / "base")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("model.safetensors", POINTER, "{base}/model.safetensors: is no whole file of weights"),
        ("model.safetensors", "", "{base}: has no .safetensors weights; the copy or download is"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            "{base}/model-00001-of-00002.safetensors: is no whole file of weights: No such file",
        ),
    ],
)
def test_weights_that_are_not_whole_are_found_before_anything_long(
    name: str, content: str, problem: str, base: Path
) -> None:
    assert model_folder(str(base)) == base
    (base / name).write_text(content, "utf-8")
    if not content:
        (base / name).unlink()
    with pytest.raises(UserError) as error:
        model_folder(str(base))
    assert str(error.value).startswith(problem.format(base=base))
    assert "\n" not in str(error.value)


def test_two_models_in_one_folder_are_refused(base: Path) -> None:
    (base / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"has model\.safetensors and model-00001-of-00002\.safete"):
        model_folder(str(base))
    (base / "model-00001-of-00002.safetensors").unlink()
    assert model_folder(str(base)) == base


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("qwen9_moe", "qwen9_moe"), ("qwen2_5_vl", "no language model of qwen2_5_vl alone")],
)
def test_an_architecture_that_cannot_be_trained_is_one_line(
    kind: str, problem: str, base: Path
) -> None:
    write_json(base / "config.json", {**read_json(base / "config.json"), "model_type": kind})
    with pytest.raises(UserError, match=rf"^{base}: .*{problem}"):
        text_config(base)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"text_config": {"quantization_config": {"load_in_8bit": True}}},
    ],
)
def test_a_quantized_base_is_refused_before_its_weights_are_downloaded(
    config: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(base / "config.json", {**read_json(base / "config.json"), **config})
    downloaded: list[str] = []

    def download(_: str, allow_patterns: list[str], **_ignored: object) -> str:
        downloaded.extend(allow_patterns)
        return str(base)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(UserError, match=r"^Qwen/Qwen3-8B-FP8: its weights are quantized .*; take"):
        model_folder("Qwen/Qwen3-8B-FP8")
    assert not [pattern for pattern in downloaded if "safetensors" in pattern]


def test_a_base_in_four_bits_is_one_for_qlora(
    base: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    load_base(base, torch.bfloat16, {"load_in_4bit": True}).save_pretrained(base)
    words = ["sft", workshop / "sft.yaml", f"model={base}", f"run={tmp_path}/run"]
    lend_rows(workshop, tmp_path / "run")
    done = panjue(*words)
    assert done.stderr == f"panjue: method: {base} has weights in four bits; set method=qlora\n"
    done = panjue(*words, "method=qlora", "quantization.load_in_4bit=true", *UNEVALUATED)
    assert done.returncode == 0, done.stderr
    assert "four bits" not in done.stdout, "it answers in the type that its four bits stand for"
    served = served_model(open_trained(tmp_path / "run"), "merge")
    merged = load_language_model(served.model)
    assert {weight.dtype for weight in merged.parameters()} == {torch.bfloat16}
    assert not getattr(merged, "is_quantized", False)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("model.layers.1.mlp", "nothing", "has no model.layers.1.mlp.down_proj.weight (6 such"),
        ("model.norm.weight", "model.norm.weight_scale", "has no model.norm.weight (2 such"),
    ],
)
def test_each_weight_has_its_place_and_each_place_its_weight(
    old: str, new: str, problem: str, base: Path
) -> None:
    load_language_model(base)
    weights = load_file(base / "model.safetensors")
    renamed = {key.replace(old, new): value for key, value in weights.items()}
    save_file(renamed, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=re.escape(f"{base}: {problem}")):
        load_language_model(base)


def test_a_tokenizer_that_is_no_file_is_one_line(base: Path) -> None:
    (base / "tokenizer.json").write_text(POINTER, "utf-8")
    with pytest.raises(UserError, match=r"base: its tokenizer: .*; restore its files$"):
        load_tokenizer(base)


def test_a_prompt_is_the_same_on_another_day(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = base / "chat_template.jinja"
    today = "{{ strftime_now('%d %b %Y') }}"
    template.write_text(today + template.read_text("utf-8"), "utf-8")
    ids = prompt_ids(load_tokenizer(base), [{"role": "user", "content": "甲"}])
    assert load_tokenizer(base).decode(ids).startswith("26 Jul 2024")


def test_a_template_that_refuses_our_argument_gets_none(
    base: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    template = base / "chat_template.jinja"
    refusal = "{{ raise_exception('This model always thinks.') }}"
    refuses = f"{{% if enable_thinking is defined and not enable_thinking %}}{refusal}{{% endif %}}"
    thinks = template.read_text("utf-8").replace("assistant\\n'", "assistant\\n<think>\\n'")
    template.write_text(refuses + thinks, "utf-8")
    tokenizer = load_tokenizer(base)
    assert template_args(tokenizer) == {}
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "甲"}])
    assert tokenizer.decode(ids).endswith("assistant\n<think>\n")
    done = panjue(
        "sft", workshop / "sft.yaml", f"model={base}", f"run={tmp_path}/r", "dry_run=true"
    )
    assert done.returncode == 0, done.stderr
    assert "<think>" in done.stdout


def test_a_template_that_no_message_pleases_is_one_line(base: Path) -> None:
    (base / "chat_template.jinja").write_text("{{ raise_exception('System first.') }}", "utf-8")
    with pytest.raises(UserError) as error:
        load_tokenizer(base)
    said = "its chat template refuses a message of a user (System first.); take another base"
    assert str(error.value) == f"{base}: {said}"


def test_whoever_may_read_the_folder_may_read_the_weights(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        with atomic_folder(tmp_path / "adapter") as new:
            (new / "weights").touch(0o600)
    finally:
        os.umask(old)
    assert (tmp_path / "adapter/weights").stat().st_mode & 0o777 == 0o644
