"""Labels outside the lists of a contest's stage count for nothing."""

from pathlib import Path

import pytest
from rich.console import Console

from panjue.eval.score import ScoreResult, score
from panjue.eval.show_scores import show
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from tests.records import Row, Write

JUDGMENT = Reader(load_task("judgment"))
CHARGES = {"盗窃罪": 0, "诈骗罪": 1, "抢劫罪": 2}
ARTICLES = {"264": 0, "266": 1, "263": 2}


@pytest.fixture
def files(case: Row, row: Row, write: Write) -> tuple[Path, Path]:
    """Return gold and a submission, each with labels that the stage does not have."""
    gold = case(0, ("甲", ["盗窃罪", "赌博罪"], ["264"], 11), ("乙", ["赌博罪"], ["263"], 8))
    told = [("甲", ["盗窃罪", "绑架罪"], ["264", "999"], 11), ("乙", ["赌博罪"], ["263"], 8)]
    return write("gold.jsonl", [gold]), write("submission.jsonl", [row(0, *told)])


@pytest.fixture
def lists(tmp_path: Path) -> list[Path]:
    """Return the lists as the contest gives them, a file each."""
    for name, numbers in (("charge2idx.json", CHARGES), ("article2idx.json", ARTICLES)):
        write_json(tmp_path / name, numbers)
    return [tmp_path / "charge2idx.json", tmp_path / "article2idx.json"]


def printed(scores: ScoreResult, capsys: pytest.CaptureFixture[str]) -> str:
    show(scores, Console(width=200))
    return capsys.readouterr().out


LINE = "labels outside the lists: 2 in gold, 3 in the submission; as in the contest, none counts\n"


def test_labels_outside_the_lists(
    files: tuple[Path, Path], lists: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers are those of drdz/baseline (CAIL2024, c4790bf of 2025-07-08) with these lists:
    an extra label outside costs nothing, and what is gold outside cannot be won."""
    scores = score(JUDGMENT, *files, labels=lists)
    found = scores.total.mean
    assert (found["charge_f1"], found["article_f1"], found["penalty_accuracy"]) == (0.5, 1, 1)
    assert found["final"] == pytest.approx(0.85)
    assert LINE in printed(scores, capsys)
    assert scores.to_json()["outside"] == {"gold": 2, "submission": 3}
    full = score(JUDGMENT, *files)
    assert full.total.mean["charge_f1"] == pytest.approx((1 / 2 + 1) / 2)
    assert "outside" not in printed(full, capsys)
    assert "outside" not in full.to_json()


def test_the_labels_of_a_run_are_lists_too(files: tuple[Path, Path], tmp_path: Path) -> None:
    collect([{"charges": CHARGES, "articles": ARTICLES, "penalty": []}]).save(tmp_path / "run")
    found = score(JUDGMENT, *files, labels=[tmp_path / "run/labels.json"])
    assert found.total.mean["final"] == pytest.approx(0.85)


def test_what_is_no_list(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for value in ({"x": 1}, ["x"], 3):
        path.write_text(dump(value), "utf-8")
        with pytest.raises(UserError, match="shares no label with the answers; is it a list"):
            score(JUDGMENT, *files, labels=[path])


def test_a_task_of_a_closed_list_has_no_other(tmp_path: Path, write: Write) -> None:
    gold = write("gold.jsonl", [{"id": 1, "text": "…", "labels": [1]}])
    with pytest.raises(UserError, match="the labels of this task are always the same"):
        score(Reader(load_task("ecthr")), gold, tmp_path, labels=[gold])
