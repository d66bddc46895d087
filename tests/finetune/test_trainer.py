"""The loss: of which tokens it is, and that no example sees another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer
from trl import SFTConfig

from panjue.finetune.data import IGNORED, LengthSampler, RowMaker, RowReport, collate, pack
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

from .conftest import logged, main

TASK = load_task("judgment")
SIZE = 1024


@pytest.fixture(scope="module")
def model(workshop: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(workshop / "base/model", dtype=torch.float32)


@pytest.fixture(scope="module")
def made(workshop: Path) -> list[dict[str, Any]]:
    """Return the token rows of a few examples of different lengths."""
    examples = list(Reader(TASK).read(workshop / "demo/train.jsonl"))
    tokenizer = load_tokenizer(workshop / "base/model")
    maker = RowMaker(TASK, tokenizer, TASK.ask.labels(examples), SIZE)
    return list(maker.rows(examples[:6], RowReport()))


def trainer_on(workshop: Path, model: Any, folder: Path) -> Any:
    return ReplyTrainer(
        model,
        args=SFTConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=None,
            report_to=[],
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_list([{"input_ids": [1], "labels": [1]}]),
        processing_class=load_tokenizer(workshop / "base/model"),
    )


PRIVATE = {"_get_train_sampler", "_run_epoch", "_save_checkpoint"}


def test_the_private_methods_that_are_overridden_exist_in_transformers() -> None:
    theirs = {name for name in vars(Trainer) if name.startswith("_") and name[1] != "_"}
    assert set(vars(ReplyTrainer)) & theirs == PRIVATE


def plain_losses(model: Any, row: dict[str, Any]) -> list[float]:
    """Return the loss of each reply token of one example on its own, from all its logits."""
    with torch.no_grad():
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1].float()
    chances = logits.log_softmax(-1)
    wanted = row["labels"][1:]
    return [-float(chances[i, label]) for i, label in enumerate(wanted) if label != IGNORED]


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_of_a_batch_or_pack_is_that_of_its_examples_alone(
    packed: bool, workshop: Path, model: Any, made: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer = trainer_on(workshop, model, tmp_path)
    model.config.use_cache = True  # transformers tells packed examples apart without a cache only
    model.eval()
    rows = list(pack(Dataset.from_list(made), SIZE)) if packed else made
    assert (len(rows) < len(made)) == packed
    with torch.no_grad():
        loss = trainer.compute_loss(model, collate(rows))
    alone = [loss for row in made for loss in plain_losses(model, row)]
    assert float(loss) == pytest.approx(sum(alone) / len(alone), rel=1e-4)


def test_the_held_out_loss_is_that_of_all_reply_tokens_and_draws_no_random_numbers(
    workshop: Path, model: Any, made: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer = trainer_on(workshop, model, tmp_path)
    trainer.eval_dataset = Dataset.from_list(made)
    model.train()
    before = torch.get_rng_state()
    loss = trainer.evaluate()["eval_loss"]
    assert torch.equal(before, torch.get_rng_state())
    alone = [loss for row in made for loss in plain_losses(model, row)]
    assert loss == pytest.approx(sum(alone) / len(alone), rel=1e-4)


def test_the_lowest_held_out_loss_chooses_the_best(trained: Path) -> None:
    measured = logged(trained, "eval_loss")
    assert [entry["step"] for entry in measured] == [6, 12]
    state = json.loads((trained / "checkpoints/checkpoint-12/trainer_state.json").read_text())
    assert state["best_metric"] == min(entry["eval_loss"] for entry in measured)


def test_an_order_by_length_is_that_of_its_seed_and_epoch() -> None:
    lengths = [n % 40 + 1 for n in range(200)]
    rows = Dataset.from_dict({"length": lengths})
    order, later = LengthSampler(rows, 4, seed=0), LengthSampler(rows, 4, seed=0)
    later.epoch = 1
    torch.rand(7)  # whatever else has drawn meanwhile
    assert list(order) == list(order) == list(LengthSampler(rows, 4, seed=0))
    assert sorted(order) == sorted(later) == list(range(200))
    assert list(order) != list(later)
    places = list(order)
    steps = [[lengths[i] for i in places[n : n + 4]] for n in range(4, 200, 4)]
    assert sum(max(step) - min(step) for step in steps) / len(steps) < 5, "of forty"


def test_a_training_whose_loss_is_no_number_ends(workshop: Path, tmp_path: Path) -> None:
    words = ["trainer.max_steps=6", "trainer.logging_steps=1", "trainer.learning_rate=1e30"]
    with pytest.raises(UserError, match=r"^step \d: (loss|grad_norm) is (nan|inf); train into"):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", *words])
    assert not (tmp_path / "run/adapter").exists()
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "its gradients are NaN on an H100"
