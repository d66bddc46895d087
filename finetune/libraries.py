"""The settings for trl, peft and bitsandbytes: checks of names and values, and trl's own."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from traceback import walk_tb
from typing import Annotated, Any, get_type_hints

import torch
from peft import LoraConfig
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import to_json
from transformers import BitsAndBytesConfig
from transformers.integrations import integration_utils
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_liger_kernel_available,
)
from trl import SFTConfig as TrainerConfig

from panjue.finetune.model import has_bf16
from panjue.finetune.settings import SftConfig
from panjue.prompts.plumbing.config import check_known, check_managed
from panjue.prompts.plumbing.errors import (
    DISK_FULL_ERRORS,
    UserError,
    did_you_mean,
    first_line,
)
from panjue.prompts.task import Task

MANAGED_SETTINGS = {
    "output_dir": "run",
    "max_length": "max_tokens",
    "truncation_mode": "max_tokens",
    "dataset_text_field": "task",
    "chat_template_path": "model",
    "trust_remote_code": "nothing: a model's code is never run",
    "hub_token": "the environment variable HF_TOKEN: settings are saved to disk",
    "seed": "seed",
    "data_seed": "seed",
    "use_cpu": "nothing: a GPU is used if there is one",
    "disable_tqdm": "nothing: panjue shows its own progress",
    "packing_strategy": "nothing: packs hold whole examples",
    "eval_packing": "nothing: held-out examples are not packed",
    "padding_free": "packing",
    "completion_only_loss": "nothing: the loss is on the reply",
    "assistant_only_loss": "nothing: the loss is on the reply",
    "loss_type": "token_weights",
    "label_smoothing_factor": "nothing: the loss is the negative log-likelihood of the reply",
    "pad_to_multiple_of": "nothing: rows are padded to the longest in the batch",
    "router_aux_loss_coef": "nothing: training has no router loss",
    "dataset_kwargs": "nothing: rows are made by panjue",
    "dataset_num_proc": "nothing: rows are made by panjue",
    "shuffle_dataset": "nothing: trainer.train_sampling_strategy sets the order",
    "model_init_kwargs": "model, dtype, quantization and attn_implementation",
    "pad_token": "nothing: padding has no effect",
    "eos_token": "nothing: rows end with the model's own end token",
    "save_only_model": "nothing: without the optimizer state a training cannot resume",
    "ignore_data_skip": "nothing: a resumed training takes the remaining examples",
    "restore_callback_states_from_checkpoint": "nothing: resuming keeps the patience count",
    "resume_from_checkpoint": "resume",
    "ddp_backend": "nothing: it follows from the device",
    "auto_find_batch_size": "trainer.per_device_train_batch_size: it would restart midway",
    "fsdp": "nothing: accelerate launch --config_file finetune/configs/fsdp2.yaml (make: GPUS=)",
    "fsdp_config": "nothing: it is the file for accelerate launch",
    "enable_jit_checkpoint": "nothing: SIGTERM saves a checkpoint, a second one stops at once",
    "save_on_each_node": "nothing: all processes share one run folder",
    "eval_on_start": "nothing: after resuming it would count against patience again",
    "include_num_input_tokens_seen": "nothing: num_tokens in log.jsonl counts them",
    "dataloader_in_order": "nothing: resuming needs a fixed order",
}
"""trl settings that panjue sets itself -> the setting to use instead."""

MANAGED_LORA_SETTINGS = {
    "layer_replication": "nothing: vLLM cannot add layers to the base",
    "task_type": "nothing: the model is causal",
    "inference_mode": "nothing: the adapter is trained",
}
"""The same for peft."""

POSITIVE, NOT_NEGATIVE = Field(gt=0), Field(ge=0)
VALUE_LIMITS = {
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
"""Limits that trl and peft do not check, or check only during training."""

UNCHECKED_SETTINGS = {"init_lora_weights", "lora_alpha", "debug"}
"""Settings that take more values than their annotation says: `pissa_niter_4`, 22.6."""


def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of a library's settings; empty if they cannot be resolved."""
    try:
        hints = get_type_hints(cls)
    except NameError:  # a type that the library imports for type checkers only
        return {}
    return {key: hint for key, hint in hints.items() if key not in UNCHECKED_SETTINGS}


BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA initializations that also change the base's weights. vLLM and `merge` use the original base;
with it, the adapter would be a different model from the trained one."""

FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
"""Attention that needs a package -> function that says whether transformers can use it here."""


def check_attention(name: str) -> None:
    """Refuse an attention whose package is missing.

    Transformers would instead download a kernel, which is foreign code, from the hub.

    Raises:
        UserError: The package is missing.
    """
    is_available = FLASH_ATTENTION.get(name)
    if is_available and not is_available():
        raise UserError(
            f"attn_implementation: {name} needs its package, which is not installed or does not "
            "work here; install it, or set attn_implementation=sdpa"
        )


TRACKER_PACKAGES = {
    "azure_ml": "azureml-core",
    "comet_ml": "comet_ml",
    "flyte": "flytekit",
    "dagshub": "dagshub mlflow",
}
"""Trackers whose package has another name, or that need two."""

TRACKER_CHECKS = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}
"""Trackers that transformers' function `is_…_available` calls otherwise."""


def check_trackers(names: str | list[str] | None) -> None:
    """Refuse trackers (wandb, mlflow, …) that cannot be used here.

    Raises:
        UserError: Names the tracker, and what it needs.
    """
    for name in [names] if isinstance(names, str) else names or []:
        if name not in {*integration_utils.INTEGRATION_TO_CALLBACK, "all", "none"}:
            known = integration_utils.INTEGRATION_TO_CALLBACK
            raise UserError(f"trainer.report_to: no tracker {name!r}{did_you_mean(name, known)}")
        if name in ("all", "none"):
            continue
        is_available = getattr(
            integration_utils, f"is_{TRACKER_CHECKS.get(name, name)}_available", None
        )
        if is_available and not is_available():
            way_out = f"run .venv/bin/pip install {TRACKER_PACKAGES.get(name, name)}"
            if name == "kubeflow":
                way_out = "it works only where Kubeflow has set KUBEFLOW_TRAINER_SERVER_URL"
            raise UserError(f"trainer.report_to: {name} cannot be used here; {way_out}")


