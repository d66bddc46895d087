"""A GPU keeps activations and takes packs at once as its memory allows; results stay the same."""

import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from panjue.finetune import library_settings, memory, trainer
from panjue.finetune.library_settings import largest_share
from panjue.finetune.memory import kept_bytes, reply_share, use_memory
from panjue.finetune.model import CHECKPOINTING, compute_activations_again, with_lora
from panjue.finetune.packed_attention import PACKED, segments
from panjue.finetune.reply_loss import token_losses
from panjue.finetune.trainer import ReplyTrainer, logits_only_at
from panjue.prompts.plumbing.errors import UserError
from tests.gpu.step import lora_flops

from .conftest import EXACT, UNEVALUATED, a_config, adapter_bytes, main

GIB = 2**30
TOKENS = 4096
EXAMPLES = [1024] * 4
REPLIES = 400
RANK = 16
QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
PACKS = Dataset.from_dict({"length": [TOKENS], "seq_lengths": [EXAMPLES], "labels": [[1]]})


def model_of(config: Qwen3Config, device: str, dtype: torch.dtype) -> Any:
    """Return a model with LoRA on packed attention; on `meta` it has shapes alone."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.set_attn_implementation(PACKED)
        return with_lora(model, {"r": RANK, "target_modules": "all-linear"})


def step_flops(model: Any) -> int:
    """Return the floating-point operations of a step on one pack, counted on shapes."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    starts, longest = segments(EXAMPLES)
    places = torch.zeros(REPLIES, dtype=torch.long, device="meta")
    given = {"position_ids": ids, "cu_seq_lens_q": starts, "max_length_q": longest}
    model.train()
    with (
        FlopCounterMode(display=False) as counter,
        logits_only_at(places, model.get_output_embeddings()),
    ):
        model(ids, **given, use_cache=False).logits.float().sum().backward()
    return int(counter.get_total_flops())


@pytest.fixture(scope="module")
def shapes() -> Any:
    """Return the shapes of Qwen3-8B with LoRA, without weights."""
    return model_of(QWEN3_8B, "meta", torch.bfloat16)


@pytest.mark.parametrize(
    ("gpu_gib", "times", "said"),
    [
        (None, 1.0, ""),  # a CPU
        (80, 1.0, "27.07 GiB for 1 at once; all layers keep them"),
        (48, 1.12, "27.07 GiB for one row or pack; one layer in 4 computes them again"),
        (40, 1.24, "27.07 GiB for one row or pack; one layer in 2 computes them again"),
        (24, 1.48, "27.07 GiB for one row or pack; all layers compute them again"),
    ],
)
def test_a_step_of_lora_computes_no_product_twice_where_memory_allows(
    gpu_gib: int | None,
    times: float,
    said: str,
    shapes: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: gpu_gib and gpu_gib * GIB)
    monkeypatch.setattr(memory, "row_bytes", lambda *_: int(27.07 * GIB))
    args = SimpleNamespace(
        **{CHECKPOINTING: gpu_gib is not None},  # as `trainer_config` sets it
        **{f"{CHECKPOINTING}_kwargs": None},
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        optim="adamw_torch_fused",
    )
    out = StringIO()
    use_memory(a_config(), shapes, args, PACKS, Console(file=out, width=200))
    if getattr(args, CHECKPOINTING):
        compute_activations_again(shapes, args)
    else:
        getattr(shapes, f"{CHECKPOINTING}_disable")()
    needed = lora_flops(QWEN3_8B, RANK, EXAMPLES, REPLIES)
    assert step_flops(shapes) / needed == pytest.approx(times, abs=0.02)
    assert said in out.getvalue()


SMALL = Qwen3Config(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=300,
)


def test_kept_activations_are_those_of_tokens_and_no_weights() -> None:
    torch.manual_seed(0)
    model = model_of(SMALL, "cpu", torch.float32)
    sizes = [kept_bytes(model, tokens, torch.float32) for tokens in (64, 128, 192)]
    assert sizes[0] > 0
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]
    wide = Qwen3Config(**{**SMALL.to_dict(), "vocab_size": 30_000})
    assert kept_bytes(model_of(wide, "cpu", torch.float32), 64, torch.float32) == sizes[0]
    more = Qwen3Config(**{**SMALL.to_dict(), "num_hidden_layers": 4, "layer_types": None})
    assert sizes[0] < kept_bytes(model_of(more, "cpu", torch.float32), 64, torch.float32)


def test_the_share_of_reply_tokens_is_that_of_the_rows() -> None:
    rows = Dataset.from_dict({"labels": [[-100, -100, 5], [-100, 6, 7, 8, 9]]})
    assert reply_share(rows) == 5 / 8


