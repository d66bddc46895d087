"""Real cases, kept outside the project: everything that reads, decodes and scores takes them."""

from pathlib import Path

import pytest

from panjue.eval.check import check
from panjue.eval.score import score
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

READER = Reader(load_task("judgment"))


@pytest.fixture
def cases(real_data: Path) -> Path:
    """Return the folder of criminal cases."""
    return real_data / "drdz"


@pytest.mark.parametrize(
    ("name", "size", "labelled"),
    [
        ("train", 1694, True),
        ("dev", 285, True),
        ("train_single", 4672, True),
        # The official examples.
        ("data_example", 1, True),
        ("stage1_train_5000", 2, True),
        ("stage1_test_300", 1, False),
    ],
)
def test_every_line_is_read(name: str, size: int, labelled: bool, cases: Path) -> None:
    examples = list(READER.read(cases / f"{name}.jsonl"))
    assert len({example.id for example in examples}) == len(examples) == size
    assert all(bool(example.answer) == labelled for example in examples)


def test_gold_replies_of_known_labels_come_back(cases: Path) -> None:
    ask = READER.task.ask
    labels = ask.labels(READER.read(cases / "train.jsonl"))
    without_repairs = 0
    for example in READER.read(cases / "dev.jsonl"):
        decoded = ask.decode(ask.target(example), example, labels)
        assert (decoded.answer == example.answer) == (not decoded.repairs), example.id
        without_repairs += not decoded.repairs
    assert without_repairs > 250


def test_gold_as_a_hand_in_is_clean_and_scores_one(tmp_path: Path, cases: Path) -> None:
    gold = cases / "dev.jsonl"
    rows = [dump(READER.task.gold(example)) for example in READER.read(gold)]
    path = tmp_path / "submission.jsonl"
    path.write_text("\n".join(rows) + "\n", "utf-8")
    assert list(check(READER, path, gold)) == []
    scores = score(READER, gold, path)
    assert list(scores.total.mean.values()) == pytest.approx([1] * 8)
    assert scores.missing == 0
