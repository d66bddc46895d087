"""Settings of the libraries: what is wrong with them is said in one line before a step is taken."""

import subprocess
import sys
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import pytest
from peft import LoraConfig
from trl import SFTConfig as TrainerConfig

from panjue.finetune.libraries import (
    FLASH_ATTENTION,
    check_library_settings,
    check_values,
    hints_of,
)
from panjue.finetune.settings import SOURCES, STRATEGIES, SftConfig, annotated_fields
from panjue.finetune.sft import main
from panjue.prompts.plumbing.config import load_config
from panjue.prompts.plumbing.errors import UserError


def config(*words: str, path: Path) -> SftConfig:
    path.write_text("run: a\nmodel: b\ntrain: c\n", "utf-8")
    return load_config(SftConfig, path, words)


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("trainer.num_train_epochs=three", "valid number, got 'three'"),
        ("trainer.num_train_epochs=0", "greater than 0, got 0"),
        ("trainer.max_steps=abc", "valid integer, got 'abc'"),
        ("trainer.max_steps=2.5", "valid integer, got 2.5"),
        ("trainer.max_steps='3'", "valid integer, got '3'"),
        ("trainer.gradient_accumulation_steps=0", "greater than 0, got 0"),
        ("trainer.gradient_accumulation_steps=-1", "greater than 0, got -1"),
        ("trainer.per_device_train_batch_size=0", "greater than 0, got 0"),
        ("trainer.eval_accumulation_steps=0", "greater than 0, got 0"),
        ("trainer.learning_rate=-1", "greater than or equal to 0, got -1"),
        ("trainer.adam_beta1=2", "less than 1, got 2"),
        ("trainer.dataloader_num_workers=-1", "greater than or equal to 0, got -1"),
        ("trainer.save_total_limit=0", "greater than 0, got 0"),
        ("trainer.save_total_limit=true", "valid integer, got True"),
        ("trainer.bf16=maybe", "valid boolean, got 'maybe'"),
        ("trainer.train_sampling_strategy=sequental", "none of random, sequential,"),
        ("trainer.log_level=loud", "'loud' is none of detail, debug,"),
        ("trainer.log_level={a: 1}", "valid string, got {'a': 1}"),
        ("lora.r=0", "greater than 0, got 0"),
        ("lora.r=abc", "valid integer, got 'abc'"),
        ("lora.lora_dropout=2", "less than or equal to 1, got 2"),
        ("lora.bias=some", "'none', 'all' or 'lora_only', got 'some'"),
        ("lora.target_modules=5", "got 5"),
    ],
)
def test_a_wrong_value_is_named_with_its_setting(word: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        check_library_settings(config(word, path=tmp_path / "a.yaml"))
    assert str(error.value).startswith(word.partition("=")[0] + ": ")
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "word",
    [
        "trainer.num_train_epochs=1",
        "trainer.learning_rate=1e-5",
        "trainer.learning_rate=0",
        "trainer.save_total_limit=null",
        "trainer.eval_steps=0.5",
        "trainer.dataloader_prefetch_factor=null",
        "trainer.report_to=[tensorboard]",
        "trainer.lr_scheduler_kwargs={num_cycles: 2}",
        "trainer.gradient_checkpointing_kwargs={use_reentrant: false}",
        "trainer.accelerator_config={split_batches: true}",
        "lora.target_modules=all-linear",
        "lora.target_modules=[q_proj]",
        "lora.init_lora_weights=gaussian",
        "lora.init_lora_weights=false",
    ],
)
def test_what_the_libraries_take_passes(word: str, tmp_path: Path) -> None:
    check_library_settings(config(word, path=tmp_path / "a.yaml"))


@pytest.mark.parametrize(("section", "cls"), [("trainer", TrainerConfig), ("lora", LoraConfig)])
def test_every_default_of_the_libraries_passes(section: str, cls: Any) -> None:
    defaults = {field.name: field.default for field in fields(cls) if field.init}
    plain = {k: v for k, v in defaults.items() if isinstance(v, str | int | float | None)}
    assert len(plain) > 20
    check_values(section, plain, cls)


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("lora.target_modules=[nope]", r"^lora: Target modules \{'nope'\} not found"),
        ("lora.init_lora_weights=foo", "^lora: Unknown initialization init_lora_weights='foo'"),
        ("lora.rank_pattern={q_proj: x}", "^lora: "),
        ("lora.layer_replication=[[0, 2]]", "^lora: 'layer_replication' is set by panjue"),
    ],
)
def test_what_only_the_model_can_tell_is_one_line_too(
    word: str, complaint: str, workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", word])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["trainer.save_strategy=best"], "metric_for_best_model"),
    ],
)
def test_what_only_the_trainer_can_tell_is_one_line_too(
    words: list[str], complaint: str, workshop: Path, tmp_path: Path
) -> None:
    quiet = "trainer.eval_strategy=no"
    with pytest.raises(UserError, match=f"^trainer: .*{complaint}") as error:
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", quiet, *words])
    assert "\n" not in str(error.value)


