"""Dialogues are scored by what their texts mean."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from panjue.eval.fairness import fairness, show_fairness
from panjue.eval.metric_values import metric_values, pooled
from panjue.eval.shown import items_of
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import load_task, task_folders
from panjue.prompts.tasks.dialogue.metric import holder_points, sextuple
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE
from panjue.prompts.tasks.dialogue.similarity import cosine
from panjue.prompts.tasks.metrics import Row, name_of

TASK = load_task("dialogue")
SAMPLE = task_folders()["dialogue"] / "sample.folder"


def sentence(*sextuples: tuple[str, ...]) -> dict[str, Any]:
    """Return a sentence of a submission with these targets, aspects, opinions and so on."""
    return {"final_model_response": [dict(zip(SEXTUPLE, one, strict=True)) for one in sextuples]}


RIGHT = ("它", "质量", "很好", "positive", "用过")
WRONG = ("它", "价格", "不好", "neutral", "听说")


@pytest.mark.parametrize(
    ("answer", "points"),
    [
        (sentence(RIGHT), 4),
        (sentence(("别的", "质量", "很好", "positive", "用过")), 4),  # the target does not count
        (sentence(("它", "质量", "很好", "neutral", "用过")), 3),
        (sentence(("它", "价格", "很好", "Positive", "用过")), 2),
        (sentence(WRONG), 0),
        (sentence(WRONG, RIGHT), 4),  # the best counts
        (sentence(), 0),
        (sentence(("", "", "", "", "")), 0),
        # 很好 and 很好看: 很 好 很好, of 很 好 看 很好 好看: 3 / sqrt(15) = 0.775, just too little.
        (sentence(("它", "质量", "很好看", "positive", "用过")), 3),
    ],
)
def test_a_sentence_has_four_points(answer: Row, points: int) -> None:
    assert sextuple({"chat": [sentence(RIGHT)]}, {"chat": [answer]}) == points / 4


def emotion(state: str, reason: str, source: str = "2") -> dict[str, str]:
    return {"state": state, "reason": reason, "source_id": source}


def event(name: str, *emotions: Row) -> dict[str, Any]:
    return {"event": name, "emotions": list(emotions)}


def test_the_authors_example() -> None:
    """One matching event out of two, three matching reasons, two right and one in the state only.

    (2 + 2 + 1) / (2 * 4) / 2 = 0.3125.
    """
    gold = [
        event("争吵", *(emotion("negative", f"他说的理由{i}") for i in range(4))),
        event("和好", emotion("positive", "道歉")),
    ]
    emotions = [
        emotion("negative", "他说的理由0。"),
        emotion("negative", "他说的理由1。"),
        emotion("negative", "他说的理由2。", "3"),
        emotion("negative", "别的"),
    ]
    other = event("另一件事", emotion("positive", "道歉"))
    # 3 / sqrt(3 * 5) = 0.775
    assert holder_points(gold, [event("争吵。", *emotions), other]) == pytest.approx(0.3125)
    # 3 / sqrt(3 * 7) = 0.65, too little
    assert holder_points(gold, [event("争吵一场", *emotions)]) == 0.0


@pytest.mark.parametrize(
    ("damage", "sextuples", "events"),
    [
        (lambda row: row["emo"].update(丙={"events": []}), 1, 1),  # gold does not have this holder
        (lambda row: row["emo"].pop("2"), 1, 1),  # no answer is no events, which is right
        (lambda row: row["emo"].pop("1"), 1, 1 / 2),
        (lambda row: row["emo"]["1"].update(events=None), 1, 1 / 2),
        (lambda row: row["emo"]["1"]["events"][0].update(emotions=None), 1, 1 / 2),
        (lambda row: row["chat"][0].update(final_model_response=[]), 2 / 3, 1),
        (lambda row: row["chat"][2].update(final_model_response=[{"target": "它"}]), 2 / 3, 1),
    ],
)
def test_every_flaw_costs(
    damage: Callable[[dict[str, Any]], object], sextuples: float, events: float
) -> None:
    *_, example = Reader(TASK).read(SAMPLE)
    gold = TASK.gold(example)
    row = deepcopy(dict(gold))
    damage(row)
    assert scored(gold, row) == pytest.approx([events, sextuples])
    assert scored(gold, None) == pytest.approx([0, 0])
    assert list(items_of(TASK, gold, row)), "a report shows the row too"


def scored(gold: Row, row: Row | None) -> Any:
    return pooled(TASK, metric_values(TASK, gold, row, ""), np.array(1.0))


def test_a_group_with_nothing_to_score_is_null_and_never_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TASK.data.submission.writing(tmp_path / "answers") as write:
        for example in Reader(TASK).read(SAMPLE):
            write(TASK.gold(example))
    gold = shutil.copytree(SAMPLE, tmp_path / "gold")
    (gold / "emo/emo_1.json").write_text("{", "utf-8")
    (tmp_path / "groups.jsonl").write_text('{"id":"1","g":"a"}\n{"id":"2","g":"b"}\n', "utf-8")
    (event,) = (metric for metric in TASK.score.metrics if name_of(metric) == "event")
    by_events = replace(TASK, score=replace(TASK.score, metrics=(event,)))
    reader = Reader(by_events, side_groups(tmp_path / "groups.jsonl"))
    monkeypatch.setattr("panjue.eval.fairness.MIN_EXAMPLES", 1)
    found = fairness(reader, gold, tmp_path / "answers", ["g"])
    numbers = json.loads(json.dumps(found.to_json(), allow_nan=False))["attributes"]["g"]
    assert numbers["groups"]["a"]["value"] is None
    assert numbers["groups"]["b"]["value"] == 1.0
    assert (numbers["worst_group"], numbers["worst"], numbers["mean"]) == ("b", 1.0, 1.0)
    show_fairness(found, Console())
    assert "nan" not in capsys.readouterr().out.lower()


TEXTS = st.text("甲乙ab ", max_size=6)


@given(TEXTS, TEXTS)
def test_cosines_are_symmetric_and_of_equal_texts_one(text: str, other: str) -> None:
    assert cosine(text, other) == pytest.approx(cosine(other, text))
    assert 0 <= cosine(text, other) <= 1 + 1e-9
    assert cosine(text, text) == 1


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [
        ("ab", "abc", 3 / sqrt(3 * 5)),  # a b ab, of a b c ab bc
        ("ab", "aab", (2 + 1 + 1) / sqrt(3 * 7)),  # a twice, b, aa, ab
        ("ab", "", 0),
        ("ab", "丙", 0),
    ],
)
def test_cosines_by_hand(text: str, other: str, expected: float) -> None:
    assert cosine(text, other) == pytest.approx(expected)
