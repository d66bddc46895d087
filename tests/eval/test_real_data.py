"""Real cases, kept outside the project: everything that reads, decodes and scores takes them."""

import math
from pathlib import Path

import pytest

from panjue.eval.check import check
from panjue.eval.score import score
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

DATA = Path(__file__).parents[3] / "shared" / "data" / "drdz"
TASK = load_task("judgment")

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}")


@pytest.fixture(scope="module")
def labels() -> Labels:
    """Return the labels of the real training file."""
    return TASK.ask.labels(Reader(TASK).read(DATA / "train.jsonl"))


@pytest.fixture(scope="module")
def dev() -> list[Example]:
    """Return the real development cases."""
    return list(Reader(TASK).read(DATA / "dev.jsonl"))


@pytest.mark.parametrize(("name", "size"), [("train", 1694), ("dev", 285), ("train_single", 4672)])
def test_every_line_is_read(name: str, size: int) -> None:
    examples = list(Reader(TASK).read(DATA / f"{name}.jsonl"))
    assert len(examples) == size
    assert all(example.answer for example in examples)
    assert len({example.id for example in examples}) == size


@pytest.mark.parametrize(
    ("name", "size", "labelled"),
    [("data_example", 1, True), ("stage1_train_5000", 2, True), ("stage1_test_300", 1, False)],
)
def test_official_examples_are_read(name: str, size: int, labelled: bool) -> None:
    examples = list(Reader(TASK).read(DATA / f"{name}.jsonl"))
    assert len(examples) == size
    assert all(bool(example.answer) == labelled for example in examples)


def test_gold_replies_of_known_labels_come_back(dev: list[Example], labels: Labels) -> None:
    known = 0
    for example in dev:
        assert example.answer is not None
        sound = all(
            0 < len(judgment[field]) <= labels.most[field]
            and set(judgment[field]) <= set(labels.counts[field])
            for judgment in example.answer["judgments"]
            for field in ("charges", "articles")
        )
        if sound:
            known += 1
            decoded = TASK.ask.decode(TASK.ask.target(example), example, labels)
            assert decoded.answer == example.answer, example.id
            assert decoded.repairs == (), example.id
    assert known > 250


def test_gold_as_a_hand_in_is_clean_and_scores_one(dev: list[Example], tmp_path: Path) -> None:
    rows = [dump(TASK.data.write(e, e.answer)) for e in dev if e.answer]
    path = tmp_path / "submission.jsonl"
    path.write_text("\n".join(rows) + "\n", "utf-8")
    assert list(check(Reader(TASK), path, DATA / "dev.jsonl")) == []
    scores = score(Reader(TASK), DATA / "dev.jsonl", path)
    assert all(math.isclose(value, 1, abs_tol=1e-12) for value in scores.total.mean.values())
    assert scores.missing == 0
