"""The settings of trl, peft and bitsandbytes: those that panjue sets, and checks of the others.

The checks refuse settings that would give a wrong result silently, or fail late.
"""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from inspect import signature
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from peft import LoraConfig
from pydantic import TypeAdapter, ValidationError
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import (
    BitsAndBytesConfig,
    IntervalStrategy,
    SchedulerType,
    Trainer,
    get_scheduler,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.optimization import GreedyLR
from transformers.training_args import OptimizerNames
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl import SFTConfig as TrainerConfig

from panjue.finetune.model import CHECKPOINTING, CHECKPOINTING_NAMES, has_bf16, lora_of
from panjue.finetune.settings import PATTERNS, SftConfig
from panjue.finetune.start import refuse_unequal
from panjue.finetune.trained import Trained
from panjue.prompts.plumbing.config import check_known, check_managed, first_complaint
from panjue.prompts.plumbing.errors import UserError, first_line, no_such, of_library
from panjue.prompts.plumbing.files import flat
from panjue.prompts.plumbing.records import MANIFEST

T = TypeVar("T")


def check_library_settings(config: SftConfig) -> None:
    """Refuse settings that panjue sets itself, or that would give a wrong result silently."""
    check_known("trainer", config.trainer, {*signature(TrainerConfig).parameters, *RENAMED})
    # A run that an earlier version began may resume with settings that were allowed then.
    if not (config.run / MANIFEST).exists():
        check_read(config.trainer)
    check_trainer(config.trainer)
    check_managed("lora", config.lora, ("layer_replication", "inference_mode"))  # neither works
    check_known("lora", config.lora, signature(LoraConfig).parameters)
    # An adopted adapter may have settings that panjue cannot train with.
    of_start = config.start.record.lora if config.start else {}
    check_lora({name: v for name, v in config.lora.items() if of_start.get(name) != v})
    check_four_bits(config)
    check_attention(config)
    check_keep(config)
    validated("lora", LoraConfig, config.lora)
    if config.start:
        check_lora_of_start(config, config.start)
    with of_library("quantization"):
        BitsAndBytesConfig(**config.quantization)


INSTEAD = {
    "output_dir": "run",
    "max_length": "max_tokens",
    "gradient_accumulation_steps": "batch",
    "seed": "seed",
    "data_seed": "seed",
    "push_to_hub": "`hf upload` afterwards; push_to_hub would send the newest checkpoint",
    "hub_token": "the environment variable HF_TOKEN: settings are saved to disk",
    "deepspeed": "accelerate=finetune/configs/fsdp2.yaml, which divides the weights among gpus",
    "fsdp": "accelerate=finetune/configs/fsdp2.yaml",
    "fsdp_config": "accelerate=finetune/configs/fsdp2.yaml",
    "resume_from_checkpoint": "the same command again, which resumes",
}
"""Settings of trl -> the setting of panjue to use instead."""

RENAMED = {
    f"{name}{end}": f"{CHECKPOINTING}{end}"
    for name in CHECKPOINTING_NAMES
    for end in ("", "_kwargs")
}
"""Old and new names of settings of trl -> their names in the installed release. Both are taken with
every release."""

OF_TRACKIO = ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
"""Settings of trl that have an effect only if `report_to` names Trackio."""

READ_OF_TRL = {
    "num_train_epochs": "the steps of a training",
    "max_steps": "the steps of a training; with num_train_epochs at most so many",
    "per_device_train_batch_size": "how many examples a process takes at once, see `shares`",
    "per_device_eval_batch_size": "how many held-out examples a process takes at once",
    "packing": "whether `finetune.data` packs; trl does not",
    "train_sampling_strategy": "the order of the examples, see `order_of`",
    # The optimizer.
    "learning_rate": "its highest rate",
    "lr_scheduler_type": "how the rate changes from step to step",
    "lr_scheduler_kwargs": "arguments of the scheduler",
    "warmup_steps": "in which steps the rate rises",
    "optim": "its algorithm",
    "optim_args": "arguments of some algorithms",
    "optim_target_modules": "the layers that GaLore and APOLLO treat in their own way",
    **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), "AdamW's"),
    "max_grad_norm": "where gradients are clipped",
    "neftune_noise_alpha": "noise that is added to the embeddings",
    "average_tokens_across_devices": "whether a reply token counts the same in all processes",
    "full_determinism": "whether torch takes deterministic kernels alone",
    # Precision, memory and speed.
    "bf16": "the type of products",
    "fp16": "the type of products",
    "tf32": "the precision of float32 products on a GPU",
    **dict.fromkeys(RENAMED, "memory for time"),
    "activation_offloading": "memory of a GPU for time",
    "torch_compile": "whether the model is compiled",
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "how it is compiled"),
    "use_liger_kernel": "kernels for norms, rotations and activations",
    "liger_kernel_config": "which of them",
    "torch_empty_cache_steps": "after how many steps unused memory is given back",
    "dataloader_num_workers": "processes that collate the batches",
    "dataloader_pin_memory": "faster copies to a GPU",
    "dataloader_persistent_workers": "whether these processes outlive an epoch",
    "dataloader_prefetch_factor": "batches that these processes make in advance",
    "dataloader_multiprocessing_context": "how these processes start",
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb"), "torch's DDP"),
    **dict.fromkeys(("ddp_broadcast_buffers", "ddp_static_graph"), "torch's DDP"),
    "ddp_timeout": "how long processes wait for each other, see `join_processes`",
    # When to log, evaluate and save.
    **dict.fromkeys(("logging_strategy", "logging_steps", "logging_first_step"), "when to log"),
    **dict.fromkeys(("eval_strategy", "eval_steps", "eval_delay"), "when to compute held-out loss"),
    **dict.fromkeys(("save_strategy", "save_steps"), "when to save a checkpoint"),
    "save_total_limit": "how many checkpoints are kept",
    "load_best_model_at_end": "whether the weights of the lowest held-out loss are kept",
    # What the training is reported to.
    "report_to": "to what",
    "run_name": "the name that it has there",
    **dict.fromkeys(OF_TRACKIO, "where Trackio keeps it"),
    "skip_memory_metrics": "false reports how much memory the training took",
    "debug": "underflow_overflow ends where an activation has no finite value, and shows which",
}
"""Settings of trl that a training of panjue reads -> what they decide. All others are refused, also
those of a newer trl: panjue sets them itself, or they would silently do nothing."""

