"""Settings of a training run, and the checks that need no torch."""

import ast
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from panjue.prompts.model import is_hub_name, model_folder
from panjue.prompts.plumbing.config import (
    DATA,
    Config,
    check_known,
    load_section,
    load_values,
)
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import OnBadRow, Reader
from panjue.prompts.task import load_task

STRATEGIES = ("logging_strategy", "eval_strategy", "save_strategy")
"""trl settings that may be `no`: when to log, evaluate and save."""


class RobustConfig(Config):
    """An objective over groups of examples."""

    method: Literal["erm", "group_uniform", "group_dro", "vrex", "irm", "adversarial"] = "erm"
    """erm: mean over examples. group_uniform: mean over groups. group_dro: more weight on groups
    with high losses. vrex: penalty on the variance between groups. irm: penalty unless one scale of
    the logits is best for all groups. adversarial: penalty if prompt states reveal the group."""
    by: str
    """Attribute that defines the groups. Examples without it form a group of their own."""
    step: float = Field(0.01, gt=0)
    """For group_dro: how fast the weights of groups with high losses grow."""
    weight: float = Field(0.5, ge=0)
    """For vrex, irm and adversarial: weight of the penalty."""
    warmup: int = Field(500, ge=0)
    """For irm: optimizer steps before the penalty counts."""


class SftConfig(Config):
    """Settings of one run; the resolved copy is saved in the run folder."""

    task: str = "judgment"
    """Name of a folder in prompts/tasks/."""
    run: Path
    """Folder for all output of this run."""
    model: str
    """Base model: a folder, or a name on the hub."""
    train: Path
    """Training cases."""
    dev: Path | None = None
    """Held-out cases for loss and score; without it, a tenth of `train`, chosen by hash."""
    mix: Path | None = None
    """Further cases to train on (for example, with one defendant); never held out."""
    mix_ratio: float = Field(1.0, ge=0)
    """Cases taken from `mix` per case of `train`, chosen by hash; all if `mix` has fewer."""
    on_bad_row: OnBadRow = "stop"
    """If a row of these files is not a valid case: stop the run, or list and skip the row."""
    groups: Path | None = None
    """File of rows with an `id` and groups, added to the groups in the case files."""
    robust: RobustConfig | None = None
    """Objective over groups, e.g. `{method: group_dro, by: gender}`. All but `erm` sample groups
    equally often and ignore `trainer.train_sampling_strategy`."""
    method: Literal["lora", "qlora", "full"] = "lora"
    """LoRA, LoRA on a four-bit base, or all weights."""
    max_tokens: int = Field(4096, ge=64)
    """Prompt plus reply. Longer prompts are shortened and counted; replies are never cut."""
    dtype: str = "auto"
    """Type of the base weights. auto: bfloat16 if they are frozen and `trainer.bf16` is on."""
    token_weights: dict[str, float] = Field(default_factory=dict)
    """Field of the reply -> weight of its tokens in the loss, e.g. `{penalty: 3}`; default 1."""
    score_examples: int = Field(64, ge=0)
    """Held-out examples answered and scored at each evaluation; the best adapter is kept. Tasks
    with several calls per example score none and use the held-out loss."""
    solve: dict[str, Any] = Field(default_factory=dict)
    """Settings of a task with several calls per example; training uses the same calls."""
    classifier: bool = True
    """Whether to fit a text classifier beside the adapter, if the task's answers are decided: on
    the cases of `train` and `mix` that are not held out, at most 12,000 of each file. A finished
    training keeps what it has."""
    patience: int = Field(3, ge=1)
    """Evaluations without a better score after which training stops."""
    seed: int = 0
    """Seed of the data order, the adapter's initial weights and dropout."""
    resume: bool = True
    """Resume from the newest complete checkpoint of this run; false deletes its checkpoints."""
    dry_run: bool = False
    """Print the plan and one example as the model sees it, then stop before the first step."""
    attn_implementation: Literal[
        "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager"
    ] = "sdpa"
    """Attention of transformers; the FlashAttention ones need its package."""
    loraplus_lr_ratio: float | None = Field(None, ge=1)
    """LoRA+ (arXiv:2402.12354): learning rate of LoRA's B over that of A; null: they are equal."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Passed unchanged to trl's SFTConfig."""
    lora: dict[str, Any] = Field(default_factory=dict)
    """Passed unchanged to peft's LoraConfig."""
    quantization: dict[str, Any] = Field(default_factory=dict)
    """Passed unchanged to transformers' BitsAndBytesConfig; used by `method: qlora`."""

    @field_validator("trainer")
    @classmethod
    def _no_is_a_strategy(cls, trainer: dict[str, Any]) -> dict[str, Any]:
        # YAML reads an unquoted `no` as false.
        return {
            key: "no" if value is False and key in STRATEGIES else value
            for key, value in trainer.items()
        }


