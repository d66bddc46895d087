"""The processes of one training: how they join, wait for each other, and end."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from trl import SFTConfig as TrainerConfig

from panjue.finetune.settings import LAUNCHED, SftConfig, is_launched
from panjue.prompts.gpu import check_gpu
from panjue.prompts.plumbing.errors import UserError, of_library
from panjue.prompts.plumbing.files import exclusive_lock
from panjue.prompts.plumbing.parent import kill_without_parent

OF_ACCELERATE = ("ACCELERATE_", "FSDP_")
"""Prefixes of the environment variables in which accelerate's launcher passes its settings."""

CHANGES_TRAINING = ("mixed_precision", "dynamo_backend")
"""Settings of accelerate that would change a training, which `trainer` alone should do."""


def join_processes(config: SftConfig) -> PartialState:
    """Join the processes of this training, with the config's timeout for all communication.

    Before the first use of a GPU, check the machine and set torch's environment variables.
    """
    check_environment()
    # Rows differ tenfold in length: fixed segments would leave gaps in a GPU's memory. torch reads
    # this at the first use of a GPU (c10/cuda/CUDAAllocatorConfig.h:136).
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    check_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    check_sharding(config)
    if is_launched():
        launcher = os.getppid()  # the parent and the starter, since no process lies between
        kill_without_parent(parent=launcher, starter=launcher)  # else they outlive its `kill -9`
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        # torch then asks the kernel for huge pages. Page faults would take a fifth of a step:
        # it allocates and frees hundreds of megabytes repeatedly.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with of_library("trainer.ddp_timeout"):  # if it is no number, a UserError names the setting
        timeout = timedelta(seconds=config.trainer.get("ddp_timeout", TrainerConfig.ddp_timeout))
    # Without cpu=True accelerate does not see several processes launched on a CPU.
    return PartialState(cpu=on_cpu, timeout=timeout)


def check_environment() -> None:
    """Delete variables left by another launcher; refuse settings that change a training.

    accelerate reads all of them: RANK and WORLD_SIZE make it wait for processes that do not exist.
    """
    if not is_launched():
        stray = [name for name in os.environ if name in LAUNCHED or name.startswith(OF_ACCELERATE)]
        for name in stray:
            print(f"environment: {name}={os.environ.pop(name)} is ignored: no launcher is at work")
        return
    for name in CHANGES_TRAINING:
        value = os.environ.get(f"ACCELERATE_{name.upper()}", "no")
        if value.lower() != "no":
            raise UserError(f"accelerate: {name} is {value}; set it to no: `trainer` has all that")


def is_sharded() -> bool:
    """Say whether accelerate divides the weights among the processes (FSDP)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_sharding(config: SftConfig) -> None:
    """Refuse FSDP settings of accelerate that do not work with the config."""
    if not is_sharded():
        return
    if not torch.accelerator.is_available():  # accelerate would use DDP
        raise UserError("FSDP: shards on accelerators, and there is none; launch without FSDP")
    if os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT") == "SHARDED_STATE_DICT":
        raise UserError(
            "fsdp_state_dict_type: SHARDED_STATE_DICT saves no adapter; set FULL_STATE_DICT, as in "
            "finetune/configs/fsdp2.yaml"
        )
    storage = config.quantization.get("bnb_4bit_quant_storage")
    if config.method == "qlora" and storage != "bfloat16":
        raise UserError(
            "method=qlora: FSDP shards 4-bit weights only if they are stored as the others are; "
            "set quantization.bnb_4bit_quant_storage=bfloat16"
        )


def make_once(entry: Path, is_made: Callable[[], bool], make: Callable[[], None]) -> None:
    """Let the first process make `entry`, a file or folder, unless it is already made.

    The other processes poll until it is there. A collective would fail at NCCL's time limit.
    """
    while not PartialState().is_main_process and not is_made():
        time.sleep(0.2)
    if is_made():
        return
    with exclusive_lock(entry.parent, f".{entry.name}.lock", wait=True):
        if not is_made():  # a dry run may have made it meanwhile
            make()
