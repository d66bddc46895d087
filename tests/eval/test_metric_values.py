"""Gold of other cases is refused by the loop that all commands score with."""

from pathlib import Path

import pytest

from panjue.eval.score import score
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from tests.records import Row, Write

READER = Reader(load_task("judgment"))
THEFT = (["盗窃罪"], ["264"], 8)
OTHERS = [("丁", *THEFT), ("戊", *THEFT)]


@pytest.fixture
def gold(case: Row, write: Write) -> Path:
    """Return two cases, of 甲 and 乙 and of 丙."""
    cases = [case(1, ("甲", *THEFT), ("乙", *THEFT)), case(2, ("丙", *THEFT))]
    return write("gold.jsonl", cases)


def test_a_submission_of_other_cases_is_refused(gold: Path, row: Row, write: Write) -> None:
    path = write("submission.jsonl", [row(1, *OTHERS), row(2, OTHERS[0])])
    told = f"^{path}: .* in 2 of 2 cases; id 1 has .*; are these the right files"
    with pytest.raises(UserError, match=told):
        score(READER, gold, path)


def test_gold_without_examples_is_refused(write: Write) -> None:
    with pytest.raises(UserError, match=r"gold\.jsonl: has no examples$"):
        score(READER, write("gold.jsonl", []), write("submission.jsonl", []))


def test_a_submission_that_may_be_of_these_cases_is_scored(
    gold: Path, row: Row, write: Write
) -> None:
    """One case has other names than gold, and one has none."""
    score(READER, gold, write("submission.jsonl", [row(1, *OTHERS), row(2)]))
