"""A micro-batch never waits for the device: its places and counts are made with the batch."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from panjue.finetune.data import IGNORED, cached, pack
from panjue.finetune.packed_attention import PACKED
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.plumbing.files import read_json

from .conftest import logged
from .test_trainer import arguments, examples, made, maker  # noqa: F401  # fixtures

WAITING = {"_local_scalar_dense", "nonzero", "masked_select"}
"""Operations of which a GPU must tell the processor the result before anything can follow."""

BY_PLACES = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that call `nonzero` inside if a place is given by a mask."""


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks: list[Any] = []
        if name in BY_PLACES:
            masks = [one for one in args[1] if one is not None and one.dtype == torch.bool]
        if name in WAITING or masks:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("form", "of_transformers"), [("rows", 1), ("packs", 0)])
def test_a_micro_batch_waits_for_nothing(
    form: str,
    of_transformers: int,
    workshop: Path,
    maker: Any,  # noqa: F811
    made: list[dict[str, Any]],  # noqa: F811
    tmp_path: Path,
) -> None:
    """transformers asks once whether rows of one example are packs; of packs it asks nothing."""
    model = AutoModelForCausalLM.from_pretrained(workshop / "base/model", dtype=torch.float32)
    data, _ = cached(tmp_path, {}, lambda _: iter(made))
    if form == "packs":
        data = pack(data, max(row["length"] for row in made))
        model.set_attn_implementation(PACKED)
    args = arguments(tmp_path, bf16=False)
    trainer = ReplyTrainer(model, args, data, processing_class=maker.tokenizer)
    batch = trainer.data_collator([data[0], data[1]])
    reply_tokens = (batch["labels"][:, 1:] != IGNORED).sum()
    with Waits() as waits:
        loss = trainer.training_step(model, batch, reply_tokens)
    assert loss > 0
    assert sum(waits.counts.values()) == of_transformers, waits.counts


def test_the_tokens_of_a_training_are_those_of_its_rows(trained: Path) -> None:
    """They are counted without waiting, and are in each checkpoint and in the log."""
    logs = [entry["num_tokens"] for entry in logged(trained, "loss")]
    assert logs == sorted(logs)
    assert logs[0] > 0
    for step in (6, 12):
        state = read_json(trained / f"checkpoints/checkpoint-{step}/trainer_state.json")
        assert state["num_input_tokens_seen"] == logs[step - 1]
