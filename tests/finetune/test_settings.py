"""Settings: what panjue sets itself, what would be silently wrong, and how processes start."""

import os
import re
from inspect import signature
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import BitsAndBytesConfig, SchedulerType
from trl import SFTConfig as TrainerConfig

from panjue.finetune.library_settings import (
    FIXED,
    FLASH_ATTENTION,
    INSTEAD,
    READ_OF_TRL,
    READ_QUANTIZATION,
    RENAMED,
    check_library_settings,
    trainer_config,
)
from panjue.finetune.make import DEMOS
from panjue.finetune.model import CHECKPOINTING
from panjue.finetune.settings import LAUNCHED, BaseConfig, SftConfig, launch, sft_settings
from panjue.finetune.sft import train
from panjue.finetune.training_run import OF_SPEED
from panjue.prompts.plumbing.config import load_section, load_values, settings_of
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.other_names import OTHERS, OURS
from panjue.serve.settings import ENDPOINT_SAMPLING, GenerateConfig

from .conftest import a_config, main


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy", "logging_strategy"])
def test_no_is_a_strategy_and_not_a_truth_value(name: str) -> None:
    words = ["run=a", "model=b", "train=c", f"trainer.{name}=no", "trainer.bf16=no"]
    read = load_section(SftConfig, Path("nowhere.yaml"), "sft", words)
    assert read.trainer == {name: "no", "bf16": False}