class BaseConfig(SftConfig):
    """Settings of the tiny base: those of full fine-tuning, plus its vocabulary and shape."""

    vocab_size: int = Field(4096, ge=512)
    """Number of tokens, the 256 bytes included."""
    shape: dict[str, Any] = Field(default_factory=dict)
    """Passed unchanged to transformers' Qwen3Config."""


C = TypeVar("C", bound=SftConfig)


def sft_settings(path: Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Read the config at `path` and check it before torch is imported.

    Of the settings of trl and peft only the names are checked here;
    `libraries.check_library_settings` checks the values later.

    Raises:
        UserError: A key or value is wrong, or the task, a file or the base model is missing.
    """
    config = _settings(SftConfig, path, overrides)
    if not is_hub_name(config.model):
        model_folder(config.model)
    return config


def base_settings(path: Path, overrides: Sequence[str] = ()) -> BaseConfig:
    """Read the settings of the tiny base, whose model need not exist yet."""
    return _settings(BaseConfig, path, overrides)


def _settings(cls: type[C], path: Path, overrides: Sequence[str]) -> C:
    """Read the section `sft` of a config file, which must exist, and check its names and files."""
    load_values(path)  # raises if the file is missing
    config = load_section(cls, path, "sft", overrides)
    check_data(config)
    check_names(config)
    return config


SOURCES = {
    "trainer": (
        ("trl", "trainer/sft_config.py", "SFTConfig"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        ("transformers", "training_args.py", "TrainingArguments"),
    ),
    "lora": (
        ("peft", "tuners/lora/config.py", "LoraConfig"),
        ("peft", "config.py", "PeftConfig"),
        ("peft", "config.py", "PeftConfigMixin"),
    ),
}
"""Section -> package, file and class of the dataclasses whose fields are its settings."""


def check_names(config: SftConfig) -> None:
    """Refuse settings that trl and peft do not have.

    Their names are read from the source files: importing the libraries takes seconds.

    Raises:
        UserError: Names the section, the setting and the nearest known one.
    """
    for section, sources in SOURCES.items():
        known = [annotated_fields(*source) for source in sources]
        if all(known):  # else a version with other files; then the check after the import must do
            check_known(section, getattr(config, section), set().union(*known))


def annotated_fields(package: str, file: str, name: str) -> set[str]:
    """Return the annotated fields of a class, read from its source; none if it is not there."""
    spec = find_spec(package)
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    tree = ast.parse(path.read_text("utf-8") if path and path.exists() else "")
    return {
        part.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }


def check_data(config: SftConfig) -> None:
    """Refuse a task or data file that does not exist, or whose first row is no example."""
    task = load_task(config.task)
    for name in DATA:
        file = getattr(config, name)
        if file is not None and not file.exists():
            raise UserError(f"{name}: no file {file}")
        if file is not None and name != "groups":  # a file of another format is found at once
            next(Reader(task, on_bad_row=config.on_bad_row).read(file), None)
