"""The settings of trl, peft and bitsandbytes: those that panjue sets, and checks of the others.

The checks refuse settings that would give a wrong result silently, or fail late.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from inspect import signature
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from peft import LoraConfig
from pydantic import TypeAdapter, ValidationError
from transformers import BitsAndBytesConfig
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl import SFTConfig as TrainerConfig

from panjue.finetune.model import has_bf16
from panjue.finetune.settings import SftConfig
from panjue.prompts.plumbing.config import check_known, check_managed, first_complaint
from panjue.prompts.plumbing.errors import UserError, first_line, of_library

T = TypeVar("T")

INSTEAD = {
    "output_dir": "run",
    "max_length": "max_tokens",
    "gradient_accumulation_steps": "batch",
    "seed": "seed",
    "data_seed": "seed",
    "push_to_hub": "`hf upload` afterwards; push_to_hub would send the newest checkpoint",
    "hub_token": "the environment variable HF_TOKEN: settings are saved to disk",
}
"""Settings of trl -> the setting of panjue to use instead."""

SILENT = (
    # The loss is the trainer's own.
    "loss_type",
    "label_smoothing_factor",
    "completion_only_loss",
    "assistant_only_loss",
    # `finetune.data` makes the rows, `finetune.trainer` their order.
    "padding_free",
    "eval_packing",
    "pad_token",
    "eos_token",
    "shuffle_dataset",
    "dataloader_drop_last",
    "packing_strategy",
    "truncation_mode",
    "pad_to_multiple_of",
    "model_init_kwargs",  # `finetune.model` loads the model
    "trust_remote_code",  # panjue never runs code of a model
    "resume_from_checkpoint",  # the same command resumes
    "chat_template_path",
    "auto_find_batch_size",
    "fsdp",
    "fsdp_config",
    "accelerator_config",  # it would change which rows a step has
    # The lowest held-out loss is kept.
    "metric_for_best_model",
    "greater_is_better",
    # With these, a training would resume with other weights, rows or patience.
    "save_only_model",
    "ignore_data_skip",
    "eval_on_start",
    "enable_jit_checkpoint",
    "include_num_input_tokens_seen",  # it would count twice
    "use_cpu",
)
"""Settings of trl that would change a training silently."""

NOT_READ = (
    "local_rank",
    "do_train",
    "do_eval",
    "do_predict",
    # Nothing is pushed to a hub.
    "hub_private_repo",
    "hub_model_id",
    "hub_strategy",
    "hub_always_push",
    "hub_revision",
    # `finetune.data` makes the rows.
    "dataset_text_field",
    "dataset_num_proc",
    # `finetune.trainer` computes the held-out loss.
    "prediction_loss_only",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "eval_accumulation_steps",
    "include_for_metrics",
    "batch_eval_metrics",
    "bf16_full_eval",
    "fp16_full_eval",
)
"""Settings of trl that have no effect in these trainings."""

FIXED = {
    "restore_callback_states_from_checkpoint": True,  # a resumed run keeps its patience count
    "max_length": None,  # rows never exceed max_tokens, so trl must not cut
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "disable_tqdm": True,  # TrainingLog shows progress
    "logging_nan_inf_filter": False,  # trl would log NaN as 0; `ReplyTrainer.log` ends the training
    "router_aux_loss_coef": 0.0,  # the loss is that of the replies, without router logits
}
"""Settings of trl that panjue always sets to the same values."""

POSITIVE = {
    "max_steps": int,
    "per_device_train_batch_size": int,
    "per_device_eval_batch_size": int,
    "save_total_limit": int,
    "ddp_timeout": int,
    "num_train_epochs": int | float,
    "logging_steps": int | float,
    "eval_steps": int | float,
    "save_steps": int | float,
}
"""Settings that must be above 0; transformers takes 0 or less for `not set` in some of them."""

UNUSABLE = ("lora_bias", "alora_invocation_tokens")
"""Settings of peft that make an adapter unusable: peft cannot merge a bias into a layer without
one, and vLLM 0.32 supports neither biases nor activated adapters."""

USERS_WANDB_DIR = os.environ.get("WANDB_DIR")
"""Environment variable for wandb's folder, if the user does not want the run folder."""

