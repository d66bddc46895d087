"""Several processes of one training: how they join, wait for each other, and end."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from shutil import which
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from trl import SFTConfig as TrainerConfig

from panjue.finetune.memory import ask_for_huge_pages
from panjue.finetune.settings import SftConfig
from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.prompts.plumbing.orphans import end_with_parent

POLL_S = 0.2


def join_processes(config: SftConfig) -> PartialState:
    """Join the processes of this training, with the config's timeout for all communication.

    Raises:
        UserError: torch cannot use the GPU, or the weights cannot be sharded in this way.
    """
    check_driver()
    check_sharding(os.environ, config)
    end_with_launcher()
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        ask_for_huge_pages()
    timeout = timedelta(seconds=config.trainer.get("ddp_timeout", TrainerConfig.ddp_timeout))
    # Without cpu=True accelerate does not see several processes launched on a CPU.
    return PartialState(cpu=on_cpu, timeout=timeout)


def check_driver() -> None:
    """Refuse a GPU that torch cannot use; the training would run on the CPU without a word.

    Raises:
        UserError: Says why torch cannot use it.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if is_hidden or torch.version.cuda is None or torch.accelerator.is_available():
        return
    if not which("nvidia-smi"):
        return
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    if "GPU 0" not in listed.stdout:  # a login node, for example
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UserError(
            f"GPU: torch cannot use it ({first_line(error)}); install a driver for CUDA "
            f"{torch.version.cuda}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        ) from None


def on_main_process(processes: PartialState, work: Callable[[], Any]) -> Any:
    """Do slow work in the main process only; all processes return its result or raise its error."""
    result: Any = None
    if processes.is_main_process:
        try:
            result = work()
        except (UserError, OSError) as error:
            result = error
    [result] = broadcast_object_list([result])
    if isinstance(result, Exception):
        raise result
    return result


def wait_for(path: Path) -> None:
    """Wait until another process has written a file, however long that takes.

    A collective would end at NCCL's time limit.
    """
    while not path.exists():
        time.sleep(POLL_S)


def end_with_launcher() -> None:
    """End this process with `accelerate launch` or torchrun, if one of them started it.

    After `kill -9` of the launcher its processes would train on.
    """
    if "LOCAL_RANK" in os.environ:
        end_with_parent()


def check_sharding(environment: Mapping[str, str], config: SftConfig) -> None:
    """Refuse settings, given to accelerate, that do not go with the config or do something else.

    Raises:
        UserError: FSDP without an accelerator, where accelerate would use DDP; FSDP with a sharded
            state dict, with which the best checkpoint cannot be loaded and no adapter is saved;
            4-bit weights that FSDP cannot shard; DeepSpeed with what it cannot do.
    """
    by_launcher = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if by_launcher or config.trainer.get("deepspeed"):
        check_deepspeed(config)
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    if not torch.accelerator.is_available():
        raise UserError("FSDP: shards on accelerators, and there is none; launch without FSDP")
    default = "SHARDED_STATE_DICT" if environment.get("FSDP_VERSION", "1") == "2" else ""
    if environment.get("FSDP_STATE_DICT_TYPE", default) == "SHARDED_STATE_DICT":
        raise UserError(
            "fsdp_state_dict_type: SHARDED_STATE_DICT saves no adapter; set FULL_STATE_DICT, as in "
            "finetune/configs/fsdp2.yaml"
        )
    storage = config.quantization.get("bnb_4bit_quant_storage", "uint8")  # bitsandbytes' default
    if config.method == "qlora" and storage == "uint8":
        raise UserError(
            "method=qlora: FSDP shards 4-bit weights only if they are stored as the others are; "
            "set quantization.bnb_4bit_quant_storage=bfloat16"
        )


def check_deepspeed(config: SftConfig) -> None:
    """Refuse what DeepSpeed cannot do.

    Raises:
        UserError: Names the setting.
    """
    evaluates = config.trainer.get("eval_strategy", "no") != "no"
    if evaluates and config.score_examples:
        raise UserError(
            "score_examples: weights that DeepSpeed shards cannot answer; set score_examples=0"
        )
    if config.loraplus_lr_ratio:
        raise UserError("loraplus_lr_ratio: does not go with DeepSpeed; use FSDP2 or leave it out")


def check_number(checkpoint: Path, processes: int) -> None:
    """Refuse to resume with another number of processes.

    Each process has saved its own random state and trains on its own share of each step.

    Raises:
        UserError: Names both numbers.
    """
    before = len(list(checkpoint.glob("rng_state_*.pth"))) or 1
    if before != processes:
        raise UserError(
            f"{checkpoint}: was saved by {before} processes and this training has {processes}; "
            f"launch {before} (make: GPUS={before}), or delete its progress with resume=false"
        )
