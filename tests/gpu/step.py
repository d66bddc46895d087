"""The arithmetic of the stage `step`: what a step of LoRA needs, and where its time goes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch._C._autograd import DeviceType

PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "4090": 165e12,
    "T4": 65e12,
}
"""Part of a GPU's name -> operations a second on dense matrices in 16 bits, by its data sheet."""

ATTENTION = ("flash_attention", "scaled_dot_product", "efficient_attention", "varlen")
OPTIMIZER = ("_fused_adam", "_foreach", "clip_grad")
KINDS = ("attention", "optimizer", "logits", "rest")


def lora_flops(config: Any, rank: int, examples: Sequence[int], replies: int) -> float:
    """Return the operations that a step of LoRA on all linear layers needs, of a dense decoder.

    `examples` are their tokens, `replies` is the number of tokens with a loss. A product of a token
    with a weight takes 2 operations. A frozen weight has it twice, forward and for the gradient of
    its input; a matrix of LoRA has a third for its own gradient. Attention has two products
    forward and four backward, counted over whole squares.
    """
    width = config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    groups = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    shapes = [(width, heads), (width, groups), (width, groups), (heads, width)]
    shapes += [(width, inner), (width, inner), (inner, width)]
    frozen = sum(rows * columns for rows, columns in shapes)
    trained = sum(rank * (rows + columns) for rows, columns in shapes)
    layer = sum(examples) * (2 * 2 * frozen + 3 * 2 * trained)
    layer += sum(6 * 2 * heads * size**2 for size in examples)
    return float(config.num_hidden_layers * layer + replies * 2 * 2 * width * config.vocab_size)


def peak_of(name: str) -> float | None:
    """Return the operations a second that a GPU can do; None if its name is not known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def kind_of(name: str, shapes: Iterable[Any], vocabulary: int) -> str:
    """Return what an operation of a step is for, by its name and the shapes of its inputs."""
    if any(word in name for word in ATTENTION):
        return "attention"
    if any(word in name for word in OPTIMIZER):
        return "optimizer"
    sizes = {size for shape in shapes if isinstance(shape, list | tuple) for size in shape}
    if vocabulary in sizes and "embedding" not in name:
        return "logits"
    return "rest"


def shares(events: Iterable[Any], vocabulary: int, seconds: float, device: str) -> dict[str, float]:
    """Return kind -> share of the time of a profile; `host` is when the device had nothing to do.

    `events` are torch's, with shapes. On a CPU, there is no host beside the device.
    """
    times: Counter[str] = Counter()
    for event in events:
        if event.device_type != DeviceType.CPU:  # a kernel; its operation has its time
            continue
        time_us = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        times[kind_of(event.name, event.input_shapes or [], vocabulary)] += time_us
    busy = sum(times.values()) / 1e6
    whole = max(seconds, busy)
    found = {kind: times[kind] / 1e6 / whole for kind in KINDS}
    return {**found, "host": 1 - busy / whole}