KEEPS_BASE = (True, False, "gaussian", "orthogonal")
"""Initializations of LoRA that do not change the base. With any other, the adapter does not fit the
original base, which vLLM and `merge` use."""

FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
"""Attention that needs a package -> function that says whether transformers can use it."""


def check_library_settings(config: SftConfig) -> None:
    """Refuse settings that panjue sets itself, or that would give a wrong result silently."""
    check_trainer(config.trainer)
    check_lora(config.lora)
    if (config.method == "qlora") != bool(config.quantization):
        way_out = "quantization={} empties it" if config.quantization else "set both or neither"
        raise UserError(f"quantization: goes with method=qlora; {way_out}")
    if config.quantization.get("load_in_8bit"):
        raise UserError("quantization.load_in_8bit: method=qlora has four bits; use load_in_4bit")
    check_attention(config)
    check_keep(config)
    check_managed("trainer", config.trainer, (*SILENT, *FIXED))
    check_managed("lora", config.lora, ("layer_replication", "inference_mode"))  # neither works
    check_known("trainer", config.trainer, signature(TrainerConfig).parameters)
    check_known("lora", config.lora, signature(LoraConfig).parameters)
    # transformers ignores names that it does not know.
    check_known("quantization", config.quantization, signature(BitsAndBytesConfig).parameters)
    validated("lora", LoraConfig, config.lora)
    with of_library("quantization"):
        BitsAndBytesConfig(**config.quantization)


def check_keep(config: SftConfig) -> None:
    """Refuse to keep several adapters if there are none, or if they have no held-out loss."""
    if config.keep == 1:
        return
    if config.method == "full":
        raise UserError("keep: method=full trains no adapter; set keep=1")
    evaluates = config.trainer.get("eval_strategy", "no")
    if evaluates == "no" or evaluates != config.trainer.get("save_strategy", "steps"):
        way_out = "set both to epoch, or both to steps"
        raise UserError(f"keep: needs equal trainer.eval_strategy and save_strategy; {way_out}")


def check_trainer(given: Mapping[str, Any]) -> None:
    """Refuse settings of trl that another setting decides, or that make a training go wrong."""
    for name, use in INSTEAD.items():
        if name in given:
            raise UserError(f"trainer.{name}: use {use}")
    for name in NOT_READ:
        if name in given:
            raise UserError(f"trainer.{name}: has no effect here; leave it out")
    for name, kind in POSITIVE.items():
        value = given.get(name)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if value is not None and not (is_number and value > 0):
            what = "a whole number" if kind is int else "a number"
            raise UserError(f"trainer.{name}: must be {what} above 0, got {value}")
    if given.get("eval_strategy") == "steps" and not given.get("eval_steps"):
        # transformers would take `logging_steps`, which may change when a run resumes.
        raise UserError("trainer.eval_steps: set how often trainer.eval_strategy=steps evaluates")
    if given.get("save_strategy") == "best":  # the step of a signal would not be saved
        raise UserError("trainer.save_strategy: use that of eval_strategy; the best is kept then")
    if given.get("train_sampling_strategy") == "batch_rebalance":
        # Its order is the same for every seed and, after a resume, for every epoch.
        raise UserError("trainer.train_sampling_strategy: use group_by_length or random")
    if given.get("use_liger_kernel") and not find_spec("liger_kernel"):
        raise UserError("trainer.use_liger_kernel: the package liger-kernel is not installed")


def check_lora(given: Mapping[str, Any]) -> None:
    """Refuse settings of peft that make the adapter unusable or change the base."""
    if given.get("init_lora_weights", True) not in KEEPS_BASE:
        reason = "others change the base too"
        raise UserError(f"lora.init_lora_weights: use true, gaussian or orthogonal; {reason}")
    for name in UNUSABLE:
        if given.get(name):
            raise UserError(f"lora.{name}: could be neither merged nor served; leave it out")
    if "task_type" in given:
        raise UserError("lora.task_type: is CAUSAL_LM already; remove it")


def validated(section: str, kind: type[T], settings: Mapping[str, Any]) -> T:
    """Return a library's dataclass with these settings, after checking their types."""
    with of_library(section):
        try:
            return TypeAdapter(kind).validate_python(settings)
        except ValidationError as error:
            complaint = " ".join(first_complaint(error).split())
            raise UserError(f"{section}: {complaint}") from None