@contextmanager
def tracker_errors() -> Iterator[None]:
    """Turn what a tracker raises (it has no key, or its version does not fit) into a UserError.

    A full disk is no fault of the tracker that notices it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
            raise
        for frame, _ in walk_tb(error.__traceback__):
            if frame.f_code.co_filename == integration_utils.__file__:
                name = type(frame.f_locals.get("self")).__name__.removesuffix("Callback")
                raise UserError(
                    f"trainer.report_to: {name}: {first_line(error)} "
                    f"({type(error).__name__} of its package); set it up or leave it out, then run "
                    "the same command to resume"
                ) from None
        raise


def check_liger() -> None:
    """Refuse liger kernels where they cannot run.

    Raises:
        UserError: There is no GPU or no package.
    """
    if not torch.accelerator.is_available():
        raise UserError("trainer.use_liger_kernel: its kernels need a GPU; leave it out")
    if not is_liger_kernel_available():
        raise UserError(
            "trainer.use_liger_kernel: needs liger-kernel; run .venv/bin/pip install liger-kernel"
        )


def check_library_settings(config: SftConfig) -> None:
    """Refuse settings that trl, peft or bitsandbytes do not accept, or that panjue sets itself.

    Raises:
        UserError: A setting is refused; the message names it and what to use instead.
    """
    check_managed("trainer", config.trainer, MANAGED_SETTINGS)
    check_known("trainer", config.trainer, (f.name for f in fields(TrainerConfig) if f.init))
    check_managed("lora", config.lora, MANAGED_LORA_SETTINGS)
    check_known("lora", config.lora, (f.name for f in fields(LoraConfig) if f.init))
    check_known("quantization", config.quantization, signature(BitsAndBytesConfig).parameters)
    check_values("trainer", config.trainer, TrainerConfig)
    check_values("lora", config.lora, LoraConfig)
    check_attention(config.attn_implementation)
    check_trackers(config.trainer.get("report_to"))
    if config.trainer.get("use_liger_kernel"):
        check_liger()
    init = config.lora.get("init_lora_weights", True)
    if str(init).lower().startswith(BASE_CHANGING_INITS):
        raise UserError(
            f"lora.init_lora_weights: {init!r} changes the base too, and the adapter does not fit "
            "the original base; use true, gaussian or orthogonal"
        )
    if init == "eva":
        raise UserError(
            "lora.init_lora_weights: 'eva' needs a pass over the data, which panjue does not do; "
            "use true, gaussian or orthogonal"
        )
    sampling = config.trainer.get("accelerator_config") or {}
    check_managed("trainer.accelerator_config", sampling, {"use_seedable_sampler": "seed"})
    packing = config.trainer.get("packing")
    batch_size = config.trainer.get("per_device_train_batch_size", 0)
    if packing and config.attn_implementation in FLASH_ATTENTION and batch_size != 1:
        # In a batch of several rows, transformers' FlashAttention treats each pack as one text.
        raise UserError(
            "trainer.packing: FlashAttention separates the examples of a pack only in batches of "
            "one pack; set trainer.per_device_train_batch_size=1"
        )
    if config.robust and packing:
        raise UserError("robust: packs hold examples of several groups; set trainer.packing=false")
    if config.loraplus_lr_ratio and config.method == "full":
        raise UserError("loraplus_lr_ratio: goes with method=lora or qlora")
    if (config.method == "qlora") != bool(config.quantization):
        raise UserError("quantization: goes with method=qlora; set both or neither")
    for section, cls in (("lora", LoraConfig), ("quantization", BitsAndBytesConfig)):
        try:
            cls(**getattr(config, section))
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{section}: {first_line(error)}") from None


def check_values(section: str, given: Mapping[str, Any], cls: type) -> None:
    """Refuse values that do not match the annotations of a library's dataclass.

    The libraries do not check them: a word instead of a number would fail during training.

    Raises:
        UserError: A value does not match; the message names the setting and the value.
    """
    hints, metadata = hints_of(cls), {field.name: field.metadata for field in fields(cls)}
    for key, value in given.items():
        try:  # as JSON: strict about numbers, but a list is valid for a tuple
            hint = hints.get(key)
            checked: Any = Annotated[hint, VALUE_LIMITS.get(key, Field())] if hint else Any
            TypeAdapter(checked).validate_json(to_json(value), strict=True)
        except ValidationError as error:
            raise UserError(f"{section}.{key}: {error.errors()[0]['msg']}, got {value!r}") from None
        except PydanticSchemaGenerationError:
            continue  # a type that YAML cannot express
        choices = metadata[key].get("choices")
        if choices and value is not None and value not in choices:
            raise UserError(f"{section}.{key}: {value!r} is none of {', '.join(choices)}")


def trainer_config(config: SftConfig, task: Task, *, evaluates: bool) -> TrainerConfig:
    """Return trl's settings: the config's, defaults for this machine, and those panjue manages."""
    has_accelerator = torch.accelerator.is_available()
    headline = f"eval_{task.score.names[-1]}" if config.score_examples else "eval_loss"
    defaults: dict[str, Any] = {
        "bf16": has_bf16(),
        "gradient_checkpointing": has_accelerator,
        "logging_steps": 10,
        "restore_callback_states_from_checkpoint": True,  # a resumed run keeps its patience count
        "report_to": ["tensorboard"],
    }
    settings = {**defaults, **config.trainer, **({} if evaluates else {"eval_strategy": "no"})}
    settings.pop("packing", None)  # panjue packs itself, so that each token keeps its part
    settings.pop("save_total_limit", None)  # PartsTrainer drops old checkpoints itself
    if settings.get("eval_strategy", "no") == settings.get("save_strategy", "steps") != "no":
        best = {"load_best_model_at_end": True, "metric_for_best_model": headline}
        settings = {**best, **settings}
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(config.run / "tensorboard")
    try:
        return TrainerConfig(
            **settings,
            output_dir=str(config.run / "checkpoints"),
            max_length=None,  # rows never exceed max_tokens, so trl must not cut
            dataset_kwargs={"skip_prepare_dataset": True},
            seed=config.seed,
            data_seed=config.seed,  # otherwise the order depends on the number of processes
            use_cpu=not has_accelerator,
            disable_tqdm=True,  # the journal shows progress
        )
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"trainer: {first_line(error)}") from None
