"""Settings: what panjue sets itself, what would be silently wrong, and how processes start."""

import os
from pathlib import Path

import pytest

from panjue.finetune.libraries import FLASH_ATTENTION, check_library_settings
from panjue.finetune.settings import SftConfig, launch, sft_settings
from panjue.prompts.plumbing.config import load_section
from panjue.prompts.plumbing.errors import UserError

from .conftest import main


def config(*words: str) -> SftConfig:
    given = ("run=a", "model=b", "train=c", *words)
    return load_section(SftConfig, Path("nowhere.yaml"), "sft", given)


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy", "logging_strategy"])
def test_no_is_a_strategy_and_not_a_truth_value(name: str) -> None:
    read = config(f"trainer.{name}=no", "trainer.bf16=no")
    assert read.trainer == {name: "no", "bf16": False}
    check_library_settings(read)


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("trainer.save_only_model=true", "trainer: 'save_only_model' is set by panjue"),
        ("lora.layer_replication=[[0, 2]]", "lora: 'layer_replication' is set by panjue"),
        ("trainer.accelerator_config={}", "trainer: 'accelerator_config' is set by panjue"),
        ("trainer.seed=1", "trainer.seed: use seed"),
        ("trainer.packing=maybe", "trainer.packing: must be true, false or auto, got maybe"),
        ("trainer.max_steps=-5", "trainer.max_steps: must be a whole number above 0, got -5"),
        ("trainer.num_train_epochs=0", "trainer.num_train_epochs: must be a number above 0, got 0"),
        ("trainer.save_total_limit=x", "trainer.save_total_limit: must be a whole number above 0"),
        ("lora.r=abc", "lora: r: Input should be a valid integer"),
        ("lora.lora_alfa=8", "lora: no setting 'lora_alfa'; did you mean 'lora_alpha'"),
        ("lora.init_lora_weights=foo", "lora.init_lora_weights: use true, gaussian or orthogonal"),
        ("method=qlora", "quantization: goes with method=qlora; set both or neither"),
        ("quantization.load_in_4bits=true", "no setting 'load_in_4bits'; did you mean"),
        ("attn_implementation=flash_attention_2", "needs its package, which is not installed"),
    ],
)
def test_what_would_break_resuming_or_the_rows_is_refused_with_the_reason(
    word: str, complaint: str
) -> None:
    with pytest.raises(UserError) as error:
        check_library_settings(config(word))
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_packs_whose_examples_would_not_be_kept_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FLASH_ATTENTION, "flash_attention_2", lambda: True)
    words = ["attn_implementation=flash_attention_2", "trainer.packing=true"]
    with pytest.raises(UserError, match=r"set trainer.per_device_train_batch_size=1$"):
        check_library_settings(config(*words))
    for other in ("trainer.packing=false", "trainer.per_device_train_batch_size=1"):
        check_library_settings(config(*words, other))


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("trainer.max_length=5", "^trainer.max_length: use max_tokens$"),
        ("trainer.ddp_timeout=long", "^trainer.ddp_timeout: "),
        ("trainer.max_steps=many", "^trainer.max_steps: must be a whole number above 0, got many"),
        ("trainer.use_cpu=true", "^trainer: 'use_cpu' is set by panjue$"),
        ("trainer.learning_rat=1", "^trainer: .*learning_rat.*did you mean 'learning_rate'"),
        ("trainer.save_strategy=often", "^trainer: .*often.* is not a valid SaveStrategy"),
        ("trainer.save_strategy=best trainer.eval_strategy=no", "^trainer: .*metric_for_best"),
        ("trainer.optim=galore_adamw", "^trainer: "),
        ("lora.target_modules=[nope]", r"^lora: Target modules \{'nope'\} not found"),
        ("lora.kasa_config={}", "^lora: these settings change the base's weights too"),
        ("model=./nowhere", "no such folder"),
        ("task=judgement", "did you mean 'judgment'"),
        ("max_token=10", r"no setting 'max_token'; did you mean 'max_tokens'\?$"),
        ("mix=nowhere.jsonl", "mix: no file"),
    ],
)
def test_a_wrong_setting_ends_in_one_line(
    word: str, complaint: str, workshop: Path, tmp_path: Path
) -> None:
    words = [f"run={tmp_path}/run", "trainer.max_steps=1", *word.split(" ")]
    with pytest.raises(UserError, match=complaint) as error:
        main(workshop / "sft.yaml", words)
    assert "\n" not in str(error.value)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        sft_settings(tmp_path / "nowhere.yaml", ["run=a", "model=b", "train=c"])


def launched(monkeypatch: pytest.MonkeyPatch, settings: SftConfig) -> list[str]:
    """Return the command that replaces this process; empty if none does."""
    started: list[list[str]] = [[]]

    def start(_: str, words: list[str], environment: dict[str, str]) -> None:
        assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 600, "a step and a save"
        started.append(words)

    monkeypatch.setattr(os, "execve", start)
    launch(settings, Path("a.yaml"), ["gpus=8", "seed=1"])
    return started[-1]


def test_accelerate_starts_a_process_for_each_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    assert launched(monkeypatch, config()) == []
    words = launched(monkeypatch, config("gpus=8"))
    assert words[1:4] == ["-m", "accelerate.commands.launch", "--multi_gpu"]
    assert words[words.index("--num_processes") + 1] == "8"
    assert words[-6:] == ["-m", "panjue.prompts.cli", "sft", "a.yaml", "gpus=8", "seed=1"]
    words = launched(monkeypatch, config("gpus=8", "accelerate=fsdp2.yaml"))
    assert words[3:5] == ["--config_file", "fsdp2.yaml"]
    with pytest.raises(UserError, match=r"several processes; say how many, e\.g\. gpus=8"):
        launched(monkeypatch, config("accelerate=fsdp2.yaml"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "2" in launched(monkeypatch, config("gpus=2"))
    with pytest.raises(UserError, match=r"^gpus: this machine has 2 for training; set gpus=2$"):
        launched(monkeypatch, config("gpus=8"))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert launched(monkeypatch, config("gpus=8")) == [], "it is one of the eight"