def check_attention(config: SftConfig) -> None:
    """Refuse FlashAttention if it is not installed, or would let packed examples see each other."""
    packing = config.trainer.get("packing", False)
    if packing not in (True, False, "auto"):
        raise UserError(f"trainer.packing: must be true, false or auto, got {packing}")
    name = config.attn_implementation
    if name not in FLASH_ATTENTION:
        return
    if not FLASH_ATTENTION[name]():
        # transformers would download a kernel from the hub, which is foreign code.
        raise UserError(
            f"attn_implementation: {name} needs its package, which is not installed or does not "
            "work here; install it, or set attn_implementation=sdpa"
        )
    if packing and config.trainer.get("per_device_train_batch_size") != 1:
        # In a batch of several rows, transformers' FlashAttention treats each pack as one text.
        raise UserError(
            "trainer.packing: FlashAttention separates the examples of a pack only in batches of "
            "one pack; set trainer.per_device_train_batch_size=1"
        )


def trainer_config(config: SftConfig) -> TrainerConfig:
    """Return trl's settings: the config's, defaults for this machine, and those panjue sets."""
    has_accelerator = torch.accelerator.is_available()
    at_once, times = shares(config, PartialState().num_processes)
    settings = {
        "gradient_checkpointing": has_accelerator,
        "per_device_eval_batch_size": 1 if has_accelerator else 8,
        "logging_steps": 10,
        "report_to": ["tensorboard"],
        "run_name": config.run.name,
        "save_total_limit": 2,
        **config.trainer,
        **precision(config.trainer),
        **FIXED,
        "output_dir": str(config.run / "checkpoints"),
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": times,
        "seed": config.seed,
        "data_seed": config.seed,  # otherwise the order depends on the number of processes
        "use_cpu": not has_accelerator,
    }
    settings.pop("packing", None)  # `data.pack` packs
    if settings.get("eval_strategy", "no") == settings.get("save_strategy", "steps") != "no":
        settings.setdefault("load_best_model_at_end", True)
        settings.setdefault("metric_for_best_model", "eval_loss")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(config.run / "tensorboard")
    args = validated("trainer", TrainerConfig, settings)
    if "wandb" in args.report_to:
        os.environ["WANDB_DIR"] = USERS_WANDB_DIR or str(config.run)
    check_reports(args.report_to)
    # A single process would use all visible GPUs (transformers/training_args.py:1917), by
    # DataParallel, which trl refuses.
    args._n_gpu = min(args.n_gpu, 1)
    return args


def check_reports(names: Sequence[str]) -> None:
    """Refuse a service in `report_to` if its package is missing or broken.

    transformers would fail only when the trainer is made, after the text classifier is fitted.
    """
    for name in names:
        with of_library("trainer.report_to"):
            [callback] = get_reporting_integration_callbacks([name])
        try:
            callback()
        except Exception as error:  # a broken package may raise anything
            problem = f"does not work here ({first_line(error)})"
            if find_spec(name) is None:
                problem = "is not installed"
            install = f"{sys.executable} -m pip install --upgrade {name}"
            raise UserError(f"trainer.report_to: {name} {problem}; {install}") from None


def precision(given: Mapping[str, Any]) -> dict[str, bool]:
    """Return trl's `bf16` and `fp16`: those `given`, or the type that this machine can use."""
    if "bf16" in given or "fp16" in given:
        return {name: bool(given.get(name)) for name in ("bf16", "fp16")}
    bf16 = has_bf16()
    return {"bf16": bf16, "fp16": torch.cuda.is_available() and not bf16}


def shares(config: SftConfig, processes: int) -> tuple[int, int]:
    """Return how many examples a process takes at once, and how many times in a step of `batch`."""
    per_process, rest = divmod(config.batch, processes)
    if rest or not per_process:
        raise UserError(
            f"batch: {config.batch} examples a step cannot be divided among {processes} processes; "
            f"set batch={processes * max(1, per_process)}"
        )
    default = 1 if torch.accelerator.is_available() else per_process
    most = int(config.trainer.get("per_device_train_batch_size") or default)
    at_once = min(most, per_process)
    while per_process % at_once:  # all parts must be equal
        at_once -= 1
    return at_once, per_process // at_once
