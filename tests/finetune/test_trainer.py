"""Token rows and their loss: of which tokens it is, and that no example sees another."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from peft.tuners.lora import LoraLayer
from torch.utils.data import DataLoader, RandomSampler
from transformers import AutoModelForCausalLM, Trainer
from trl import SFTConfig

from panjue.finetune.data import (
    IGNORED,
    RowMaker,
    RowReport,
    cached,
    collate,
    count_examples,
    pack,
)
from panjue.finetune.model import CHECKPOINTING, load_base, with_lora
from panjue.finetune.packed_attention import PACKED, segments
from panjue.finetune.trainer import EvenSampler, LengthSampler, ReplyTrainer, order_of
from panjue.finetune.training_log import larger_limits
from panjue.prompts.example import Example
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.reader import Reader
from panjue.prompts.render import prompt_ids
from panjue.prompts.task import load_task

from .conftest import adapter_bytes, logged, main

TASK = load_task("judgment")
SIZE = 1024


@pytest.fixture(scope="module")
def examples(workshop: Path) -> list[Example]:
    return list(Reader(TASK).read(workshop / "demo/train.jsonl"))


@pytest.fixture(scope="module")
def maker(workshop: Path, examples: list[Example]) -> RowMaker:
    tokenizer = load_tokenizer(workshop / "base/model")
    return RowMaker(TASK, tokenizer, TASK.ask.labels(examples), SIZE)


@pytest.fixture(scope="module")
def made(maker: RowMaker, examples: list[Example]) -> list[dict[str, Any]]:
    """Return the token rows of a few examples of different lengths."""
    return list(maker.rows(examples[:6], RowReport()))


def test_rows_that_a_dry_run_is_making_are_waited_for(
    made: list[dict[str, Any]], tmp_path: Path
) -> None:
    begun = threading.Event()
    times = []

    def make(_: RowReport) -> Iterator[dict[str, Any]]:
        times.append(time.monotonic())
        begun.set()
        time.sleep(0.5)
        yield from made

    with ThreadPoolExecutor() as threads:
        first = threads.submit(cached, tmp_path, {}, make)
        assert begun.wait(60)
        second = threads.submit(cached, tmp_path, {}, make)
        assert len(first.result()[0]) == len(second.result()[0]) == len(made)
    assert len(times) == 1


@pytest.mark.parametrize("end", ["cut", "empty", "zeros"])
def test_rows_and_packs_that_a_failing_disk_has_cut_are_made_again(
    end: str, made: list[dict[str, Any]], tmp_path: Path
) -> None:
    write_json(tmp_path / "manifest.json", {"task": "", "prompt_sha256": "", "seed": 0})

    def rows_and_packs() -> list[list[dict[str, Any]]]:
        rows, _ = cached(tmp_path / "rows", {}, lambda _: iter(made))
        return [list(rows), list(pack(rows, SIZE))]

    before = rows_and_packs()
    files = sorted((tmp_path / "rows").rglob("*.arrow"))
    assert [file.name for file in files] == ["rows.arrow", "packs.arrow"], "none of datasets"
    for file in files:
        whole = file.read_bytes()
        ends = {"cut": whole[: -len(whole) // 3], "empty": b"", "zeros": bytes(len(whole))}
        file.write_bytes(ends[end])
    assert rows_and_packs() == before


def arguments(folder: Path, *, bf16: bool) -> SFTConfig:
    return SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=bf16,
        **{CHECKPOINTING: False},
        max_length=None,
        report_to=[],
        dataset_kwargs={"skip_prepare_dataset": True},
    )


@pytest.fixture
def trainer(workshop: Path, maker: RowMaker, made: list[dict[str, Any]], tmp_path: Path) -> Any:
    args = arguments(tmp_path, bf16=False)
    model = AutoModelForCausalLM.from_pretrained(workshop / "base/model", dtype=torch.float32)
    model.config.use_cache = True  # transformers tells packed examples apart without a cache only
    data = Dataset.from_list(made)
    return ReplyTrainer(model, args, data, eval_dataset=data, processing_class=maker.tokenizer)


def test_loss_is_on_the_reply_and_its_end_and_nothing_else(
    maker: RowMaker, examples: list[Example]
) -> None:
    tokenizer = maker.tokenizer
    for example, row in zip(examples, maker.rows(examples, RowReport()), strict=True):
        prompt = prompt_ids(tokenizer, TASK.ask.prompt(example))
        reply = row["input_ids"][len(prompt) :]
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["labels"] == [IGNORED] * len(prompt) + reply
        assert tokenizer.decode(reply) == TASK.ask.target(example) + tokenizer.eos_token
        assert tokenizer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")


def test_what_does_not_fit_is_shortened_then_refused_by_id(
    maker: RowMaker, examples: list[Example]
) -> None:
    filler = "案发当日天气晴朗。" * 200
    long = replace(examples[0], id=7, text=filler + examples[0].text)
    everybody = "、".join(examples[1].names)
    hopeless = replace(examples[1], id=8, text=f"{everybody}一同{'出行' * 2000}")
    judgments = (examples[2].answer or {})["judgments"]
    without = {"judgments": [{**judgment, "charges": []} for judgment in judgments]}
    empty = replace(examples[2], id=9, answer=without)
    report = RowReport()
    [row] = replace(maker, max_tokens=512).rows([long, hopeless, empty], report)
    assert len(row["input_ids"]) <= 512
    assert [(key, after < before) for key, before, after in report.shortened] == [("7", True)]
    assert [line.split(":")[0] for line in report.refused] == ["8", "9"]
    [needed] = report.too_long
    for limit, count in ((needed - 1, 0), (needed, 1)):
        assert len(list(replace(maker, max_tokens=limit).rows([hopeless], RowReport()))) == count


def test_valid_gold_with_labels_of_no_training_case_is_not_called_invalid(
    maker: RowMaker, examples: list[Example]
) -> None:
    """With limit=, the few cases to train on lack labels that held-out cases have."""
    judgments = (examples[0].answer or {})["judgments"]
    known = maker.labels.names("charges")
    assert len(known) > maker.labels.most["charges"]

    def with_charges(number: int, charges: list[str]) -> Example:
        answer = {"judgments": [{**judgment, "charges": charges} for judgment in judgments]}
        return replace(examples[0], id=number, answer=answer)

    held_out = [with_charges(1, ["稀有罪"]), with_charges(2, known), with_charges(3, [])]
    report = RowReport()
    assert not list(maker.rows(held_out, report))
    beyond = "its gold answer is valid, but beyond the labels of the cases to train on"
    unseen, many, empty = report.refused
    assert re.match(f"1: {beyond}: .*charges '稀有罪' unknown", unseen)
    assert re.match(f"2: {beyond}: .*charges cut to .*, the most in training", many)
    assert re.match("3: its gold answer is invalid: .*charges missing", empty)


def test_the_plan_names_the_limit_that_takes_all_and_one_that_takes_almost_all() -> None:
    assert larger_limits([65, 640], most_left=0) == "max_tokens=640 would take all of these"
    assert larger_limits([65, 60, 640, 630], most_left=2) == (
        "max_tokens=640 would take all of these, max_tokens=128 all but 2"
    )
    assert "but" not in larger_limits([65, 640], most_left=2)


PRIVATE = {"_get_train_sampler", "_run_epoch", "_save_checkpoint"}


def test_the_private_methods_that_are_overridden_exist_in_transformers() -> None:
    theirs = {name for name in vars(Trainer) if name.startswith("_") and name[1] != "_"}
    assert set(vars(ReplyTrainer)) & theirs == PRIVATE


def mean_loss(model: Any, rows: list[dict[str, Any]]) -> float:
    """Return the mean loss of all reply tokens, each example on its own, from all its logits."""
    losses = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        chances = logits.log_softmax(-1)
        for place, label in enumerate(row["labels"][1:]):
            if label != IGNORED:
                losses.append(-float(chances[place, label]))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_of_a_batch_or_pack_is_that_of_its_examples_alone(
    packed: bool, trainer: Any, made: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = trainer.model.eval()
    data, _ = cached(tmp_path, {}, lambda _: iter(made))
    rows = list(pack(data, SIZE) if packed else data)
    assert (len(rows) < len(made)) == packed
    with torch.no_grad():
        loss = trainer.compute_loss(model, collate(rows))
    assert float(loss) == pytest.approx(mean_loss(model, made), rel=1e-4)


@pytest.mark.parametrize(
    ("variant", "is_cast_before"),
    [
        ({}, False),
        ({"use_rslora": True}, False),
        ({"use_dora": True}, True),  # it computes in the type of its inputs, as dropout does
        ({"lora_dropout": 0.1}, True),
    ],
)
def test_inputs_of_lora_that_autocast_casts_are_not_cast_before_and_nothing_changes(
    variant: dict[str, Any],
    is_cast_before: bool,
    workshop: Path,
    maker: RowMaker,
    made: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    args = arguments(tmp_path, bf16=True)
    model = load_base(workshop / "base/model", torch.bfloat16)
    lora = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **variant}
    model = with_lora(model, lora)
    trainer = ReplyTrainer(model, args, Dataset.from_list(made), processing_class=maker.tokenizer)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert layers
    assert {layer.cast_input_dtype_enabled for layer in layers} == {is_cast_before}
    if is_cast_before:
        return
    found = []
    for is_cast in (False, True):
        for layer in layers:
            layer.cast_input_dtype_enabled = is_cast
        batch = collate([made[0], made[1]])
        with trainer.accelerator.autocast():
            losses = trainer.reply_losses(model, batch)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        found.append((losses, *torch.autograd.grad(losses.sum(), trained)))
    for without, with_casts in zip(*found, strict=True):
        assert torch.equal(without, with_casts)


def test_the_held_out_loss_is_that_of_all_reply_tokens_and_draws_no_random_numbers(
    trainer: Any, made: list[dict[str, Any]]
) -> None:
    trainer.model.train()
    before = torch.get_rng_state()
    loss = trainer.evaluate()["eval_loss"]
    assert torch.equal(before, torch.get_rng_state())
    assert loss == pytest.approx(mean_loss(trainer.model, made), rel=1e-4)


def losses_of_examples(trainer: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ids of each example of rows or packs -> its mean loss."""
    found = {}
    for row in rows:
        batch = trainer.data_collator([row])
        with torch.no_grad():
            losses = trainer.reply_losses(trainer.model.eval(), batch)
        sizes = row.get("seq_lengths") or [len(row["input_ids"])]
        start = 0
        for size in sizes:
            of_one = slice(start, start + size)
            count = sum(label != IGNORED for label in row["labels"][of_one])
            found[str(row["input_ids"][of_one])] = float(losses[:count].mean())
            losses = losses[count:]
            start += size
    return found