NEEDED_BY = {
    "dataloader_persistent_workers": "dataloader_num_workers",
    "dataloader_prefetch_factor": "dataloader_num_workers",
    "dataloader_multiprocessing_context": "dataloader_num_workers",
    "liger_kernel_config": "use_liger_kernel",
}
"""Setting of trl -> another one that it needs. Without it, it does nothing, or fails after the
classifier is fitted."""


def check_read(given: Mapping[str, Any]) -> None:
    """Refuse settings of trl that nothing reads here, or that another setting decides."""
    for name in given:
        if name in INSTEAD:
            raise UserError(f"trainer.{name}: use {INSTEAD[name]}")
        if name not in READ_OF_TRL:
            reason = "is set by panjue, or has no effect here"
            raise UserError(f"trainer.{name}: {reason}; leave it out")
    for name, needed in NEEDED_BY.items():
        if given.get(name) and not given.get(needed):
            raise UserError(f"trainer.{name}: has no effect without trainer.{needed}")
    for name in OF_TRACKIO:
        if name in given and "trackio" not in given.get("report_to", ()):
            raise UserError(f"trainer.{name}: has no effect without trainer.report_to=trackio")


POSITIVE = {
    "learning_rate": int | float,
    **dict.fromkeys(("max_steps", "per_device_train_batch_size"), int),
    **dict.fromkeys(("per_device_eval_batch_size", "save_total_limit", "ddp_timeout"), int),
    **dict.fromkeys(("num_train_epochs", "logging_steps", "eval_steps", "save_steps"), int | float),
}
"""Settings that must be above 0; transformers takes 0 or less for `not set` in some of them."""

NAMED: Mapping[str, type[Enum]] = {
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "eval_strategy": IntervalStrategy,
    "save_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
}
"""Settings of trl that are one of several names -> these names."""


def check_trainer(given: Mapping[str, Any]) -> None:
    """Refuse settings of trl that make a training go wrong."""
    for name, kind in POSITIVE.items():
        value = given.get(name)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < math.inf):
            what = "a whole number" if kind is int else "a number"
            raise UserError(f"trainer.{name}: must be {what} above 0, got {value}")
    if given.get("eval_strategy") == "steps" and not given.get("eval_steps"):
        # transformers would take `logging_steps`, which may change when a run resumes.
        raise UserError("trainer.eval_steps: set how often trainer.eval_strategy=steps evaluates")
    if given.get("save_strategy") == "best":
        # transformers would save only steps with a new lowest loss, and not always the step after
        # which a signal stops the training.
        raise UserError("trainer.save_strategy: use that of eval_strategy; the best is kept then")
    for name, kinds in NAMED.items():
        known = [str(kind.value) for kind in kinds]
        if name in given and given[name] not in known:
            raise UserError(f"trainer.{name}: {no_such(given[name], known)}")
    if given.get("train_sampling_strategy") == "batch_rebalance":
        # Its order is the same for every seed and, after a resume, for every epoch.
        raise UserError("trainer.train_sampling_strategy: use group_by_length or random")
    if given.get("use_liger_kernel") and not find_spec("liger_kernel"):
        raise UserError("trainer.use_liger_kernel: the package liger-kernel is not installed")
    if not torch.accelerator.is_available():
        for name in ("activation_offloading", "fp16"):
            if given.get(name):
                raise UserError(f"trainer.{name}: needs a GPU; leave it out")


