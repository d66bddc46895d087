"""The GPU of this machine, and what share of it a rate is."""

import subprocess
import sys
from importlib.metadata import version

import torch
import vllm

IS_GPU = torch.cuda.is_available()

GPUS = {"H200": (989, 4.8), "H100": (989, 3.35), "A100": (312, 2.0), "L40S": (362, 0.86)}
"""Name of a GPU -> dense bfloat16 TFLOP/s and bandwidth in TB/s, from NVIDIA's data sheets."""


def machine() -> str:
    """Return the GPU, the driver and the versions."""
    fields = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    gpu = "no GPU"
    if IS_GPU:
        gpu = subprocess.check_output(["nvidia-smi", *fields], text=True).strip()
    names = ("torch", "transformers", "trl", "peft", "bitsandbytes")
    known = [f"{name} {version(name)}" for name in names] + [f"vllm {vllm.__version__}"]
    return ", ".join([gpu.replace("\n", "; "), f"Python {sys.version.split()[0]}", *known])


def share(rate: float, of: str) -> str:
    """Return what share of the GPU's compute (FLOP/s) or bandwidth (bytes/s) a rate is."""
    name = torch.cuda.get_device_name() if IS_GPU else ""
    for known, (compute, bandwidth) in GPUS.items():
        if known in name:
            most = 1e12 * (compute if of == "compute" else bandwidth)
            return f" ({rate / most:.0%} of the GPU's {of})"
    return ""