@pytest.mark.parametrize(
    ("batch", "gpu_gib", "given", "at_once"),
    [
        (16, 80, {"attn_implementation": "flash_attention_2"}, 1),  # it would mix several packs
        (16, 80, {}, 8),  # 9 fit, in equal parts
        (16, 40, {}, 4),
        (16, 141, {}, 16),
        (6, 141, {}, 6),
        (64, 1000, {}, 16),
        (16, 16, {}, 1),
        (16, 80, {"trainer": {"per_device_train_batch_size": 2}}, 2),
        (16, 80, {"trainer": {"gradient_checkpointing": True}}, 1),
    ],
)
def test_a_gpu_takes_as_many_packs_at_once_as_fit(
    batch: int,
    gpu_gib: int,
    given: dict[str, Any],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(SMALL, "meta", torch.bfloat16)
    monkeypatch.setattr(memory, "gpu_memory", lambda: gpu_gib * GIB)
    monkeypatch.setattr(memory, "row_bytes", lambda *_: 7 * GIB)
    start = given.get("trainer", {}).get("per_device_train_batch_size", 1)
    args = SimpleNamespace(
        **{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": None},
        per_device_train_batch_size=start,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=batch // start,
        optim="adamw_torch_fused",
    )
    use_memory(a_config(**given), model, args, PACKS, Console(quiet=True))
    assert args.per_device_train_batch_size == at_once
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == batch
    assert args.per_device_eval_batch_size == 1, "an evaluation has no second try"


def test_the_plan_of_a_training_on_a_gpu_says_what_its_memory_allows(
    workshop: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With packs, whose real activations are found on the loaded model."""
    monkeypatch.setattr(memory, "gpu_memory", lambda: 16 * GIB)
    monkeypatch.setattr(library_settings, "shares", lambda config, _: (1, config.batch))
    words = [f"run={tmp_path}/run", "dry_run=true", "trainer.packing=true"]
    main(workshop / "sft.yaml", words)
    out = capsys.readouterr().out
    found = re.search(r"^activations  ([\d.]+) GiB for 8 at once; all layers keep them$", out, re.M)
    assert found
    assert 0 < float(found[1]) < 1
    assert "each of 8 examples or packs" in out


@pytest.mark.parametrize(("count", "most", "share"), [(16, 9, 8), (7, 4, 1), (1, 16, 1), (6, 6, 6)])
def test_parts_of_a_step_are_equal(count: int, most: int, share: int) -> None:
    assert largest_share(count, most) == share


PACKED_WORDS = [*UNEVALUATED, *EXACT, "trainer.packing=true", "batch=4"]
STEPS = ["trainer.max_steps=3"]
ONE_AT_ONCE = "trainer.per_device_train_batch_size=1"


def test_packs_at_once_give_the_weights_of_packs_one_by_one(workshop: Path, tmp_path: Path) -> None:
    # Adam divides by the size of a gradient, so it would enlarge the rounding of very small ones.
    plain = ["trainer.optim=sgd", "trainer.learning_rate=0.1"]
    found = []
    for at_once in (1, 2, 4):
        run = tmp_path / str(at_once)
        words = [f"run={run}", f"trainer.per_device_train_batch_size={at_once}"]
        main(workshop / "sft.yaml", [*PACKED_WORDS, *STEPS, *plain, *words])
        found.append(load_file(run / "adapter/adapter_model.safetensors"))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("place", "call"), [("forward", 9), ("backward", 9), ("backward", 2)])
def test_a_step_without_memory_begins_again_and_the_training_stays_the_same(
    place: str,
    call: int,
    workshop: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*PACKED_WORDS, *STEPS, ONE_AT_ONCE]
    again = [f"run={tmp_path}/again", "trainer.gradient_checkpointing=true"]
    main(workshop / "sft.yaml", [*words, *again])
    capsys.readouterr()
    losses_of = token_losses
    calls = []

    def fails(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def losses_with_one_failure(*given: torch.Tensor) -> torch.Tensor:
        calls.append(given)
        losses = losses_of(*given)
        if len(calls) == call:  # 2: in the estimate of the time; 9: in the second step
            if place == "forward":
                fails(losses)
            losses.register_hook(fails)  # type: ignore[no-untyped-call]
        return losses

    monkeypatch.setattr(trainer, "token_losses", losses_with_one_failure)
    main(workshop / "sft.yaml", [*words, f"run={tmp_path}/short"])
    assert capsys.readouterr().out.count("GPU: its memory was too small") == 1
    assert adapter_bytes(tmp_path / "short") == adapter_bytes(tmp_path / "again")


@pytest.mark.parametrize("every", [None, 1, 2, 4])
@pytest.mark.parametrize("processes", [1, 2])
def test_none_of_several_processes_saves_memory_alone(processes: int, every: int | None) -> None:
    """The layers of `every` are those that `use_memory` has chosen; None and 1 are all layers."""
    short = torch.OutOfMemoryError("CUDA out of memory.")
    of_layers = None if every is None else {"every_n_layers": every}
    given: Any = SimpleNamespace(
        args=SimpleNamespace(**{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": of_layers}),
        accelerator=SimpleNamespace(num_processes=processes),
        model=Mock(),
        _console=Console(quiet=True),
    )
    if every in (None, 1):
        with pytest.raises(torch.OutOfMemoryError):
            ReplyTrainer.refuse_or_save_memory(given, short)
    elif processes > 1:
        way_out = rf"^GPU: CUDA out of memory\. set trainer\.{CHECKPOINTING}=true yourself"
        with pytest.raises(UserError, match=way_out):
            ReplyTrainer.refuse_or_save_memory(given, short)
    else:
        ReplyTrainer.refuse_or_save_memory(given, short)
        assert getattr(given.args, f"{CHECKPOINTING}_kwargs") is None
