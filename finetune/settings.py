"""Settings of a training run, and what can be said of them before the libraries are imported."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from panjue.prompts.plumbing.config import DATA, Config, load_config
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.model import is_hub_name, model_folder
from panjue.prompts.reader import OnBadRow
from panjue.prompts.task import load_task

STRATEGIES = ("logging_strategy", "eval_strategy", "save_strategy")
"""trl settings that may be `no`: when something is logged, measured, saved."""


class RobustConfig(Config):
    """Which objective, over which groups."""

    method: Literal["erm", "group_uniform", "group_dro", "vrex", "irm", "adversarial"] = "erm"
    """Mean over examples; over groups; worst-case weights; variance of groups; one scale that is
    best for all groups; no group to be told from the prompt's states."""
    by: str
    """Attribute of the groups. Examples whose group nobody knows are a group of their own."""
    step: float = Field(0.01, gt=0)
    """Of group_dro: how fast the weights of groups with high losses grow."""
    weight: float = Field(0.5, ge=0)
    """Of the penalty of vrex, irm and adversarial."""
    warmup: int = Field(500, ge=0)
    """Of irm: optimizer steps before the penalty counts."""


class SftConfig(Config):
    """Settings of one run; the resolved copy is saved beside the adapter."""

    task: str = "judgment"
    """Name of a folder in prompts/tasks/."""
    run: Path
    """Folder that everything is written to."""
    model: str
    """Base model: a folder, or a name on the hub."""
    train: Path
    """Training cases."""
    dev: Path | None = None
    """Held-out cases, for loss and score; without it a tenth of `train`, chosen by hash, serves."""
    mix: Path | None = None
    """Further cases to train on (those of one defendant, say); never held out."""
    mix_ratio: float = Field(1.0, ge=0)
    """Cases taken from `mix` per case of `train`, chosen by hash; all, where it has fewer."""
    on_bad_row: OnBadRow = "stop"
    """What a row of these files does that is no case: stop the run, or be listed and left out."""
    groups: Path | None = None
    """Rows of `id` and further groups of the examples, beside those that stand in their files."""
    robust: RobustConfig | None = None
    """An objective that looks at groups: `{method: group_dro, by: gender}`. All but `erm` draw
    groups equally often, whatever `trainer.train_sampling_strategy` says."""
    method: Literal["lora", "qlora", "full"] = "lora"
    """LoRA, LoRA on a four-bit base, or all weights."""
    max_tokens: int = Field(4096, ge=64)
    """Prompt plus reply. Longer cases are shortened by `fit` and counted; a reply is never cut."""
    dtype: str = "auto"
    """Type of the base weights: bfloat16 where they are frozen and `trainer.bf16` is on."""
    token_weights: dict[str, float] = Field(default_factory=dict)
    """Field of the reply -> weight of its tokens in the loss, e.g. `{penalty: 3}`; else 1."""
    score_examples: int = Field(64, ge=0)
    """Held-out examples answered and scored at each evaluation; the best adapter is kept. None
    where an example takes several calls: there the held-out loss decides."""
    solve: dict[str, Any] = Field(default_factory=dict)
    """How an example of several calls is solved: a model is trained on the calls of that way."""
    patience: int = Field(3, ge=1)
    """Evaluations without a better score after which training stops."""
    seed: int = 0
    """Of the data order, the adapter's start and dropout."""
    resume: bool = True
    """Continue from the newest complete checkpoint of this run; false drops those there are."""
    dry_run: bool = False
    """Stop before the first step, after showing the plan and one example as the model sees it."""
    attn_implementation: Literal[
        "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager"
    ] = "sdpa"
    """Which attention transformers computes with; those of FlashAttention want its package."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Passed to trl's SFTConfig as they are."""
    lora: dict[str, Any] = Field(default_factory=dict)
    """Passed to peft's LoraConfig as they are."""
    quantization: dict[str, Any] = Field(default_factory=dict)
    """Passed to transformers' BitsAndBytesConfig as they are; used by `method: qlora`."""

    @field_validator("trainer")
    @classmethod
    def _no_is_a_strategy(cls, trainer: dict[str, Any]) -> dict[str, Any]:
        # YAML reads an unquoted `no` as false.
        return {
            key: "no" if value is False and key in STRATEGIES else value
            for key, value in trainer.items()
        }


class BaseConfig(SftConfig):
    """Settings of the tiny base: those of a full fine-tuning, and the shape it starts from."""

    vocab_size: int = Field(4096, ge=512)
    """Tokens, the 256 bytes included."""
    shape: dict[str, Any] = Field(default_factory=dict)
    """Passed to transformers' Qwen3Config as they are."""


def sft_settings(path: Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Read the config at `path`, and refuse what is wrong with it before torch is imported.

    What trl and peft must be asked about is checked later, by `libraries.check_library_settings`.

    Raises:
        UserError: A key or value is wrong, or the task, a file or the base model is not there.
    """
    config = load_config(SftConfig, path, overrides)
    check_data(config)
    if not is_hub_name(config.model):
        model_folder(config.model)
    return config


def base_settings(path: Path, overrides: Sequence[str] = ()) -> BaseConfig:
    """Do the same for the tiny base, whose model is made and need not be there."""
    config = load_config(BaseConfig, path, overrides)
    check_data(config)
    return config


def check_data(config: SftConfig) -> None:
    """Refuse a task or a data file that is not there."""
    load_task(config.task)
    for name in DATA:
        file = getattr(config, name)
        if file is not None and not file.exists():
            raise UserError(f"{name}: no file {file}")