def test_the_strategies_are_all_that_trl_has() -> None:
    """They are written down, so that reading settings imports no trl."""
    kinds = {name: get_args(hint) for name, hint in hints_of(TrainerConfig).items()}
    may_be_no = {
        name
        for name, hint in kinds.items()
        for kind in hint
        if isinstance(kind, type) and issubclass(kind, Enum) and "no" in {one.value for one in kind}
    }
    assert set(STRATEGIES) == may_be_no


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy", "logging_strategy"])
def test_no_is_a_strategy_and_not_a_truth_value(name: str, tmp_path: Path) -> None:
    read = config(f"trainer.{name}=no", "trainer.bf16=no", path=tmp_path / "a.yaml")
    assert read.trainer == {name: "no", "bf16": False}
    check_library_settings(read)


@pytest.mark.parametrize(
    "name",
    [
        "save_only_model",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        "resume_from_checkpoint",
        "auto_find_batch_size",
        "enable_jit_checkpoint",
        "save_on_each_node",
        "eval_on_start",
        "dataloader_in_order",
        "eos_token",
    ],
)
def test_what_would_break_going_on_or_the_rows_is_refused_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"trainer: '{name}' is set by panjue; use .+"):
        check_library_settings(config(f"trainer.{name}=true", path=tmp_path / "a.yaml"))


def test_an_adapter_that_is_not_to_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lora: 'inference_mode' is set by panjue"):
        check_library_settings(config("lora.inference_mode=true", path=tmp_path / "a.yaml"))


def test_an_order_that_cannot_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    word = "trainer.accelerator_config={use_seedable_sampler: false}"
    with pytest.raises(UserError, match=r"trainer.accelerator_config: 'use_seedable_sampler' is"):
        check_library_settings(config(word, path=tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    "start", ["pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga"]
)
def test_a_start_that_changes_the_base_is_refused(start: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"lora.init_lora_weights: '{start}' changes the base too"):
        check_library_settings(config(f"lora.init_lora_weights={start}", path=tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    "name",
    [
        "model_init_kwargs",
        "dataset_num_proc",
        "shuffle_dataset",
        "pad_token",
        "include_num_input_tokens_seen",
    ],
)
def test_what_would_do_nothing_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"trainer: '{name}' is set by panjue; use .+"):
        check_library_settings(config(f"trainer.{name}=1", path=tmp_path / "a.yaml"))


def test_a_start_that_would_be_another_than_it_is_called_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="init_lora_weights: 'eva' needs a pass over the data"):
        check_library_settings(config("lora.init_lora_weights=eva", path=tmp_path / "a.yaml"))


def test_packs_in_batches_that_flash_attention_takes_as_one_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLASH_ATTENTION, "flash_attention_2", lambda: True)
    words = ["attn_implementation=flash_attention_2", "trainer.packing=true"]
    with pytest.raises(UserError, match=r"set trainer.per_device_train_batch_size=1"):
        check_library_settings(config(*words, path=tmp_path / "a.yaml"))
    words += ["trainer.per_device_train_batch_size=1"]
    check_library_settings(config(*words, path=tmp_path / "a.yaml"))


@pytest.mark.parametrize(("section", "cls"), [("trainer", TrainerConfig), ("lora", LoraConfig)])
def test_names_read_from_the_source_are_those_of_the_class(section: str, cls: Any) -> None:
    names = set().union(*(annotated_fields(*source) for source in SOURCES[section]))
    assert names == {field.name for field in fields(cls) if field.init}


def test_a_wrong_name_is_found_before_torch_is_imported() -> None:
    script = """
import sys
from pathlib import Path
from panjue.finetune.settings import sft_settings
from panjue.prompts.plumbing.errors import UserError
try:
    sft_settings(Path("finetune/configs/demo.yaml"), [
        "train=prompts/tasks/judgment/sample.jsonl", "model=Qwen/Qwen3-8B", "trainer.lernrate=1"])
except UserError as error:
    print(error, "torch" in sys.modules)
"""
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == ("trainer: no setting 'lernrate'; did you mean 'learning_rate'? False\n")