KEEPS_BASE = (True, False, "gaussian", "orthogonal")
"""Initializations of LoRA that do not change the base. With any other, the adapter does not fit the
original base, which vLLM and `merge` use."""

UNUSABLE = ("lora_bias", "alora_invocation_tokens")
"""Settings of peft that make an adapter unusable: peft cannot merge a bias into a layer without
one, and vLLM 0.32 supports neither biases nor activated adapters."""

OF_NAMES = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters")
"""Settings of peft that are lists of names. peft takes a text in place of a list as a pattern."""

SEVERAL_NAMES = re.compile(r"[\w.]+(?:[,\s]+[\w.]+)+,?")

SCALES = ("r", "lora_alpha", *PATTERNS)
"""Settings of peft that are or contain numbers above 0; with 0, nothing would be learnt."""


def check_lora(given: Mapping[str, Any]) -> None:
    """Refuse settings of peft that make the adapter unusable or change the base."""
    if given.get("init_lora_weights", True) not in KEEPS_BASE:
        reason = "others change the base too"
        raise UserError(f"lora.init_lora_weights: use true, gaussian or orthogonal; {reason}")
    for name in UNUSABLE:
        if given.get(name):
            raise UserError(f"lora.{name}: could be neither merged nor served; leave it out")
    for name in OF_NAMES:
        value = given.get(name)
        if isinstance(value, str) and SEVERAL_NAMES.fullmatch(value):
            names = ",".join(re.findall(r"[\w.]+", value))
            raise UserError(f"lora.{name}: {value!r} is one name; a list is lora.{name}=[{names}]")
    scales = {name: given[name] for name in SCALES if name in given}
    for name, value in flat(scales):
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise UserError(f"lora.{name}: must be above 0, got {value}")
    dropout = given.get("lora_dropout", 0)
    if isinstance(dropout, int | float) and not 0 <= dropout < 1:
        raise UserError(f"lora.lora_dropout: must be from 0 to below 1, got {dropout}")
    if "task_type" in given:
        raise UserError("lora.task_type: is CAUSAL_LM already; remove it")


READ_QUANTIZATION = (
    "load_in_4bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "bnb_4bit_quant_storage",
    "llm_int8_skip_modules",  # despite its name
)
"""Settings of BitsAndBytesConfig that four-bit weights use."""


def check_four_bits(config: SftConfig) -> None:
    """Refuse a base of other than four bits, and settings that transformers would ignore."""
    if (config.method == "qlora") != bool(config.quantization):
        way_out = "set quantization.load_in_4bit=true, as configs/qwen3-8b-qlora.yaml does"
        if config.quantization:
            way_out = "quantization={} empties it"
        raise UserError(f"quantization: goes with method=qlora; {way_out}")
    if config.quantization.get("load_in_8bit"):
        raise UserError("quantization.load_in_8bit: method=qlora has four bits; use load_in_4bit")
    check_known("quantization", config.quantization, READ_QUANTIZATION)


FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
"""Attention that needs a package -> function that says whether transformers can use it."""


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
    for size in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if packing and (config.trainer.get(size) or 1) != 1:
            # In a batch of several rows, transformers' FlashAttention treats each pack as one text.
            raise UserError(
                "trainer.packing: FlashAttention separates the examples of a pack only in batches "
                f"of one pack; set trainer.{size}=1"
            )


def check_keep(config: SftConfig) -> None:
    """Refuse to keep several adapters if there are none, or if they have no held-out loss."""
    if config.keep == 1:
        return
    if config.method == "full":
        raise UserError("keep: method=full trains no adapter; set keep=1")
    if not saves_evaluated(config.trainer):
        way_out = "set both to epoch, or both to steps"
        raise UserError(f"keep: needs equal trainer.eval_strategy and save_strategy; {way_out}")


def saves_evaluated(trainer: Mapping[str, Any]) -> bool:
    """Say whether each evaluated step is saved, so that the one of the lowest loss can be kept."""
    evaluates = trainer.get("eval_strategy", "no")
    return bool(evaluates != "no" and evaluates == trainer.get("save_strategy", "steps"))


def validated(section: str, kind: type[T], settings: Mapping[str, Any]) -> T:
    """Return a library's dataclass with these settings, after checking their types."""
    with of_library(section):
        try:
            return TypeAdapter(kind).validate_python(settings)
        except ValidationError as error:
            complaint = " ".join(first_complaint(error).split())
            raise UserError(f"{section}: {complaint}") from None