def test_the_held_out_loss_of_packs_is_that_of_their_examples_alone(
    workshop: Path, maker: RowMaker, made: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone, _ = cached(tmp_path, {}, lambda _: iter(made))
    packs = pack(alone, SIZE)
    assert count_examples(packs) == count_examples(alone) == len(made) > len(packs)
    found = {}
    for attention, rows in (("sdpa", alone), (PACKED, packs)):
        model = load_base(workshop / "base/model", torch.float32)
        model.set_attn_implementation(attention)
        args = arguments(tmp_path, bf16=False)
        tokenizer = maker.tokenizer
        of_rows = ReplyTrainer(model, args, rows, eval_dataset=rows, processing_class=tokenizer)
        found[attention] = [losses_of_examples(of_rows, list(rows)), of_rows.evaluate()]
    (of_alone, alone_in_all), (of_packs, packs_in_all) = found.values()
    assert of_packs == pytest.approx(of_alone, abs=1e-6)
    assert packs_in_all["eval_loss"] == pytest.approx(alone_in_all["eval_loss"], abs=1e-6)


def test_a_batch_of_held_out_packs_has_its_segments_once(
    workshop: Path, maker: RowMaker, made: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A layer that found none would make them and copy them to the device."""
    rows, _ = cached(tmp_path, {}, lambda _: iter(made))
    packs = pack(rows, SIZE)
    model = load_base(workshop / "base/model", torch.float32)
    model.set_attn_implementation(PACKED)
    args = arguments(tmp_path, bf16=False)
    args.per_device_eval_batch_size = len(packs)
    tokenizer = maker.tokenizer
    of_packs = ReplyTrainer(model, args, packs, eval_dataset=packs, processing_class=tokenizer)
    with (
        patch("panjue.finetune.data.segments", wraps=segments) as in_batch,
        patch("panjue.finetune.packed_attention.segments", wraps=segments) as in_layers,
    ):
        of_packs.evaluate()
    assert (in_batch.call_count, in_layers.call_count) == (1, 0)


def test_an_order_by_length_is_that_of_its_seed_and_epoch() -> None:
    lengths = [n % 40 + 1 for n in range(200)]
    rows = Dataset.from_dict({"length": lengths})
    order, later = LengthSampler(rows, 4, seed=0), LengthSampler(rows, 4, seed=0)
    later.epoch = 1
    torch.rand(7)  # whatever else has drawn meanwhile
    assert list(order) == list(order) == list(LengthSampler(rows, 4, seed=0))
    assert sorted(order) == sorted(later) == list(range(200))
    assert list(order) != list(later)
    sizes = [lengths[place] for place in order]
    spreads = [max(sizes[n : n + 4]) - min(sizes[n : n + 4]) for n in range(4, 200, 4)]
    assert sum(spreads) / len(spreads) < 5, "of forty"


def test_a_random_order_is_the_one_that_accelerate_gives_one_process(trainer: Any) -> None:
    """So a training with several processes has the order of one, and old ones keep theirs."""
    rows = Dataset.from_dict({"length": [*range(50)]})
    trainer.args.seed = 7
    order = EvenSampler(order_of(rows, trainer.args), 3)
    numbers: Any = range(50)
    loader: DataLoader[int] = DataLoader(numbers, sampler=RandomSampler(rows), collate_fn=list)
    prepared = prepare_data_loader(loader, use_seedable_sampler=True, data_seed=7)
    orders = []
    for epoch in (0, 1, 4):
        order.epoch = epoch
        prepared.set_epoch(epoch)
        theirs = [place for [place] in prepared]
        assert list(order) == [*theirs, 50, 51, 52]
        orders.append(theirs)
    assert orders[0] != orders[1] != orders[2]


def test_a_training_whose_loss_is_no_number_ends(workshop: Path, tmp_path: Path) -> None:
    words = ["trainer.max_steps=6", "trainer.logging_steps=1", "trainer.learning_rate=1e30"]
    with pytest.raises(UserError, match=r"^step \d: (loss|grad_norm) is (nan|inf); train into"):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", *words])
    assert not (tmp_path / "run/adapter").exists()
    assert torch._C._get_cudnn_sdp_enabled() is False, "its gradients are NaN on an H100"


def test_the_checkpoint_of_the_lowest_held_out_loss_is_kept(trained: Path) -> None:
    best = min(logged(trained, "eval_loss"), key=lambda entry: float(entry["eval_loss"]))
    checkpoint = trained / "checkpoints" / f"checkpoint-{best['step']}"
    assert adapter_bytes(trained) == (checkpoint / "adapter_model.safetensors").read_bytes()