SET = "is set by panjue, or has no effect here; leave it out$"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        # trl's
        ("trainer.save_only_model=true", f"^trainer.save_only_model: {SET}"),
        ("trainer.accelerator_config={}", f"^trainer.accelerator_config: {SET}"),
        ("trainer.use_cpu=true", f"^trainer.use_cpu: {SET}"),
        ("trainer.seed=1", "^trainer.seed: use seed$"),
        ("trainer.packing=maybe", "^trainer.packing: must be true, false or auto, got maybe$"),
        ("trainer.max_steps=-5", "^trainer.max_steps: must be a whole number above 0, got -5$"),
        ("trainer.num_train_epochs=0", "^trainer.num_train_epochs: must be a number above 0, got"),
        ("trainer.save_total_limit=x", "^trainer.save_total_limit: must be a whole number above 0"),
        ("trainer.ddp_timeout=long", "^trainer.ddp_timeout: "),
        ("trainer.ddp_timeout=1000000000000000", "^trainer.ddp_timeout: "),
        ("trainer.learning_rat=1", "^trainer: .*learning_rat.*did you mean 'learning_rate'"),
        ("trainer.save_strategy=often", "^trainer.save_strategy: there is no 'often' .*no, steps"),
        ("trainer.save_strategy=best", "^trainer.save_strategy: .* the best is kept then$"),
        ("trainer.push_to_hub=true", "^trainer.push_to_hub: use `hf upload` afterwards; "),
        ("trainer.dataloader_drop_last=true", f"^trainer.dataloader_drop_last: {SET}"),
        ("trainer.model_init_kwargs={}", f"^trainer.model_init_kwargs: {SET}"),
        ("trainer.optim=galore_adamw", "^trainer.optim: .*galore_torch"),
        ("trainer.greater_is_better=true", f"^trainer.greater_is_better: {SET}"),
        ("trainer.metric_for_best_model=f1", f"^trainer.metric_for_best_model: {SET}"),
        ("trainer.eval_steps=null", "^trainer.eval_steps: set how often .*=steps evaluates$"),
        ("trainer.train_sampling_strategy=batch_rebalance", "use group_by_length or random$"),
        ("trainer.use_liger_kernel=true", "^trainer.use_liger_kernel: the package liger-kernel"),
        ("trainer.lr=1", "^trainer: no setting 'lr'; it is trainer.learning_rate here$"),
        ("trainer.hub_model_id=x", f"^trainer.hub_model_id: {SET}"),
        ("trainer.bf16_full_eval=true", f"^trainer.bf16_full_eval: {SET}"),
        ("trainer.use_cache=true", f"^trainer.use_cache: {SET}"),
        ("trainer.label_names=[x]", f"^trainer.label_names: {SET}"),
        ("trainer.remove_unused_columns=false", f"^trainer.remove_unused_columns: {SET}"),
        ("trainer.deepspeed=z3.json", "^trainer.deepspeed: use accelerate=finetune/configs/fsdp2"),
        ("trainer.dataloader_prefetch_factor=2", "without trainer.dataloader_num_workers$"),
        ("trainer.project=x", "^trainer.project: has no effect without .*report_to=trackio$"),
        ("trainer.learning_rate=0", "^trainer.learning_rate: must be a number above 0, got 0$"),
        ("trainer.learning_rate=.nan", "^trainer.learning_rate: must be a number above 0"),
        ("trainer.fp16=true", "^trainer.fp16: needs a GPU; leave it out$"),
        ("trainer.activation_offloading=true", "^trainer.activation_offloading: needs a GPU"),
        ("trainer.adam_beta1=2", "^trainer.optim: Invalid beta parameter"),
        ("trainer.optim=adamw_torch_8bit", "^trainer.optim: "),
        (
            "trainer.lr_scheduler_type=cosin",
            r"^trainer.lr_scheduler_type: there is no 'cosin'; did you mean 'cosine'\? "
            r"\(there are linear, cosine, cosine_with_restarts, .*, greedy\)$",
        ),
        ("trainer.lr_scheduler_type=null", r"^trainer.lr_scheduler_type: there is no None \(there"),
        ("trainer.optim=adamw", r"^trainer.optim: there is no 'adamw'; did .* \(there are adamw_"),
        (
            "trainer.save_strategy=epochs",
            r"^trainer.save_strategy: .*; did you mean 'epoch'\? \(there are no, steps, epoch\)$",
        ),
        (
            "trainer.lr_scheduler_type=warmup_stable_decay",
            "^trainer.lr_scheduler_kwargs: warmup_stable_decay: .* 'num_decay_steps'$",
        ),
        (
            "trainer.lr_scheduler_type=cosine_with_min_lr",
            "^trainer.lr_scheduler_kwargs: cosine_with_min_lr: One of min_lr or min_lr_rate",
        ),
        (
            "trainer.lr_scheduler_type=cosine trainer.lr_scheduler_kwargs.num_cycles=two",
            "^trainer.lr_scheduler_kwargs: cosine: ",
        ),
        # peft's
        ("lora.r=0", "^lora.r: must be above 0, got 0$"),
        ("lora.lora_alpha=0", "^lora.lora_alpha: must be above 0, got 0$"),
        ("lora.rank_pattern.q_proj=0", "^lora.rank_pattern.q_proj: must be above 0, got 0$"),
        ("lora.lora_dropout=1", "^lora.lora_dropout: must be from 0 to below 1, got 1$"),
        (
            "lora.target_modules=q_proj,v_proj",
            r"'q_proj,v_proj' is one name; a list is lora.target_modules=\[q_proj,v_proj\]$",
        ),
        ("lora.target_modules=[q_proj,lm_head]", "trl trains no LoRA of the output layer; leave"),
        (
            "lora.target_modules=[q_proj,embed_tokens]",
            r"target_modules: .* \(tied\), .*cannot be merged",
        ),
        ("lora.layer_replication=[[0,2]]", "^lora: 'layer_replication' is set by panjue$"),
        ("lora.inference_mode=true", "^lora: 'inference_mode' is set by panjue$"),
        ("lora.task_type=CAUSAL_LM", "^lora.task_type: is CAUSAL_LM already; remove it$"),
        ("lora.r=abc", "^lora: r: Input should be a valid integer"),
        ("lora.init_lora_weights=pissa_niter_4", "^lora.init_lora_weights: .* change the base too"),
        ("lora.target_modules=[nope]", r"^lora: Target modules \{'nope'\} not found"),
        ("lora.kasa_config={}", "^lora: these settings change the base's weights too"),
        ("lora.lora_bias=true", "^lora.lora_bias: could be neither merged nor served"),
        ("lora.alora_invocation_tokens=[1]", "^lora.alora_invocation_tokens: could be neither"),
        ("lora.rank=8", "^lora: no setting 'rank'; it is lora.r here$"),
        # bitsandbytes', and of attention
        ("quantization.load_in_4bit=true", "method=qlora; quantization={} empties it$"),
        (
            "method=qlora",
            "^quantization: goes with method=qlora; set quantization.load_in_4bit=true",
        ),
        ("method=qlora quantization.load_in_8bit=true", "8bit: .* four bits; use load_in_4bit$"),
        (
            "method=qlora quantization.load_in_4bits=true",
            "^quantization: no setting .*; did you mean",
        ),
        (
            "method=qlora quantization.llm_int8_threshold=3",
            "^quantization: no setting 'llm_int8_threshold'",
        ),
        ("attn_implementation=flash_attention_2", "needs its package, which is not installed"),
        # panjue's own
        ("model=~/x", f"^model=~/x: ~ is not expanded here; write model={Path.home()}/x$"),
        ("dtype=float", r"there is no 'float'; did you mean 'float32'\? \(there are auto, "),
        ("max_tokens=16385", "model reads at most 16384 tokens; set max_tokens=16384$"),
        ("model=./nowhere", "no such folder"),
        ("task=judgement", "did you mean 'judgment'"),
        ("max_token=10", r"no setting 'max_token'; did you mean 'max_tokens'\?$"),
        ("mix=nowhere.jsonl", "mix: no file"),
        ("seed=-1", "^seed=-1: Input should be greater than or equal to 0$"),
        ("mix_ratio=.inf", "^mix_ratio=.inf: Input should be a finite number$"),
        ("epochs=3", "no setting 'epochs'; it is trainer.num_train_epochs here$"),
        ("learning_rate=1", "no setting 'learning_rate'; it is trainer.learning_rate here$"),
        ("lora_rank=8", "no setting 'lora_rank'; it is lora.r here$"),
        ("cutoff_len=8", "no setting 'cutoff_len'; it is max_tokens here$"),
        (
            "temperature=1",
            r"no setting 'temperature'; it is sampling.temperature \(generate\) here$",
        ),
    ],
)
def test_a_wrong_setting_ends_in_one_line(
    words: str, complaint: str, workshop: Path, tmp_path: Path
) -> None:
    given = [f"run={tmp_path}/run", "trainer.max_steps=1", *words.split()]
    with pytest.raises(UserError, match=complaint) as error:
        main(workshop / "sft.yaml", given)
    assert "\n" not in str(error.value)


