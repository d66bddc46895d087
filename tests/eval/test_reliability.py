from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.reliability import reliability
from panjue.eval.score import score
from panjue.prompts.plumbing.files import dump, read_lines, sha256, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from tests.records import Row, Write

TASK = load_task("judgment")


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1))
def test_the_bins_hold_every_judgment_once(pairs: list[tuple[float, bool]]) -> None:
    found = reliability([sure for sure, _ in pairs], [right for _, right in pairs])
    assert sum(one.count for one in found.bins) == len(pairs)
    assert 0 <= found.ece <= 1


def test_calibration_error_worked_by_hand() -> None:
    # Four at 0.9, three of them right: |0.9 - 0.75| * 4/6. Two at 0.2, none right: 0.2 * 2/6.
    found = reliability([0.9] * 4 + [0.2] * 2, [True] * 3 + [False] * 3)
    assert found.ece == pytest.approx(0.15 * 4 / 6 + 0.2 * 2 / 6)
    assert [one.count for one in found.bins] == [2, 4]


def decoding(submission: Path) -> dict[str, Any]:
    return {"unreadable": 0, "calls": 10, "submission_sha256": sha256(submission)}


@pytest.fixture
def files(case: Row, row: Row, write: Write) -> tuple[Path, Path]:
    """Return gold and a submission that is wrong exactly where it is not sure."""
    right, wrong = ("甲", ["盗窃罪"], ["264"], 13), ("甲", ["诈骗罪"], ["266"], 8)
    mate = ("乙", ["盗窃罪"], ["264"], 13)
    gold = write("gold.jsonl", [case(i, right, mate) for i in range(10)])
    sure = {"charges": 0.9, "articles": 0.9, "penalty": 0.9}
    unsure = dict.fromkeys(sure, 0.1)
    answers = [row(i, wrong if i < 3 else right, mate) for i in range(10)]
    submission = write("run/submission.jsonl", answers)
    confidence = [{"id": i, "confidence": [unsure if i < 3 else sure, sure]} for i in range(10)]
    write("run/confidence.jsonl", confidence)
    write_json(submission.parent / "decode.json", decoding(submission))
    return gold, submission


def test_the_error_of_a_run_is_that_of_its_judgments_by_name(
    files: tuple[Path, Path], write: Write
) -> None:
    gold, submission = files
    turned = []
    for _, row in read_lines(gold):
        turned.append({**row, "defendants": ["乙", "甲"], "outcomes": row["outcomes"][::-1]})
    found = score(Reader(TASK), write("gold.jsonl", turned), submission).calibration
    assert found is not None
    assert found["penalty"].ece == pytest.approx(0.1)


def test_confidence_is_not_taken_for_that_of_another_submission(
    files: tuple[Path, Path], write: Write
) -> None:
    gold, submission = files
    other = submission.with_name("other.jsonl")
    other.write_text(submission.read_text("utf-8").replace("诈骗罪", "抢劫罪"), "utf-8")
    scores = score(Reader(TASK), gold, other)
    assert scores.calibration is None
    assert scores.unreadable_rate is None


def test_a_changed_name_is_left_out_as_the_metric_leaves_it_out(files: tuple[Path, Path]) -> None:
    gold, submission = files
    *lines, last = submission.read_text("utf-8").splitlines(keepends=True)
    submission.write_text("".join([*lines, last.replace('"乙"', '"丙"')]), "utf-8")
    (submission.parent / "decode.json").write_text(dump(decoding(submission)), "utf-8")
    found = score(Reader(TASK), gold, submission)
    assert found.total.mean["final"] == pytest.approx(1 - 0.5 * 4 / 10)
    assert found.calibration is not None
    assert sum(one.count for one in found.calibration["penalty"].bins) == 19
