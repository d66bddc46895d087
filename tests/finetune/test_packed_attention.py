"""Attention inside the examples of a pack equals attention with a mask over the pack."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from panjue.finetune.data import cached, collate, collate_segments, pack
from panjue.finetune.model import CHECKPOINTING, load_base, problem_in_packs
from panjue.finetune.packed_attention import (
    MAX_CHANGE,
    PACKED,
    change,
    packed_attention,
    probed,
    segments,
    use_packed_attention,
)
from panjue.prompts.plumbing.records import RunRecord

from .conftest import main

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "attn_implementation": "sdpa",
}
WINDOW: dict[str, Any] = {
    "sliding_window": 20,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
}


def qwen(**settings: Any) -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **settings}))


def masked(sizes: list[int], window: int) -> torch.Tensor:
    """Return who sees whom, [tokens, tokens], as transformers' block mask has it."""
    example = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    place = torch.arange(sum(sizes))
    distance = place[:, None] - place
    seen = (example[:, None] == example) & (distance >= 0)
    return seen & (distance < window) if window else seen


def attended(parts: list[torch.Tensor], sizes: list[int], window: int) -> torch.Tensor:
    """Return the packed attention of query, key and value; a `window` of 0 is none."""
    query, key, value = parts
    starts, longest = segments(sizes)
    module: Any = SimpleNamespace(is_causal=True)
    out, _ = packed_attention(
        module,
        query,
        key,
        value,
        None,
        sliding_window=window or None,
        cu_seq_lens_q=starts.to(query.device),
        max_length_q=longest,
    )
    return out


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.sampled_from([0, 1, 7, 64]),
    st.integers(0, 9),
)
def test_every_example_sees_itself_alone(
    sizes: list[int], heads: tuple[int, int], window: int, seed: int
) -> None:
    torch.manual_seed(seed)
    of_query, of_key = heads
    shapes = [(1, count, sum(sizes), 8) for count in (of_query, of_key, of_key)]
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    ours = attended([query, key, value], sizes, window)
    times = of_query // of_key
    keys, values = (part.repeat_interleave(times, 1) for part in (key, value))
    seen = masked(sizes, window)
    theirs = scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=1e-5, rtol=1e-4)
    weights = torch.randn_like(ours)
    gradients = []
    for out in (ours, theirs.transpose(1, 2)):
        gradients.append(torch.autograd.grad((out * weights).sum(), [query, key, value]))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-3)


INPUTS = ("input_ids", "labels", "position_ids", "cu_seq_lens_q", "max_length_q")


@pytest.mark.parametrize("more", [{}, WINDOW])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_of_packs_are_those_with_masks(
    more: dict[str, Any], checkpointing: bool, tmp_path: Path
) -> None:
    rows = []
    for number, size in enumerate((30, 17, 45, 9, 26)):
        ids = [(number * 31 + place * 7) % 299 + 1 for place in range(size)]
        rows.append({"input_ids": ids, "labels": ids, "length": size})
    data, _ = cached(tmp_path, {}, lambda _: iter(rows))
    packs = list(pack(data, 64))
    assert len(packs) < len(rows)
    found = []
    for attention, batches in (("sdpa", collate), (PACKED, collate_segments)):
        model = qwen(**more)
        model.set_attn_implementation(attention)
        if checkpointing:
            getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
        model.train()
        batch = {key: value for key, value in batches(packs).items() if key in INPUTS}
        is_real = torch.arange(batch["input_ids"].shape[1]) < torch.tensor(
            [[sum(one["seq_lengths"])] for one in packs]
        )
        labels = torch.where(is_real, batch.pop("labels"), -100)
        loss = model(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), [weight.grad for weight in model.parameters()]))
    (masks, of_masks), (ours, of_ours) = found
    torch.testing.assert_close(ours, masks)
    for mine, other in zip(of_ours, of_masks, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, WINDOW])
def test_a_model_with_plain_attention_takes_it(more: dict[str, Any], dtype: torch.dtype) -> None:
    model = qwen(**more).to(dtype)
    assert use_packed_attention(model, 4096, dtype)
    assert model.config._attn_implementation == PACKED


