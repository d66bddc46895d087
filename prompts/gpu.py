"""Refuse an NVIDIA GPU that cannot be used, before anything is downloaded, fitted or trained."""

import os
import warnings
from pathlib import Path

from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.prompts.plumbing.machine import (
    DRIVER,
    FOR_CPU,
    card_problem,
    compiler_problem,
    is_old,
    nvidia_cards,
)

HIDING = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that ask for the CPU. Slurm sets the last one."""

NONE_VISIBLE = "No CUDA GPUs are available"
"""torch's message if there is a driver but no GPU, or if CUDA_VISIBLE_DEVICES hides it."""

NO_DRIVER = "Found no NVIDIA driver"
"""torch's message if there is no driver."""

NVIDIA_DEVICE = Path("/dev/nvidia0")

OTHER_DEVICES = {"/dev/kfd": "AMD GPU", "/dev/davinci0": "Ascend NPU"}
"""Device file -> the device, which the packages of `make install` cannot use."""


def check_gpu(number: int = 0, *, answering: bool = False) -> None:
    """Refuse a GPU that torch cannot use, that is too old, or for which Triton cannot compile.

    Training calls this, too. Otherwise it would silently use the CPU, or the engine would fail to
    start hours later. If the GPU is hidden, the user asked for the CPU.

    Args:
        number: Number of the GPU among the visible ones.
        answering: Whether vLLM is to answer here. The vLLM for GPUs cannot do so on a CPU.
    """
    import torch

    with warnings.catch_warnings(action="ignore"):  # `refuse_unusable` gives the reason
        has_cuda = torch.cuda.is_available() and torch.version.cuda is not None
        if has_cuda:
            number %= torch.cuda.device_count()  # as accelerate does
            name = torch.cuda.get_device_name(number)
            capability = torch.cuda.get_device_capability(number)
            problem = card_problem(name, capability) or compiler_problem()
            if problem:
                raise UserError(f"GPU: {problem}")
    if has_cuda or torch.accelerator.is_available():
        return
    if not is_hidden():
        refuse_unusable()
    if answering and torch.version.cuda:
        raise UserError(
            "GPU: torch sees none, and the vLLM of this .venv answers on GPUs alone; to compute on "
            f"the CPU: {FOR_CPU}"
        )


def is_hidden() -> bool:
    """Say whether CUDA_VISIBLE_DEVICES hides the GPU: the user wants to compute on the CPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in HIDING


def refuse_unusable() -> None:
    """Raise UserError, with torch's reason, if there is a GPU that torch cannot use.

    Call it if torch sees no GPU: then `init` raises, with the reason.
    """
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).partition(" Please ")[0].rstrip(".")
    else:  # the driver was loaded in the meantime
        return
    cards = nvidia_cards()
    name = cards[0].name if cards else "NVIDIA GPU"
    is_there = bool(cards) or NVIDIA_DEVICE.exists()
    if torch.version.cuda is None:
        if is_there:
            raise UserError(
                f"GPU: torch cannot use the {name} ({reason}): this .venv is for the CPU; "
                "rm -r .venv, then KIND=gpu make install; or set CUDA_VISIBLE_DEVICES= (empty) "
                "to compute on the CPU"
            )
        return
    if not is_there and reason.startswith((NONE_VISIBLE, NO_DRIVER)):
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = cards[0].driver if cards else ""
    if visible and reason.startswith(NONE_VISIBLE):
        way_out = f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this machine; unset it"
    elif not driver or is_old(driver):
        has = f" (this is {driver})" if driver else ""
        way_out = f"install driver {DRIVER} or newer{has}, and reboot"
    else:
        way_out = (
            f"the driver is {driver}: reboot if it was updated, and start a container with "
            "--gpus all"
        )
    raise UserError(
        f"GPU: torch cannot use the {name} ({reason}); {way_out}; or to compute on the CPU: "
        f"{FOR_CPU}"
    )


def unused_device() -> str:
    """Return a line if the CPU computes though there is another device; else an empty text.

    The line is about devices that panjue's packages cannot use, such as an AMD GPU.
    """
    import torch

    wants_cpu = is_hidden()  # by CUDA_VISIBLE_DEVICES
    if wants_cpu or torch.accelerator.is_available():
        return ""
    for path, name in OTHER_DEVICES.items():
        if Path(path).exists():
            return f"the CPU: panjue installs what NVIDIA GPUs and CPUs need, not the {name}"
    return ""