def test_nothing_is_fitted_before_settings_are_checked(workshop: Path, tmp_path: Path) -> None:
    for word in ("lora.target_modules=[nope]", "trainer.lr_scheduler_type=warmup_stable_decay"):
        with pytest.raises(UserError):
            train(sft_settings(workshop / "sft.yaml", [f"run={tmp_path}/run", word]))
        assert not (tmp_path / "run").exists()


def other_value(default: object) -> object:
    """Return a value that is not the default of a setting, of its type where that matters."""
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "other"


def test_each_setting_of_trl_is_read_or_refused_in_one_line() -> None:
    for name, parameter in signature(TrainerConfig).parameters.items():
        given = {name: other_value(parameter.default)}
        if name in READ_OF_TRL:
            assert READ_OF_TRL[name], "what it decides"
            continue
        with pytest.raises(UserError, match=rf"^trainer.{name}: ") as error:
            check_library_settings(a_config(trainer=given))
        assert "\n" not in str(error.value)
    in_trl = {RENAMED.get(name, name) for name in READ_OF_TRL}
    assert in_trl <= set(signature(TrainerConfig).parameters)
    assert not set(READ_OF_TRL) & {*INSTEAD, *FIXED}


def test_a_setting_of_a_newer_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(*, learning_rate: float, prompt_loss_weight: float) -> None: ...

    monkeypatch.setattr("panjue.finetune.library_settings.TrainerConfig", newer)
    with pytest.raises(UserError, match=rf"^trainer.prompt_loss_weight: {SET}"):
        check_library_settings(a_config(trainer={"prompt_loss_weight": 0.1}))


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_both_names_of_a_renamed_setting_are_taken(name: str) -> None:
    settings = {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    config = a_config(trainer=settings)
    check_library_settings(config)
    args = trainer_config(config)
    assert getattr(args, CHECKPOINTING) is True
    assert getattr(args, f"{CHECKPOINTING}_kwargs") == {"use_reentrant": False}
    assert settings.keys() <= OF_SPEED, "a run resumes with another value, or with the other name"


def test_each_setting_of_four_bits_is_one_of_transformers() -> None:
    assert set(READ_QUANTIZATION) <= set(signature(BitsAndBytesConfig).parameters)


@pytest.mark.parametrize("kind", list(SchedulerType))
def test_each_scheduler_with_its_arguments_is_taken(kind: SchedulerType) -> None:
    arguments = {
        SchedulerType.WARMUP_STABLE_DECAY: {"num_decay_steps": 240},
        SchedulerType.COSINE_WITH_MIN_LR: {"min_lr_rate": 0.1},
        SchedulerType.COSINE_WARMUP_WITH_MIN_LR: {"min_lr_rate": 0.1},
    }
    given = {"lr_scheduler_type": kind.value, "lr_scheduler_kwargs": arguments.get(kind)}
    evaluation = {"eval_strategy": "steps", "eval_steps": 1}
    trainer_config(a_config(trainer={**given, **evaluation}))


def test_a_section_is_emptied_and_patterns_have_dots() -> None:
    config = Path(__file__).parents[2] / "finetune/configs/qwen3-8b-qlora.yaml"
    given = ["run=a", "train=b", "method=lora", "quantization={}"]
    pattern = "lora.rank_pattern.self_attn.q_proj=64"
    read = load_section(SftConfig, config, "sft", [*given, pattern, "lora.alpha_pattern.x=3"])
    assert read.quantization == {}
    assert read.lora["r"] == 16
    assert read.lora["rank_pattern"] == {"self_attn.q_proj": 64}
    assert read.lora["alpha_pattern"] == {"x": 3}
    assert load_section(SftConfig, config, "sft", [*given, "lora={}"]).lora == {}
    check_library_settings(a_config(lora=read.lora))


def test_our_names_of_others_are_settings() -> None:
    sections = {
        "trainer": signature(TrainerConfig).parameters,
        "lora": signature(LoraConfig).parameters,
        "sampling": ENDPOINT_SAMPLING,
    }
    known = {*settings_of(SftConfig), *settings_of(GenerateConfig)}
    for ours in OTHERS:
        name = re.split("[ =]", ours)[0]
        section, dot, key = name.partition(".")
        if dot and section in sections:
            assert key in sections[section], ours
        else:
            assert section in known, ours
    assert not known & set(OURS), "a name of ours is not another's"


def test_the_page_has_the_table_of_names() -> None:
    page = (Path(__file__).parents[2] / "finetune/NAMES.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*`) \| (`.*`) \|$", page, re.MULTILINE)
    shown = {ours.strip("`"): others.replace("`", "").replace(",", "") for ours, others in rows}
    assert shown == OTHERS


def test_packs_whose_examples_would_not_be_kept_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FLASH_ATTENTION, "flash_attention_2", lambda: True)

    def check(**trainer: object) -> None:
        check_library_settings(a_config(attn_implementation="flash_attention_2", trainer=trainer))

    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        with pytest.raises(UserError, match=rf"set trainer.{name}=1$"):
            check(packing=True, **{name: 2})
        check(packing=False, **{name: 2})
        check(packing=True, **{name: 1})
    check(packing=True)  # a GPU takes one pack then, see test_memory