OLD: dict[str, Any] = {
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "attn_implementation": "sdpa",
}
EAGER = {**SHAPE, "attn_implementation": "eager"}
SOFTCAP = Gemma2Config(**EAGER, layer_types=["full_attention"] * 2, attn_logit_softcapping=50.0)
SINKS = GptOssConfig(**EAGER, num_local_experts=2, num_experts_per_tok=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gemma2ForCausalLM(SOFTCAP),
        lambda: GptOssForCausalLM(SINKS),
        lambda: qwen(attention_dropout=0.1),
        lambda: GPT2LMHeadModel(GPT2Config(**OLD)),
        lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**OLD)),
    ],
    ids=["softcap", "sinks", "dropout", "gpt2", "starcoder"],
)
def test_a_model_with_more_in_its_attention_keeps_it(make: Callable[[], Any]) -> None:
    model = make()
    before = model.config._attn_implementation
    assert not use_packed_attention(model, 4096, torch.float32)
    assert model.config._attn_implementation == before
    ids = torch.arange(1, 25)[None]
    model.train()
    assert model(ids, position_ids=torch.arange(12).repeat(1, 2)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (qwen, "sdpa"),
        (lambda: Gemma2ForCausalLM(SOFTCAP), "eager"),
        (lambda: GptOssForCausalLM(SINKS), "eager"),
    ],
    ids=["plain", "softcap", "sinks"],
)
def test_the_attention_follows_the_model(
    make: Callable[[], Any], attention: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    assert load_base(tmp_path, torch.float32).config._attn_implementation == attention


def test_dropout_in_attention_is_no_leak() -> None:
    for model in (qwen(attention_dropout=0.1), GPT2LMHeadModel(GPT2Config(**OLD))):
        assert problem_in_packs(model, 4096) == ""


def llama4(**settings: Any) -> Any:
    torch.manual_seed(0)
    experts = {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1}
    return Llama4ForCausalLM(Llama4TextConfig(**{**SHAPE, **experts, **settings}))


def test_attention_that_counts_from_the_beginning_of_a_pack_is_noticed() -> None:
    """These layers scale by the place in the row, whatever `position_ids` says."""
    model = llama4(no_rope_layers=[0, 0], floor_scale=40, attn_scale=1.0)
    assert problem_in_packs(model, 40) == "", "a pack is shorter"
    problem = problem_in_packs(model, 4096)
    assert re.search(r"an example in a pack differs from itself alone \(by \d+%\)$", problem)
    assert not use_packed_attention(model, 4096, torch.float32)


def test_chunks_of_attention_are_a_problem_if_a_pack_changes_them() -> None:
    """transformers 5.19 counts them from the beginning of the pack, 5.24 from the example's."""
    model = llama4(attention_chunk_size=40).eval()
    assert problem_in_packs(model, 40) == "", "a pack is one chunk"
    ids = torch.arange(1, 101)[None]
    positions = torch.cat([torch.arange(10), torch.arange(90)])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits[:, 10:]
        alone = model(ids[:, 10:], use_cache=False).logits
    is_same = torch.allclose(packed, alone, atol=1e-4)
    assert (problem_in_packs(model, 4096) == "") == is_same
    assert not use_packed_attention(model, 4096, torch.float32)


def test_windows_that_rows_exceed_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen(**WINDOW)
    sizes: list[int] = []
    forward = model.forward

    def counted(*ids: torch.Tensor, **call: Any) -> Any:
        sizes.append((ids or (call["input_ids"],))[0].shape[1])
        return forward(*ids, **call)

    monkeypatch.setattr(model, "forward", counted)
    assert problem_in_packs(model, 16) == ""
    assert max(sizes) == 24
    assert problem_in_packs(model, 4096) == ""
    assert max(sizes) == 24 + WINDOW["sliding_window"]


def test_a_probe_makes_no_gradients_of_all_weights() -> None:
    model = qwen()
    held: list[torch.Tensor] = []
    for weight in model.parameters():
        weight.register_hook(held.append)
    _, gradient = probed(model, 12, packed=False)
    assert gradient.shape == (36, SHAPE["hidden_size"])
    assert gradient.norm() > 0
    assert not held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [0, 64])
def test_the_kernel_of_a_gpu_is_the_twin_of_a_cpu(window: int) -> None:
    sizes = [200, 1, 90]
    torch.manual_seed(0)
    parts = [torch.randn(1, heads, sum(sizes), 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    found = []
    for device in ("cpu", "cuda"):
        moved = [part.to(device).requires_grad_() for part in parts]
        out = attended(moved, sizes, window)
        gradients = torch.autograd.grad(out.float().sum(), moved)
        found.append([out.cpu(), *(gradient.cpu() for gradient in gradients)])
    for twin, kernel in zip(*found, strict=True):
        torch.testing.assert_close(kernel, twin, atol=2e-2, rtol=2e-2)


def test_a_pack_whose_examples_see_each_other_is_noticed() -> None:
    model = qwen()
    alone = probed(model, 12, packed=False)
    assert change(alone, probed(model, 12, packed=True)) < 1e-3, "SDPA with transformers' mask"
    model.set_attn_implementation(PACKED)
    starts = segments([36])
    original = model.forward

    def as_one(**call: Any) -> Any:
        return original(**{**call, "cu_seq_lens_q": starts[0], "max_length_q": starts[1]})

    model.forward = as_one
    assert change(alone, probed(model, 12, packed=True)) > 10 * MAX_CHANGE[torch.float32]


def test_a_training_on_packs_uses_and_records_it(workshop: Path, tmp_path: Path) -> None:
    packs = ["trainer.packing=auto", "batch=2", "trainer.per_device_train_batch_size=2"]
    words = [*packs, "trainer.max_steps=2", "trainer.eval_strategy=no"]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *words])
    assert RunRecord.read(tmp_path / "run/adapter").attention == PACKED
    main(workshop / "sft.yaml", [f"run={tmp_path}/eager", *words, "attn_implementation=eager"])
    assert RunRecord.read(tmp_path / "eager/adapter").attention == "eager"
