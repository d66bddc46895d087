"""Settings of a training run, and which of its libraries' settings they may carry."""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig
from pydantic import Field
from transformers import BitsAndBytesConfig
from trl import SFTConfig as TrainerConfig

from panjue.finetune.robust import RobustConfig
from panjue.prompts.config import Config, check_settings
from panjue.prompts.errors import UserError
from panjue.prompts.skip import OnBadRow

OURS = {
    "output_dir": "run",
    "max_length": "max_tokens",
    "truncation_mode": "max_tokens",
    "dataset_text_field": "task",
    "chat_template_path": "model",
    "trust_remote_code": "nothing: a model's code is never run",
    "seed": "seed",
    "data_seed": "seed",
    "use_cpu": "nothing: a GPU is used where there is one",
    "disable_tqdm": "nothing: panjue shows its own progress",
    "packing_strategy": "nothing: packs hold whole examples",
    "eval_packing": "nothing: held-out examples stand alone",
    "padding_free": "packing",
    "completion_only_loss": "nothing: the loss is on the reply",
    "assistant_only_loss": "nothing: the loss is on the reply",
    "loss_type": "token_weights",
    "label_smoothing_factor": "nothing: the loss is the likelihood of the reply",
    "pad_to_multiple_of": "nothing: rows are padded to the longest",
    "router_aux_loss_coef": "nothing: experts are not balanced anew",
    "dataset_kwargs": "nothing: rows are made by panjue",
}
"""trl settings that panjue makes itself -> the setting to use instead."""


class SftConfig(Config):
    """Settings of one run; the resolved copy is saved beside the adapter."""

    task: str = "judgment"
    """Name of a file in prompts/tasks/."""
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
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Passed to trl's SFTConfig as they are."""
    lora: dict[str, Any] = Field(default_factory=dict)
    """Passed to peft's LoraConfig as they are."""
    quantization: dict[str, Any] = Field(default_factory=dict)
    """Passed to transformers' BitsAndBytesConfig as they are; used by `method: qlora`."""


def check_all_settings(config: SftConfig) -> None:
    """Refuse missing files and wrong library settings before anything slow begins."""
    for name in ("train", "dev", "mix", "groups"):
        file = getattr(config, name)
        if file is not None and not file.exists():
            raise UserError(f"{name}: no file {file}")
    check_library_settings(config)


def check_library_settings(config: SftConfig) -> None:
    """Refuse settings that trl, peft or bitsandbytes do not have, and those that are panjue's.

    Raises:
        UserError: Names the section, the setting, and what to write instead.
    """
    trainer = (f.name for f in fields(TrainerConfig) if f.init)
    check_settings("trainer", config.trainer, trainer, OURS)
    lora = (f.name for f in fields(LoraConfig) if f.init)
    check_settings("lora", config.lora, lora, {"task_type": "nothing: it is a causal model"})
    known = signature(BitsAndBytesConfig).parameters
    check_settings("quantization", config.quantization, known)
    keep = config.trainer.get("save_total_limit", 1)
    if keep is not None and not (isinstance(keep, int) and keep >= 1):
        raise UserError("trainer: save_total_limit must be a number from 1, or null for all")
    if config.robust and config.trainer.get("packing"):
        raise UserError("robust: packs hold examples of several groups; set trainer.packing=false")
    if (config.method == "qlora") != bool(config.quantization):
        raise UserError("quantization: goes with method=qlora, and method=qlora with it")
    try:
        LoraConfig(**config.lora)
        BitsAndBytesConfig(**config.quantization)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"lora, quantization: {str(error).splitlines()[0]}") from None