def check_lora_of_start(config: SftConfig, start: Trained) -> None:
    """Refuse settings of peft, apart from dropout, that would change the adapter of `start`."""
    with of_library(str(start.folder)):
        lora = lora_of(start, {})
    for name, value in config.lora.items():
        given = start.record.lora.get(name)
        saved = getattr(lora, name)
        # peft saves `all-linear`, which was given, as the names of these modules.
        is_same = value == given or unordered(value) == unordered(saved)
        if not is_same and name != "lora_dropout":
            before = saved if given is None else given
            before = sorted(before) if isinstance(before, set) else before
            refuse_unequal(f"lora.{name}", value, before, config.from_run)


def unordered(value: Any) -> Any:
    """Return a list as peft has it, which keeps the names of modules as a set."""
    return set(value) if isinstance(value, list) else value


USERS_WANDB_DIR = os.environ.get("WANDB_DIR")
"""Environment variable for wandb's folder, if the user does not want the run folder."""


def trainer_config(config: SftConfig) -> TrainerConfig:
    """Return trl's settings, after a try of what would fail only when the training starts."""
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(config.run / "tensorboard")
    args = validated("trainer", TrainerConfig, trainer_settings(config))
    if "wandb" in args.report_to:
        os.environ["WANDB_DIR"] = USERS_WANDB_DIR or str(config.run)
    check_reports(args.report_to)
    check_optimizer(args)
    check_schedule(args)
    # A single process would use all visible GPUs (transformers/training_args.py:1917), by
    # DataParallel, which trl refuses.
    args._n_gpu = min(args.n_gpu, 1)
    return args


FIXED = {
    "restore_callback_states_from_checkpoint": True,  # a resumed run keeps its patience count
    "max_length": None,  # rows never exceed max_tokens, so trl must not cut
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "disable_tqdm": True,  # TrainingLog shows progress
    "logging_nan_inf_filter": False,  # trl would log NaN as 0; `ReplyTrainer.log` ends the training
    "router_aux_loss_coef": 0.0,  # the loss is that of the replies, without router logits
}
"""Settings of trl that panjue always sets to the same values."""


def trainer_settings(config: SftConfig) -> dict[str, Any]:
    """Return trl's settings: defaults for this machine, then the config's, then panjue's own."""
    has_accelerator = torch.accelerator.is_available()
    at_once, times = shares(config, PartialState().num_processes)
    settings = {
        "gradient_checkpointing": has_accelerator,
        # One fits into the memory of a GPU wherever a step fits; `check_attention` relies on it.
        "per_device_eval_batch_size": 1 if has_accelerator else 8,
        "logging_steps": 10,
        "report_to": ["tensorboard"],
        "run_name": config.run.name,
        "save_total_limit": 2,
        # Batches are copied while the GPU still computes; this needs pinned memory.
        "accelerator_config": {"non_blocking": config.trainer.get("dataloader_pin_memory", True)},
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
    if saves_evaluated(config.trainer):
        settings.setdefault("load_best_model_at_end", True)
        settings.setdefault("metric_for_best_model", "eval_loss")
    # A setting of the user may have another name than its default above: the last one counts.
    return {RENAMED.get(name, name): value for name, value in settings.items()}


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
    default = 1 if torch.accelerator.is_available() else per_process  # see `use_memory`
    most = int(config.trainer.get("per_device_train_batch_size") or default)
    at_once = largest_share(per_process, most)
    return at_once, per_process // at_once


def largest_share(count: int, most: int) -> int:
    """Return the largest number up to `most` that divides `count` into equal parts: 12, 5 -> 4."""
    return max(part for part in range(1, min(count, most) + 1) if count % part == 0)


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


def check_optimizer(args: TrainerConfig) -> None:
    """Make the optimizer once for a tiny model, because its package may be missing.

    Optimizers that are made for the layers of a model are not tried here.
    """
    if args.optim_target_modules:
        return
    model = torch.nn.Linear(1, 1)
    with of_library("trainer.optim"):
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if isinstance(kind, type) and "model" not in settings:
            kind(model.parameters(), **settings)


TRIED_STEPS = 10
"""Number of steps of the schedule that is tried before a training."""


def check_schedule(args: TrainerConfig) -> None:
    """Go once through a schedule of the learning rate, because it may lack an argument.

    transformers would fail only at the first step, after the text classifier is fitted.
    """
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=args.learning_rate)
    with of_library(f"trainer.lr_scheduler_kwargs: {args.lr_scheduler_type.value}"):
        schedule = get_scheduler(
            args.lr_scheduler_type, optimizer, 0, TRIED_STEPS, args.lr_scheduler_kwargs
        )
        for _ in range(TRIED_STEPS):
            optimizer.step()
            if isinstance(schedule, ReduceLROnPlateau | GreedyLR):
                schedule.step(1.0)
            else:
                schedule.step()
