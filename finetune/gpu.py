"""The config for the GPU of this machine, for those who name none."""

import os
import re
import subprocess
from shutil import which

LORA_MIB = 39_000
"""Memory of a GPU that trains an 8B model in bfloat16; a smaller one needs four bits."""


def config_for_gpu() -> str:
    """Return the name of the config for the largest GPU that CUDA may use, or for none."""
    sizes = gpu_sizes()
    if not sizes:
        return "qwen2.5-0.5b-cpu"
    return "qwen3-8b-lora" if max(sizes) >= LORA_MIB else "qwen3-8b-qlora"


def gpu_sizes() -> list[int]:
    """Return the MiB of each GPU that CUDA may use."""
    if not which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sizes = []
    for index, uuid, size in re.findall(r"^(\d+), (\S+), (.+)$", listed, re.MULTILINE):
        if visible is None or is_named(visible, index, uuid):
            sizes.append(int(size) if size.isdigit() else machine_size())
        elif "MIG-" in visible:
            sizes.append(0)  # a part of a GPU, of unknown size
    return sizes


def is_named(visible: str, index: str, uuid: str) -> bool:
    """Say whether CUDA_VISIBLE_DEVICES names a GPU: by its number, or the start of its UUID."""
    names = visible.replace(" ", "").split(",")
    return index in names or any(name and uuid.startswith(name) for name in names)


def machine_size() -> int:
    """Return the MiB of this machine, which a GPU without memory of its own uses."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
