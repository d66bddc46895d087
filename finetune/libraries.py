"""Which settings of trl, peft and bitsandbytes a training may carry, and what values they take."""

from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from inspect import signature
from typing import Annotated, Any, get_type_hints

import torch
from peft import LoraConfig
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import to_json
from transformers import BitsAndBytesConfig, get_scheduler
from transformers.training_args import OptimizerNames
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_liger_kernel_available,
)
from trl import SFTConfig as TrainerConfig
from trl import SFTTrainer

from panjue.finetune.settings import SftConfig
from panjue.prompts.plumbing.config import check_known, check_managed
from panjue.prompts.plumbing.errors import UserError

MANAGED_SETTINGS = {
    "output_dir": "run",
    "max_length": "max_tokens",
    "truncation_mode": "max_tokens",
    "dataset_text_field": "task",
    "chat_template_path": "model",
    "trust_remote_code": "nothing: a model's code is never run",
    "hub_token": "the environment variable HF_TOKEN: what is set here is written down",
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
    "dataset_num_proc": "nothing: rows are made by panjue",
    "shuffle_dataset": "nothing: the order is that of trainer.train_sampling_strategy",
    "model_init_kwargs": "model, dtype, quantization and attn_implementation",
    "pad_token": "nothing: what is padded counts for nothing",
    "eos_token": "nothing: rows are made before, and end as the model's replies do",
    "save_only_model": "nothing: without its optimizer a training cannot be gone on with",
    "ignore_data_skip": "nothing: a training that goes on takes the examples that are left",
    "restore_callback_states_from_checkpoint": "nothing: patience goes on where it was",
    "resume_from_checkpoint": "resume",
    "ddp_backend": "nothing: processes meet over what their devices have",
    "auto_find_batch_size": "trainer.per_device_train_batch_size: it would begin again midway",
    "enable_jit_checkpoint": "nothing: SIGTERM saves a checkpoint, a second one ends at once",
    "save_on_each_node": "nothing: all processes share one run folder",
    "eval_on_start": "nothing: on going on it would count against patience once more",
    "include_num_input_tokens_seen": "nothing: num_tokens in log.jsonl counts them",
    "dataloader_in_order": "nothing: a training that goes on must know the order",
}
"""trl settings that panjue makes itself -> the setting to use instead."""

MANAGED_LORA_SETTINGS = {
    "layer_replication": "nothing: vLLM has no model of more layers than its base",
    "task_type": "nothing: it is a causal model",
    "inference_mode": "nothing: the adapter is trained",
}
"""The same of peft."""

POSITIVE, NOT_NEGATIVE = Field(gt=0), Field(ge=0)
LIMITS = {
    "num_train_epochs": POSITIVE,
    "gradient_accumulation_steps": POSITIVE,
    "per_device_train_batch_size": POSITIVE,
    "per_device_eval_batch_size": POSITIVE,
    "eval_accumulation_steps": POSITIVE,
    "dataloader_prefetch_factor": POSITIVE,
    "dataloader_num_workers": NOT_NEGATIVE,
    "save_total_limit": POSITIVE,
    "logging_steps": NOT_NEGATIVE,
    "eval_steps": NOT_NEGATIVE,
    "save_steps": NOT_NEGATIVE,
    "learning_rate": NOT_NEGATIVE,
    "adam_epsilon": NOT_NEGATIVE,
    "adam_beta1": Field(ge=0, lt=1),
    "adam_beta2": Field(ge=0, lt=1),
    "neftune_noise_alpha": NOT_NEGATIVE,
    "r": POSITIVE,
    "lora_alpha": POSITIVE,
    "lora_dropout": Field(ge=0, le=1),
}
"""Limits that trl and peft do not check themselves, or only in the midst of things."""

UNTYPED = {"init_lora_weights", "lora_alpha", "fsdp", "debug"}
"""Settings whose annotation does not tell all that they may be: `pissa_niter_4`, 22.6, true."""


def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of a library's settings; none where a new version hides them from us."""
    try:
        return {key: hint for key, hint in get_type_hints(cls).items() if key not in UNTYPED}
    except NameError:  # imported for type checkers alone
        return {}


CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin a LoRA that also change the base's weights. The adapter beside the base as it was
would be another model than the trained one, and vLLM and merging know only that base."""


FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
"""Attention of a package -> whether transformers can use it here."""


def check_attention(name: str) -> None:
    """Refuse an attention of a package that is not there.

    Transformers would take a kernel of the hub in its place, which is code from elsewhere.

    Raises:
        UserError: The package is not there.
    """
    is_there = FLASH_ATTENTION.get(name)
    if is_there and not is_there():
        raise UserError(
            f"attn_implementation: {name} wants its package, which is not installed or does not "
            "work here; install it, or leave this at sdpa"
        )


def check_library_settings(config: SftConfig) -> None:
    """Refuse settings that trl, peft or bitsandbytes do not have or take, and those of panjue.

    Raises:
        UserError: Names the section, the setting, and what to write instead.
    """
    check_managed("trainer", config.trainer, MANAGED_SETTINGS)
    check_known("trainer", config.trainer, (f.name for f in fields(TrainerConfig) if f.init))
    check_managed("lora", config.lora, MANAGED_LORA_SETTINGS)
    check_known("lora", config.lora, (f.name for f in fields(LoraConfig) if f.init))
    check_known("quantization", config.quantization, signature(BitsAndBytesConfig).parameters)
    check_values("trainer", config.trainer, TrainerConfig)
    check_values("lora", config.lora, LoraConfig)
    check_attention(config.attn_implementation)
    start = config.lora.get("init_lora_weights", True)
    if str(start).lower().startswith(CHANGES_THE_BASE):
        raise UserError(
            f"lora.init_lora_weights: {start!r} changes the base too, and the adapter beside the "
            "base would be another model; take true, gaussian or orthogonal"
        )
    if start == "eva":
        raise UserError(
            "lora.init_lora_weights: 'eva' looks at data first, which panjue has no step for, and "
            "would be a start like any other; take true, gaussian or orthogonal"
        )
    sampling = config.trainer.get("accelerator_config") or {}
    check_managed("trainer.accelerator_config", sampling, {"use_seedable_sampler": "seed"})
    rows = config.trainer.get("per_device_train_batch_size", 0)
    if (
        config.trainer.get("packing")
        and config.attn_implementation in FLASH_ATTENTION
        and rows != 1
    ):
        # Of several rows transformers' FlashAttention takes each as one text, packed or not.
        raise UserError(
            "trainer.packing: with FlashAttention the examples of a pack are kept apart in batches "
            "of one pack only; set trainer.per_device_train_batch_size=1"
        )
    if config.robust and config.trainer.get("packing"):
        raise UserError("robust: packs hold examples of several groups; set trainer.packing=false")
    if (config.method == "qlora") != bool(config.quantization):
        raise UserError("quantization: goes with method=qlora, and method=qlora with it")
    for section, cls in (("lora", LoraConfig), ("quantization", BitsAndBytesConfig)):
        try:
            cls(**getattr(config, section))
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{section}: {str(error).splitlines()[0]}") from None


def check_values(section: str, given: Mapping[str, Any], cls: type) -> None:
    """Refuse values that the fields of a library's dataclass are not annotated for.

    The libraries do not look themselves: a word for a number would fail in the midst of training.

    Raises:
        UserError: Names the setting and its value.
    """
    hints, metadata = hints_of(cls), {field.name: field.metadata for field in fields(cls)}
    for key, value in given.items():
        try:  # as JSON: strict about numbers, but a list may stand for a tuple
            hint = hints.get(key)
            kind: Any = Annotated[hint, LIMITS.get(key, Field())] if hint else Any
            TypeAdapter(kind).validate_json(to_json(value), strict=True)
        except ValidationError as error:
            raise UserError(f"{section}.{key}: {error.errors()[0]['msg']}, got {value!r}") from None
        except PydanticSchemaGenerationError:
            continue  # of a type that no setting in YAML has
        choices = metadata[key].get("choices")
        if choices and value is not None and value not in choices:
            raise UserError(f"{section}.{key}: {value!r} is none of {', '.join(choices)}")


def check_what_training_imports(trainer: SFTTrainer) -> None:
    """Make now what the trainer makes at its first step, so that a dry run sees what is missing.

    Raises:
        ImportError, ValueError, TypeError: A package is not there, or the optimizer or scheduler
            does not take its arguments.
    """
    args = trainer.args
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ImportError("use_liger_kernel wants the package liger-kernel; pip install it")
    plain = copy(args)  # those by layer hang themselves onto the model's weights at once
    plain.optim = OptimizerNames(args.optim.removesuffix("_layerwise"))
    trainer.get_optimizer_cls_and_kwargs(plain, trainer.model)
    get_scheduler(
        args.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate),
        num_warmup_steps=0,
        num_training_steps=1,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