@pytest.mark.parametrize(("given", "at_once"), [({}, 1), ({"per_device_eval_batch_size": 4}, 4)])
def test_a_gpu_evaluates_one_row_or_pack_at_once_unless_told_otherwise(
    given: dict[str, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fits wherever a step fits: an evaluation keeps no activations."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    trainer = {"per_device_train_batch_size": 8, "bf16": False, **given}
    args = trainer_config(a_config(trainer=trainer))
    assert args.per_device_eval_batch_size == at_once


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        main(tmp_path / "nowhere.yaml")


CONFIGS = Path(__file__).parents[2] / "finetune/configs"
SHIPPED = sorted(path for path in CONFIGS.glob("*.yaml") if path.name != "fsdp2.yaml")


@pytest.mark.parametrize("path", SHIPPED)
def test_every_shipped_config_loads(path: Path) -> None:
    kind = BaseConfig if path.stem == "base" else SftConfig
    config = load_section(kind, path, "sft", ["train=x.jsonl", "run=x"])
    args = trainer_config(config)
    assert args.train_batch_size * args.gradient_accumulation_steps == config.batch


def test_the_two_configs_of_the_demo_differ_in_opinions_alone() -> None:
    """So the difference of their scores is that of the opinions."""
    without, with_them = (load_values(CONFIGS / f"{name}.yaml") for name in DEMOS)
    assert (without["sft"].pop("opinions"), with_them["sft"].pop("opinions")) == (False, True)
    assert without == with_them


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command that takes the place of this process; empty as long as none does."""
    command: list[str] = []

    def start(_: str, words: list[str], environment: dict[str, str]) -> None:
        assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 600, "a step and a save"
        assert "SIGUSR1" in environment["PET_SIGNALS_TO_HANDLE"]
        command[:] = words

    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return command


def test_accelerate_starts_a_process_for_each_gpu(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**settings: object) -> None:
        launch(a_config(**settings), Path("a.yaml"), ["gpus=8", "seed=1"])

    start(gpus=1)
    for name in LAUNCHED:
        monkeypatch.setenv(name, "3")
    start(gpus=8)
    assert not started, "it is alone, or one of the eight"
    monkeypatch.delenv("LOCAL_RANK")
    start(gpus=8)
    assert started[1:4] == ["-m", "accelerate.commands.launch", "--multi_gpu"]
    assert started[started.index("--num_processes") + 1] == "8"
    assert started[-6:] == ["-m", "panjue.prompts.cli", "sft", "a.yaml", "gpus=8", "seed=1"]
    start(gpus=8, accelerate="fsdp2.yaml")
    assert started[3:5] == ["--config_file", "fsdp2.yaml"]
    with pytest.raises(UserError, match=r"several processes; say how many, e\.g\. gpus=8"):
        start(accelerate="fsdp2.yaml")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    start(gpus=2)
    assert "2" in started
    with pytest.raises(UserError, match=r"^gpus: this machine has 2 for training; set gpus=2$"):
        start(gpus=8)
