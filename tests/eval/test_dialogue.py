"""Scores of dialogues, by hand; and of real gold against itself."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

from panjue.eval.check import check
from panjue.eval.dialogue import chain_points, holder_points, sextuple
from panjue.eval.fairness import report
from panjue.eval.fairness_page import page
from panjue.eval.matching import Matching, current, make_matching, matching_by, verdict
from panjue.eval.score import score
from panjue.prompts.errors import UserError
from panjue.prompts.sextuples import FIELDS
from panjue.prompts.task import Row, beside, load_task

TASK = load_task("dialogue")
SAMPLE = Path(__file__).parents[1] / "samples/dialogue.folder"


def given(alike: dict[tuple[str, str], float], *, agrees: bool = True) -> Matching:
    """Return a matching by given similarities; equal texts are alike, all others are not."""

    def similar(texts: Any, others: Any) -> Any:
        return np.array([[alike.get((a, b), float(a == b)) for b in others] for a in texts])

    return Matching("given", similar, lambda _a, _b: agrees)


def sentence(*fields: str) -> dict[str, Any]:
    told = [dict(zip(FIELDS, fields, strict=True))] if fields else []
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


def test_an_empty_field_is_like_an_empty_one_only() -> None:
    gold = {"chat": [sentence("它", "", "很好", "positive", "")]}
    assert sextuple(gold, {"chat": [sentence("它", "", "很好", "positive", "")]}) == 1.0
    assert sextuple(gold, {"chat": [GOLD]}) == 0.5


def test_where_gold_is_empty_only_an_empty_answer_counts() -> None:
    gold = {"chat": [sentence(), GOLD]}
    assert sextuple(gold, {"chat": [sentence(), GOLD]}) == 1.0
    assert sextuple(gold, {"chat": [sentence("", "", "", "", ""), GOLD]}) == 1.0
    assert sextuple(gold, {"chat": [GOLD, GOLD]}) == 0.5
    assert sextuple(gold, {"chat": [sentence()]}) == 0.5  # a sentence that is not there
    assert sextuple(gold, None) == 0.0


def test_of_several_sextuples_the_best_counts() -> None:
    worse = sentence("它", "价格", "不好", "neutral", "用过")["final_model_response"]
    for told in (worse + GOLD["final_model_response"], GOLD["final_model_response"] + worse):
        both = {**GOLD, "final_model_response": told}
        assert sextuple({"chat": [GOLD]}, {"chat": [both]}) == 1.0
        assert sextuple({"chat": [GOLD] * 2}, {"chat": [both, GOLD]}) == 1.0


def test_many_sextuples_cost_no_square_of_memory() -> None:
    many = {**GOLD, "final_model_response": GOLD["final_model_response"] * 8000}
    assert sextuple({"chat": [GOLD]}, {"chat": [many]}) == 1.0  # a table of all would take 0.5 GB


def test_the_authors_example() -> None:
    """One matching event out of two, three matching reasons, two right and one in the state only.

    (2 + 2 + 1) / (2 * 4) / 2 = 0.3125.
    """
    gold = [
        event("争吵", *(emotion("negative", f"理由{i}", "2") for i in range(4))),
        event("和好", emotion("positive", "道歉", "2")),
    ]
    told = [
        event(
            "吵架",
            emotion("negative", "原因0", "2"),
            emotion("negative", "原因1", "2"),
            emotion("negative", "原因2", "3"),
            emotion("negative", "别的", "2"),
        ),
        event("另一件事", emotion("positive", "道歉", "2")),
    ]
    alike = {("争吵", "吵架"): 0.71, **{(f"理由{i}", f"原因{i}"): 0.8 for i in range(3)}}
    assert holder_points(gold, told, given(alike)) == pytest.approx(0.3125)
    assert holder_points(gold, told, given(alike, agrees=False)) == 0.0
    assert holder_points(gold, told, given({**alike, ("争吵", "吵架"): 0.7})) == 0.0


def test_emotions_are_matched_so_that_the_points_are_most() -> None:
    gold = [emotion("negative", "甲"), emotion("positive", "乙")]
    told = [emotion("positive", "丙"), emotion("negative", "丁")]
    # 甲 is like both; the first come would take 丙 and leave nothing for 乙.
    alike = {("甲", "丙"): 0.95, ("甲", "丁"): 0.9, ("乙", "丙"): 0.9}
    assert chain_points(gold, told, given(alike)) == 1.0
    assert chain_points(gold, told[:1], given(alike)) == 0.5
    assert chain_points(gold, [told[0], told[0]], given(alike)) == pytest.approx(3 / 4)


def test_of_matchings_with_equal_points_the_more_alike_is_taken() -> None:
    gold = [emotion("negative", "甲"), emotion("negative", "乙")]
    told = [emotion("negative", "丙"), emotion("doubt", "丁", "9")]
    # 丙 gives two points wherever it goes, 丁 none: no emotion may be counted twice.
    alike = {(a, b): 0.9 for a in "甲乙" for b in "丙丁"}
    assert chain_points(gold, told, given(alike)) == 0.5


def test_events_are_matched_one_to_one() -> None:
    gold = [event("甲", emotion("negative", "理由")), event("乙", emotion("doubt", "问"))]
    one = event("丙", emotion("negative", "理由"))
    alike = {("甲", "丙"): 0.9, ("乙", "丙"): 0.9}
    assert holder_points(gold, [one], given(alike)) == 0.5
    assert holder_points(gold, [one, one], given(alike)) == 0.5


def test_an_empty_gold_list_wants_an_empty_answer() -> None:
    matching = given({})
    assert holder_points([], [], matching) == 1.0
    assert holder_points([], [event("事")], matching) == 0.0
    assert holder_points([event("事")], [], matching) == 0.0
    assert holder_points([event("事")], [event("事")], matching) == 1.0
    assert holder_points([event("事")], [event("事", emotion("doubt", "问"))], matching) == 0.0


def folder_of(tmp_path: Path, name: str = "told") -> Path:
    with TASK.handin.writing(tmp_path / name) as write:
        for example in TASK.read(SAMPLE):
            write(TASK.gold(example))
    return tmp_path / name


def damaged(folder: Path, place: str, change: Any) -> Path:
    value = json.loads((folder / place).read_text("utf-8"))
    change(value)
    (folder / place).write_text(json.dumps(value, ensure_ascii=False), "utf-8")
    return folder


def test_gold_against_itself_is_perfect_and_every_flaw_costs(tmp_path: Path) -> None:
    assert score(TASK, SAMPLE, folder_of(tmp_path)).total.mean == {"sextuple": 1.0, "event": 1.0}
    # A holder that gold does not have counts for nothing; one that is not answered, as no events.
    told = damaged(folder_of(tmp_path), "emo/emo_1.json", lambda emo: emo.update(丙={"events": []}))
    assert score(TASK, SAMPLE, told).total.mean["event"] == 1.0
    told = damaged(folder_of(tmp_path), "emo/emo_2.json", lambda emo: emo.pop("2"))
    assert score(TASK, SAMPLE, told).total.mean["event"] == 1.0
    told = damaged(folder_of(tmp_path), "emo/emo_2.json", lambda emo: emo.pop("1"))
    assert score(TASK, SAMPLE, told).total.mean["event"] == pytest.approx((1 + 0.5) / 2)
    told = damaged(
        folder_of(tmp_path),
        "chat/chat_2.json",
        lambda chat: chat[0].update(final_model_response=[]),
    )
    assert score(TASK, SAMPLE, told).total.mean["sextuple"] == pytest.approx((1 + 2 / 3) / 2)
    (told / "chat/chat_1.json").unlink()
    scores = score(TASK, SAMPLE, told)
    assert scores.missing == 1
    assert scores.total.mean == {"sextuple": pytest.approx(1 / 3), "event": 0.5}


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("chat/chat_1.json", lambda chat: chat[0]["final_model_response"][0].update(aspect=["质"])),
        ("chat/chat_1.json", lambda chat: chat[0].update(final_model_response={})),
        ("chat/chat_1.json", lambda chat: chat[0].update(final_model_response=None)),
        ("emo/emo_1.json", lambda emo: emo["甲"].update(events=None)),
        ("emo/emo_1.json", lambda emo: emo.update(甲=None)),
        ("emo/emo_1.json", lambda emo: emo["甲"]["events"][0].pop("emotions")),
    ],
)
def test_what_is_not_in_the_form_is_no_score(place: str, change: Any, tmp_path: Path) -> None:
    told = damaged(folder_of(tmp_path), place, change)
    with pytest.raises(UserError, match="id 1 is not in the hand-in format"):
        score(TASK, SAMPLE, told)
    assert list(check(TASK, told, SAMPLE))


def test_the_check_wants_every_speaker_and_known_states(tmp_path: Path) -> None:
    told = damaged(folder_of(tmp_path), "emo/emo_1.json", lambda emo: emo.pop("乙"))
    assert [fault.split(": ", 2)[2] for fault in check(TASK, told, SAMPLE)] == [
        "holder '乙' is not answered"
    ]
    told = damaged(
        folder_of(tmp_path),
        "emo/emo_1.json",
        lambda emo: emo["乙"]["events"][0]["emotions"][0].update(state="XX"),
    )
    [fault] = check(TASK, told, SAMPLE)
    assert "the state 'XX' is none of positive" in fault


def test_without_any_events_to_score_there_is_no_event_score(tmp_path: Path) -> None:
    gold = shutil.copytree(SAMPLE, tmp_path / "gold")
    (gold / "emo/emo_1.json").unlink()
    scores = score(TASK, gold, folder_of(tmp_path))
    assert scores.total.mean["event"] == 1.0
    assert scores.total.interval["event"] == (1.0, 1.0)  # draws without the other do not count
    assert scores.notes == ["1: emo/emo_1.json is missing: no events are scored"]
    (gold / "emo/emo_2.json").write_text("{}", "utf-8")  # nobody to score
    found = score(TASK, gold, folder_of(tmp_path)).to_json()
    assert found["event"] is None
    assert found["interval"]["event"] == [None, None]
    assert found["sextuple"] == 1.0


def test_emotions_that_cannot_be_read_leave_the_mean(tmp_path: Path) -> None:
    gold = shutil.copytree(SAMPLE, tmp_path / "gold")
    (gold / "emo/emo_1.json").write_text("{", "utf-8")
    told = damaged(folder_of(tmp_path), "emo/emo_2.json", lambda emo: emo.pop("1"))
    scores = score(TASK, gold, told)
    assert scores.total.mean == {"sextuple": 1.0, "event": 0.5}
    assert [note.split(":")[0] for note in scores.notes] == ["1"]
    assert "emo/emo_1.json: not JSON" in scores.notes[0]


def test_the_command_says_what_texts_were_compared_by(
    tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    told, numbers = folder_of(tmp_path), tmp_path / "scores.json"
    done = panjue("score", SAMPLE, told, "--task", "dialogue", "--json", numbers)
    assert done.returncode == 0, done.stderr
    written = json.loads(numbers.read_text("utf-8"))
    assert (written["sextuple"], written["event"]) == (1.0, 1.0)
    assert written["compared_by"] == "cosine: character 1-2-grams, judge: agree (built in)"
    assert " ".join(done.stdout.split()).count("judge: agree (built in)") == 2  # in both tables
    check = ("check", told, "--cases", SAMPLE, "--task", "dialogue")
    clean = panjue(*check)
    assert clean.stdout.endswith(": clean\n"), clean.stdout
    damaged(told, "chat/chat_2.json", lambda chat: chat[0].update(holder="9"))
    torn = panjue(*check)
    assert torn.returncode == 1
    assert "chat/chat_2.json: id 2: sentence 1: is not what the dialogue has there" in torn.stdout


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("是", True),
        ("否。", False),
        ("“是”", True),
        ("**Yes**", True),
        ("NO", False),
        ("是否为同一件事：否", False),
        ("不是", False),
        ("<think>是不是呢</think>\n是", True),
    ],
)
def test_what_a_judge_says(reply: str, said: bool) -> None:
    assert verdict(reply, "judge") is said


@pytest.mark.parametrize("reply", ["", "也许", "<think>是", "nothing"])
def test_a_judge_must_say_something(reply: str) -> None:
    with pytest.raises(UserError, match=r"judge x: answers .* take another judge"):
        verdict(reply, "judge x")


def test_metrics_compare_by_what_they_are_given() -> None:
    assert current() is current()
    other = given({})
    with matching_by(other):
        assert current() is other
    assert current() is not other
    with pytest.raises(UserError, match="neither agree nor URL#MODEL"):
        make_matching(judge="yes")


def test_real_gold_against_itself_is_perfect_and_the_same_twice(
    shared: Path, tmp_path: Path
) -> None:
    gold = tmp_path / "gold"
    for kind in ("chat", "emo"):
        (gold / kind).mkdir(parents=True)
        for number in [*range(110, 150), 421, 451]:
            source = shared / "emocaustics" / kind / f"{kind}_{number}.json"
            if source.exists():
                shutil.copy(source, gold / kind)
    with TASK.handin.writing(tmp_path / "told") as write:
        for example in TASK.read(gold):
            write({**TASK.gold(example), "emo": TASK.gold(example)["emo"] or {}})
    first, again = (score(TASK, gold, tmp_path / "told") for _ in range(2))
    assert first.total.mean == {"sextuple": 1.0, "event": 1.0}
    assert first.to_json() == again.to_json()
    assert len([note for note in first.notes if "not JSON" in note]) == 3


def test_a_group_with_nothing_to_score_is_null_and_never_the_worst(tmp_path: Path) -> None:
    gold = shutil.copytree(SAMPLE, tmp_path / "gold")
    (gold / "emo/emo_1.json").write_text("{", "utf-8")
    told = folder_of(tmp_path)
    (tmp_path / "groups.jsonl").write_text('{"id":"1","g":"a"}\n{"id":"2","g":"b"}\n', "utf-8")
    task = beside(TASK, tmp_path / "groups.jsonl")
    found = report("dialogue", task, gold, told, ["g"], metric="event", min_n=1)
    numbers = json.loads(json.dumps(found.to_json(), allow_nan=False))["attributes"]["g"]
    assert numbers["groups"]["a"]["value"] is None
    assert numbers["groups"]["b"]["value"] == 1.0
    assert (numbers["worst_group"], numbers["worst"], numbers["mean"]) == ("b", 1.0, 1.0)
    assert "nan" not in page(found).lower()
