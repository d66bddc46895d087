"""What a training keeps in the memory of a GPU, and how to use the rest of it for speed.

Without gradient checkpointing a step of LoRA takes two thirds of the products (`tests.finetune`
counts them), but the activations of all layers stay in memory until the backward pass. With it,
some or all layers keep none, and compute them again in the backward pass.
"""

from inspect import signature
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from rich.console import Console
from torch.autograd.graph import saved_tensors_hooks

from panjue.finetune.data import IGNORED
from panjue.finetune.distributed import is_sharded
from panjue.finetune.library_settings import FLASH_ATTENTION, RENAMED, largest_share
from panjue.finetune.model import (
    CHECKPOINTING,
    Model,
    computing_dtype,
    gpu_memory,
    leave_casts_to_autocast,
    set_checkpointing,
)
from panjue.finetune.packed_attention import logits_only_of, probe_examples
from panjue.finetune.settings import SftConfig

GRADIENT_BYTES = 4
"""Bytes of the gradient for each trained weight, in float32."""

LOGIT_BYTES = 6
"""Bytes of a logit: one in 16 bits from the model, one in float32 for the loss."""

USABLE = 0.9
"""Share of a GPU's memory that a training may be planned to take. Fragments take the rest."""

FOR_KERNELS = 2 * 2**30
"""Bytes of CUDA itself, of kernels, and of the temporary results of a layer."""

PROBES = (128, 256)
"""Tokens of the two rows from which the activations of a token are found."""

MAX_AT_ONCE = 16
"""Most rows or packs in one call. More of them do not make a GPU faster."""

OF_ACTIVATIONS = (*RENAMED, "activation_offloading")
"""Settings of trl with which a user decides what layers keep."""


def use_memory(config: SftConfig, model: Model, args: Any, rows: Dataset, console: Console) -> None:
    """Let a GPU keep activations, and take several rows at once, as far as its memory allows.

    First `choose_layers` sets in `args` which layers keep activations. If all do, a call gets more
    rows or packs, and a step fewer calls. What the user has set stays; the number of calls cannot
    be set. Results change by no more than rounding. Without a GPU, or if the weights are divided
    among GPUs, nothing changes.
    """
    memory = gpu_memory()
    if memory is None or is_sharded():
        return
    of_row = row_bytes(model, args, rows)  # of the longest row or pack, if all layers keep them
    # What is left for activations; `USABLE` leaves out the share that fragments take.
    room = int(USABLE * memory) - FOR_KERNELS - stored_bytes(model, args)
    found = [of_row, room]
    broadcast_object_list(found)  # those of the first process, so that all decide the same
    [of_row, room] = found
    if not any(name in config.trainer for name in OF_ACTIVATIONS):
        choose_layers(model, args, of_row, room)
    if getattr(args, CHECKPOINTING):
        # A row keeps less than `of_row` then. How much is not known, so each call has as many rows
        # as before. The line shows `of_row`, what all layers would keep.
        every = (getattr(args, f"{CHECKPOINTING}_kwargs") or {}).get("every_n_layers", 1)
        who = "all layers compute" if every == 1 else f"one layer in {every} computes"
        size = in_gib(of_row)
        console.print(f"{'activations':12s} {size} for one row or pack; {who} them again")
        return
    # A pack has several examples in one row. In a call of several packs, FlashAttention would let
    # the examples of a pack see each other.
    one_pack = config.attn_implementation in FLASH_ATTENTION and "seq_lengths" in rows.features
    if "per_device_train_batch_size" not in config.trainer and not one_pack:
        of_process = args.per_device_train_batch_size * args.gradient_accumulation_steps
        most = min(MAX_AT_ONCE, max(1, room // of_row))
        at_once = largest_share(of_process, most)
        args.per_device_train_batch_size = at_once
        args.gradient_accumulation_steps = of_process // at_once
    at_once = args.per_device_train_batch_size
    size = in_gib(at_once * of_row)
    console.print(f"{'activations':12s} {size} for {at_once} at once; all layers keep them")


def choose_layers(model: Model, args: Any, of_row: int, room: int) -> None:
    """Set in `args` how many layers keep their activations: all, 3 in 4, 1 in 2, or none."""
    if of_row <= room:
        set_checkpointing(args, False, None)
        return
    how = None  # no layer keeps them
    enable = signature(getattr(model, f"{CHECKPOINTING}_enable"))
    if "every_n_layers" in enable.parameters:  # not in older transformers
        for every in (4, 2):
            if of_row * (every - 1) / every <= room:  # all but one in `every` keep them
                how = {"every_n_layers": every}
                break
    set_checkpointing(args, True, how)


def row_bytes(model: Model, args: Any, rows: Dataset) -> int:
    """Return the bytes that the longest row keeps for the backward pass, with its logits."""
    dtype = computing_dtype(model, args)
    if args.bf16 or args.fp16:
        leave_casts_to_autocast(model)  # as in training, where casts keep other tensors
    short, long = (kept_bytes(model, tokens, dtype) for tokens in PROBES)
    of_token = (long - short) / (PROBES[1] - PROBES[0])  # each further token keeps as many
    length = max(rows["length"])
    vocabulary = model.config.get_text_config().vocab_size
    logits = reply_share(rows) * vocabulary * LOGIT_BYTES  # no prompt token has any
    return int(length * (of_token + logits))


def reply_share(rows: Dataset) -> float:
    """Return the share of tokens that have a loss, in the first thousand rows."""
    labels = rows.select(range(min(len(rows), 1000))).with_format("numpy")["labels"]
    return float(np.mean(np.concatenate(list(labels)) != IGNORED))


def kept_bytes(model: Model, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of activations that a row of `tokens` keeps until the backward pass."""
    [ids] = probe_examples(model, tokens)
    device = ids.device
    own = {weight.untyped_storage()._cdata for weight in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that no other gets its number
        return tensor.detach()

    model.train()
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
        logits_only_of(model, slice(0, 1)),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model(ids, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def stored_bytes(model: Model, args: Any) -> int:
    """Return the bytes of weights, gradients and AdamW's moments; 0 for other optimizers' state."""
    weights = list(model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    stored: int = sum(weight.numel() * weight.element_size() for weight in weights)
    return stored + int(trained) * (GRADIENT_BYTES + (moment_bytes(args.optim) or 0))


def moment_bytes(optimizer: str) -> int | None:
    """Return the bytes of AdamW's two moments per trained weight; None for other optimizers."""
    if not optimizer.removeprefix("paged_").startswith("adamw"):
        return None
    if optimizer.endswith("4bit"):
        return 1
    return 2 if optimizer.endswith("8bit") else 8


def in_gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
