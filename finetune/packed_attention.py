"""Attention inside the examples of a pack, without a mask over the whole pack.

transformers calls SDPA for a pack with a mask over all its tokens. No fast kernel takes a mask, and
the work grows with the square of the pack. Here, on a CPU each example is one call. On a GPU each
example is a segment for torch's FlashAttention kernel for varying lengths.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.flash_attention import get_target_dtype

PACKED = "panjue_packed"
"""The name of `packed_attention` as an `attn_implementation`. transformers makes no masks for a
name that has an attention function but no mask function."""

NOT_HERE = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that some models use and `packed_attention` does not support."""

Segments = tuple[Tensor, int]
"""Where the segments of all rows begin and end, [segments + 1], int32, and the longest length."""


def segments(sizes: Sequence[int]) -> Segments:
    """Return segments with these lengths that follow each other."""
    starts = torch.zeros(len(sizes) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(sizes).cumsum(0)
    return starts, max(sizes)


def packed_attention(  # noqa: PLR0913  # as transformers calls it
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the causal attention inside each segment, [batch, tokens, heads, width].

    Query, key and value are [batch, heads or groups of heads, tokens, width]. `cu_seq_lens_q` has
    the segments of all rows, from `collate_segments`; without it each row is one segment. Padding
    is a segment, too. NotImplementedError: the attention has features that this one lacks.
    """
    if (
        attention_mask is not None
        or dropout
        or any(others.get(name) is not None for name in NOT_HERE)
    ):
        raise NotImplementedError("attention with a mask, dropout, softcap or sinks")
    batch, heads, tokens, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q, max_length_q = segments([tokens] * batch)
        cu_seq_lens_q = cu_seq_lens_q.to(query.device)
    window = sliding_window or 0
    queries, keys, values = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    out: Any
    if query.is_cuda:
        dtype = get_target_dtype(query, module) or query.dtype
        out = varlen_attn(
            queries.to(dtype),
            keys.to(dtype),
            values.to(dtype),
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=True,
        )
    else:
        outs = []
        for start, end in pairwise(cu_seq_lens_q.tolist()):
            of_one = slice(start, end)
            outs.append(causal(queries[of_one], keys[of_one], values[of_one], window, scaling))
        out = torch.cat(outs)
    return out.reshape(batch, tokens, heads, -1), None


def causal(query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float | None) -> Tensor:
    """Return causal SDPA of one example, [tokens, heads, width]; a `window` of 0 means none."""
    size = len(query)
    mask = None
    if 0 < window < size:
        place = torch.arange(size, device=query.device)
        distance = place[:, None] - place
        mask = (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


MAX_CHANGE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Type -> largest `change` that may come from another order of sums."""

SHORT_TOKENS = 12
"""Tokens of an example that is shorter than any window of attention, to try a model with."""

SPANS = (
    "sliding_window",
    "attention_window_size",
    "window_size",
    "attention_chunk_size",
    "floor_scale",
)
"""Settings of models for the number of tokens, of a pack or an example, after which attention
changes."""

AMPERE = (8, 0)
"""FlashAttention's kernels need this capability, and heads of no more than `MAX_WIDTH`."""

MAX_WIDTH = 256


def probe_tokens(model: Any, max_tokens: int) -> int:
    """Return a length of an example beyond all windows of attention that are below `max_tokens`.

    It is `SHORT_TOKENS` longer than the longest of these windows. For rows of at most `max_tokens`,
    longer windows change nothing.
    """
    config = model.config.get_text_config()
    spans = [getattr(config, name, None) for name in SPANS]
    exceeded = [span for span in spans if isinstance(span, int) and span < max_tokens]
    return max(exceeded, default=0) + SHORT_TOKENS


def probe_examples(model: Any, *sizes: int) -> list[Tensor]:
    """Return examples of random tokens with these sizes, each [1, tokens]."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    return [
        torch.randint(1, vocabulary, (1, size), generator=generator).to(device) for size in sizes
    ]


def use_packed_attention(model: Any, max_tokens: int, dtype: torch.dtype) -> bool:
    """Switch a model that computes in `dtype` to `packed_attention` if its results are the same.

    Otherwise the model keeps its attention. Reasons are a softcap, sinks, dropout, attention code
    of its own, or a GPU without a kernel for it. Packs have `max_tokens`.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    device = next(model.parameters()).device
    if not can_run(device, dtype) or getattr(config, "attention_dropout", None):
        return False
    if device.type == "cuda" and (getattr(config, "head_dim", None) or 0) > MAX_WIDTH:
        return False
    longest = probe_tokens(model, max_tokens)
    before = base.config._attn_implementation
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        alone = probed(model, longest, packed=False)
        base.set_attn_implementation(PACKED)
        try:
            # A model with attention code of its own keeps that.
            if config._attn_implementation == PACKED:
                found = change(alone, probed(model, longest, packed=True))
                if found <= MAX_CHANGE[dtype]:
                    return True
        except (NotImplementedError, TypeError):  # also if the model takes no segments
            pass
    base.set_attn_implementation(before)
    return False


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether `packed_attention` runs: on a CPU, or on a GPU with the kernel in 16 bits."""
    if device.type == "cpu":
        return True
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    has_groups = "enable_gqa" in signature(varlen_attn).parameters  # since torch 2.13
    return has_groups and torch.cuda.get_device_capability(device) >= AMPERE


@contextmanager
def repeatable_training(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in training mode within the block; equal inputs give equal results in each block.

    Layers of dropout are off, and random numbers are the same. The separate dropout of attention is
    on, so that `packed_attention`, which supports none, notices it.
    """
    device = next(model.parameters()).device
    model.train()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.eval()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
    model.eval()


@contextmanager
def logits_only_of(model: Any, places: slice | Tensor) -> Iterator[None]:
    """Let a model compute logits only at these places of a row, since a vocabulary may be large."""

    def select(_: torch.nn.Module, hidden: tuple[Tensor]) -> tuple[Tensor]:
        return (hidden[0][:, places],)

    hook = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()


def places_at_ends(size: int) -> Tensor:
    """Return the places of an example of `size` tokens, [places], at which to compare logits.

    These are logits of the same example in a pack and alone, or in two packs. Those of all places
    would take too much memory. The first places would see an example before it in the pack.
    """
    if size <= 3 * SHORT_TOKENS:  # as many as are returned otherwise
        return torch.arange(size)
    first = torch.arange(SHORT_TOKENS)
    # The end of the longest window lies in the middle of the last ones, see `probe_tokens`.
    return torch.cat([first, torch.arange(size - 2 * SHORT_TOKENS, size)])


Probed = tuple[Tensor, Tensor]
"""Logits, [places, vocabulary], and the gradient of the embedded tokens, [tokens, width]."""


def probed(model: Any, longest: int, *, packed: bool) -> Probed:
    """Return a model's results for three examples, in one pack or each alone, to compare both.

    The gradient of the embedded tokens suffices, because it comes through the attention of all
    layers. To compare the gradients of all weights, memory would have to hold two of each.
    """
    sizes = [SHORT_TOKENS, longest, SHORT_TOKENS]
    examples = probe_examples(model, *sizes)
    device = examples[0].device
    shown = [places_at_ends(size) for size in sizes]
    if packed:
        starts, most = segments(sizes)
        positions = torch.cat([torch.arange(size) for size in sizes])[None].to(device)
        of_segments = {"cu_seq_lens_q": starts.to(device), "max_length_q": most}
        calls = [{"input_ids": torch.cat(examples, 1), "position_ids": positions, **of_segments}]
        offsets = starts.tolist()
        shown = [torch.cat([part + start for part, start in zip(shown, offsets, strict=False)])]
    else:
        calls = [{"input_ids": part} for part in examples]
    embedded: list[Tensor] = []

    def leaf(_: torch.nn.Module, __: object, out: Tensor) -> Tensor:
        embedded.append(out.detach().requires_grad_())
        return embedded[-1].clone()  # a model may change it in place

    logits = []
    hook = model.get_input_embeddings().register_forward_hook(leaf)
    try:
        with repeatable_training(model):
            for call, places in zip(calls, shown, strict=True):
                with logits_only_of(model, places.to(device)):
                    logits.append(model(**call, use_cache=False).logits[0].float())
    finally:
        hook.remove()
    together = torch.cat(logits)
    # The log probability of token 0 serves as a loss; that of any other token would, too.
    of_one_token = together.log_softmax(-1)[:, 0]
    gradients = torch.autograd.grad(of_one_token.mean(), embedded)
    return together.detach(), torch.cat([part[0].float() for part in gradients])


def change(one: Probed, other: Probed) -> float:
    """Return the largest relative L2 difference, of the logits of any token or of the gradients."""
    logits, gradients = one
    other_logits, other_gradients = other
    of_logits = (logits - other_logits).norm(dim=-1) / logits.norm(dim=-1)
    of_gradients = (gradients - other_gradients).norm() / gradients.norm()
    return max(float(of_logits.max()), float(of_gradients))


AttentionInterface.register(PACKED, packed_attention)
