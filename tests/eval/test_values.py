"""Gold of other cases is refused by the loop that all commands score with."""

from pathlib import Path
from typing import Any

import pytest

from panjue.eval.score import score
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from tests.eval.records import Row, Write

READER = Reader(load_task("judgment"))
THEFT, FRAUD = (["盗窃罪"], ["264"], 8), (["诈骗罪"], ["266"], 10)


@pytest.fixture
def gold(case: Row, write: Write) -> Path:
    """Return two cases, of 甲 and 乙 and of 丙."""
    cases = [case(1, ("甲", *THEFT), ("乙", *FRAUD)), case(2, ("丙", *THEFT))]
    return write("gold.jsonl", cases)


def test_a_submission_of_other_defendants_is_refused(gold: Path, row: Row, write: Write) -> None:
    others = [row(1, ("丁", *THEFT), ("戊", *FRAUD)), row(2, ("己", *THEFT))]
    path = write("submission.jsonl", others)
    with pytest.raises(UserError) as raised:
        score(READER, gold, path)
    assert str(raised.value) == (
        f"{path}: names other defendants than {gold} in 2 of 2 cases; id 1 has 甲、乙 there and "
        "丁、戊 here; are these the right files?"
    )


def test_a_submission_of_other_ids_is_refused(gold: Path, row: Row, write: Write) -> None:
    path = write("submission.jsonl", [row(7, ("甲", *THEFT))])
    with pytest.raises(UserError) as raised:
        score(READER, gold, path)
    assert str(raised.value) == (
        f"{path}: none of its 1 rows has an id of {gold}; are these the right files?"
    )


def test_gold_without_examples_is_refused(row: Row, write: Write, tmp_path: Path) -> None:
    path = write("submission.jsonl", [row(7, ("甲", *THEFT))])
    (tmp_path / "gold.jsonl").touch()
    with pytest.raises(UserError, match=r"gold\.jsonl: has no examples$"):
        score(READER, tmp_path / "gold.jsonl", path)


@pytest.mark.parametrize(
    "judgments",
    [
        {1: [("丁", *THEFT)], 2: [("丙", *THEFT)]},  # one defendant is enough
        {1: [], 2: []},  # nobody is answered, nobody is another
        {1: [("丁", *THEFT)], 2: []},
    ],
)
def test_a_submission_that_may_be_of_these_cases_is_scored(
    judgments: dict[int, list[Any]], gold: Path, row: Row, write: Write
) -> None:
    path = write("submission.jsonl", [row(key, *of) for key, of in judgments.items()])
    score(READER, gold, path)
