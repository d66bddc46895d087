"""Dialogues are scored by what their texts mean."""

import json
import shutil
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
from panjue.eval.score import score
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import load_task
from panjue.prompts.tasks.dialogue.metric import holder_points, sextuple
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE
from panjue.prompts.tasks.dialogue.similarity import cosine
from panjue.prompts.tasks.metrics import Row, name_of

TASK = load_task("dialogue")
SAMPLE = Path(__file__).parents[3] / "prompts/tasks/dialogue/sample.folder"


def sentence(*fields: str) -> dict[str, Any]:
    told = [dict(zip(SEXTUPLE, fields, strict=True))] if fields else []
    return {"input_sentence": "…", "holder": "1", "event": "", "final_model_response": told}


def emotion(state: str, reason: str, source: str = "1") -> dict[str, str]:
    return {"state": state, "reason": reason, "source_id": source}


def event(name: str, *emotions: Row) -> dict[str, Any]:
    return {"event": name, "emotions": list(emotions)}


GOLD = sentence("它", "质量", "很好", "positive", "用过")


@pytest.mark.parametrize(
    ("told", "points"),
    [
        (GOLD, 4),
        (sentence("别的", "质量", "很好", "positive", "用过"), 4),  # the target does not count
        (sentence("它", "质量", "很好", "neutral", "用过"), 3),
        (sentence("它", "价格", "很好", "Positive", "用过"), 2),
        (sentence("它", "价格", "不好", "neutral", "听说"), 0),
        (sentence(), 0),
        (sentence("", "", "", "", ""), 0),
        # 很好 and 很好看: 很 好 很好, of 很 好 看 很好 好看: 3 / sqrt(15) = 0.775, just too little.
        (sentence("它", "质量", "很好看", "positive", "用过"), 3),
    ],
)
def test_a_sentence_has_four_points(told: Row, points: int) -> None:
    assert sextuple({"chat": [GOLD]}, {"chat": [told]}) == pytest.approx(points / 4)


def test_the_authors_example() -> None:
    """One matching event out of two, three matching reasons, two right and one in the state only.

    (2 + 2 + 1) / (2 * 4) / 2 = 0.3125.
    """
    gold = [
        event("争吵", *(emotion("negative", f"他说的理由{i}", "2") for i in range(4))),
        event("和好", emotion("positive", "道歉", "2")),
    ]
    told = [
        event(
            "争吵。",  # 3 / sqrt(3 * 5) = 0.775
            emotion("negative", "他说的理由0。", "2"),
            emotion("negative", "他说的理由1。", "2"),
            emotion("negative", "他说的理由2。", "3"),
            emotion("negative", "别的", "2"),
        ),
        event("另一件事", emotion("positive", "道歉", "2")),
    ]
    assert holder_points(gold, told) == pytest.approx(0.3125)
    other = [event("争吵一场", *told[0]["emotions"])]  # 3 / sqrt(3 * 7) = 0.65, too little
    assert holder_points(gold, other) == 0.0


def folder_of(tmp_path: Path, name: str = "told") -> Path:
    with TASK.data.submission.writing(tmp_path / name) as write:
        for example in Reader(TASK).read(SAMPLE):
            write(TASK.gold(example))
    return tmp_path / name


def damaged(folder: Path, place: str, change: Any) -> Path:
    value = json.loads((folder / place).read_text("utf-8"))
    change(value)
    (folder / place).write_text(json.dumps(value, ensure_ascii=False), "utf-8")
    return folder


def test_gold_against_itself_is_perfect_and_every_flaw_costs(tmp_path: Path) -> None:
    assert score(Reader(TASK), SAMPLE, folder_of(tmp_path)).total.mean == {
        "sextuple": 1.0,
        "event": 1.0,
    }
    # A holder that gold does not have counts for nothing; one that is not answered, as no events.
    told = damaged(folder_of(tmp_path), "emo/emo_1.json", lambda emo: emo.update(丙={"events": []}))
    assert score(Reader(TASK), SAMPLE, told).total.mean["event"] == 1.0
    told = damaged(folder_of(tmp_path), "emo/emo_2.json", lambda emo: emo.pop("2"))
    assert score(Reader(TASK), SAMPLE, told).total.mean["event"] == 1.0
    told = damaged(folder_of(tmp_path), "emo/emo_2.json", lambda emo: emo.pop("1"))
    assert score(Reader(TASK), SAMPLE, told).total.mean["event"] == pytest.approx((1 + 0.5) / 2)
    told = damaged(
        folder_of(tmp_path),
        "chat/chat_2.json",
        lambda chat: chat[0].update(final_model_response=[]),
    )
    assert score(Reader(TASK), SAMPLE, told).total.mean["sextuple"] == pytest.approx(
        (1 + 2 / 3) / 2
    )
    (told / "chat/chat_1.json").unlink()
    scores = score(Reader(TASK), SAMPLE, told)
    assert scores.missing == 1
    assert scores.total.mean == {"sextuple": pytest.approx(1 / 3), "event": 0.5}


def test_a_group_with_nothing_to_score_is_null_and_never_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gold = shutil.copytree(SAMPLE, tmp_path / "gold")
    (gold / "emo/emo_1.json").write_text("{", "utf-8")
    told = folder_of(tmp_path)
    (tmp_path / "groups.jsonl").write_text('{"id":"1","g":"a"}\n{"id":"2","g":"b"}\n', "utf-8")
    (event,) = (metric for metric in TASK.score.metrics if name_of(metric) == "event")
    by_events = replace(TASK, score=replace(TASK.score, metrics=(event,)))
    reader = Reader(by_events, side_groups(tmp_path / "groups.jsonl"))
    monkeypatch.setattr("panjue.eval.fairness.MIN_EXAMPLES", 1)
    found = fairness(reader, gold, told, ["g"])
    numbers = json.loads(json.dumps(found.to_json(), allow_nan=False))["attributes"]["g"]
    assert numbers["groups"]["a"]["value"] is None
    assert numbers["groups"]["b"]["value"] == 1.0
    assert (numbers["worst_group"], numbers["worst"], numbers["mean"]) == ("b", 1.0, 1.0)
    show_fairness(found, Console())
    assert "nan" not in capsys.readouterr().out.lower()


TEXTS = st.text("甲乙ab ", max_size=6)


@given(TEXTS, TEXTS)
def test_cosines_are_symmetric_and_of_equal_texts_one(text: str, other: str) -> None:
    assert np.isclose(cosine(text, other), cosine(other, text))
    assert 0 <= cosine(text, other) <= 1 + 1e-9
    assert np.isclose(cosine(text, text), 1.0)


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [
        ("ab", "abc", 3 / sqrt(3 * 5)),  # a b ab, of a b c ab bc
        ("ab", "aab", (2 + 1 + 1) / sqrt(3 * 7)),  # a twice, b, aa, ab
        ("ab", "", 0),
        ("ab", "丙", 0),
        ("", "", 1),
    ],
)
def test_cosines_by_hand(text: str, other: str, expected: float) -> None:
    assert cosine(text, other) == pytest.approx(expected)
