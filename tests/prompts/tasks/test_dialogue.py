"""Long dialogues: every sentence once, nothing looks ahead, and training sees what use sees."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from rich.console import Console

from panjue.eval.fairness import fairness, show
from panjue.eval.score import score
from panjue.prompts.example import Decoded, Example, Turn, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import BUILT_IN, Task, comparing, configured, load_task
from panjue.prompts.tasks.dialogue.metric import holder_points, sextuple_points
from panjue.prompts.tasks.dialogue.sextuples import FIELDS
from panjue.prompts.tasks.dialogue.similarity import (
    Matching,
    make_matching,
    ngrams,
    says_yes,
)
from panjue.prompts.tasks.dialogue.solve import OTHER, Bucket, windows
from panjue.prompts.tasks.metrics import Row, name_of

TASK = load_task("dialogue")


def sextuple(gold: Row, row: Row | None) -> float:
    return sextuple_points(gold, row, make_matching())


SAMPLE = Path(__file__).parents[3] / "prompts/tasks/dialogue/sample.folder"

NONE = Labels()

WAYS: list[dict[str, Any]] = [
    {"way": "whole"},
    {"way": "window", "window": 3, "step": 2, "emotion_window": 4, "emotion_step": 3},
    {"way": "window", "window": None, "emotion_window": None},
]

sizes = st.integers(1, 40).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k)))


def dialogue(sentences: int, holders: str = "甲乙丙") -> Example:
    chat = [
        {"Holder": holders[i % len(holders)], "sentence": f"这是第{i}句。"}
        for i in range(1, sentences + 1)
    ]
    return TASK.data.read({"id": "1", "chat": chat})


def topic(number: int) -> str:
    """Name an event by the sentence alone, so that windows cannot matter."""
    return ("口服液", "大学", "", "油田")[number * 7 % 11 % 4]


def told(question: Example) -> Decoded:
    """Answer any question, in the form that its step asks for."""
    match question.inputs.get("step"):
        case "window":
            rows = [
                {"id": t.number, "target": "它", "event": topic(t.number)} for t in question.turns
            ]
            return Decoded({"sentences": rows})
        case "sextuple":
            number = question.turns[0].number
            return Decoded({field: f"{field}{number}" for field in FIELDS})
    return TASK.ask.decode("", question, NONE)


def asked(task: Task, example: Example) -> tuple[list[Example], Any]:
    questions: list[Example] = []

    def reply(_: int, question: Example) -> Decoded:
        questions.append(question)
        return told(question)

    return questions, run_steps(task.answer.solving(example), reply)


@given(st.integers(1, 300), sizes)
def test_windows_bring_every_sentence_once_and_show_those_just_before(
    sentences: int, size: tuple[int, int]
) -> None:
    window, step = size
    slides = list(windows(sentences, window, step))
    assert [i for _, new in slides for i in new] == list(range(sentences))
    assert slides[0] == (range(0), range(min(window, sentences)))
    for seen, new in slides[1:]:
        assert seen.stop == new.start
        assert len(seen) == window - step
        assert 0 < len(new) <= step


def test_an_event_that_is_much_alike_is_the_same() -> None:
    bucket = Bucket(0.6)
    for number, event in enumerate(
        ["口服液之争", "口服液的争论", "孩子上大学", "口服液之争", ""], 1
    ):
        bucket.add(Turn(number, "甲乙"[number % 2], f"第{number}句"), "它", event)
    # 口服液之争 and 口服液的争论 share 口 服 液 争 口服 服液: 6 / sqrt(9 * 11) = 0.603.
    assert {
        event: [turn.number for turn, _ in account] for event, account in bucket.accounts.items()
    } == {"口服液之争": [1, 2, 4], "孩子上大学": [3], OTHER: [5]}
    lines = "[1] 乙谈它：第1句\n[2] 甲谈它：第2句\n"
    assert bucket.account(Turn(2, "甲", "第2句")) == (["乙", "甲"], lines)
    with pytest.raises(AssertionError):
        bucket.add(Turn(1, "甲", "第1句"), "它", "口服液之争")


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_sentence_is_read_without_what_comes_after_it(way: dict[str, Any]) -> None:
    task, long = configured(TASK, way), dialogue(30)
    questions, _ = asked(task, long)
    sextuples = [q for q in questions if q.inputs["step"] == "sextuple"]
    assert [q.turns[0].number for q in sextuples] == list(range(1, 31))
    for i, question in enumerate(sextuples, start=1):
        content = task.ask.prompt(question)[0]["content"]
        assert f"第{i}句" in content
        assert not any(f"第{later}句" in content for later in range(i + 1, 31))


def test_what_each_step_is_shown() -> None:
    """The second window of two, the last sentence, and the emotions of the last window."""
    task = configured(
        TASK, {"window": 3, "step": 2, "emotion_window": 3, "emotion_step": 2, "same_event": 1}
    )
    questions, _ = asked(task, dialogue(5, "甲乙"))
    shown = {
        q.id: task.ask.prompt(q)[0]["content"].split("\n\n", 1)[1].rstrip("\n") for q in questions
    }
    assert [key for key in shown if "sextuple" not in str(key)] == [
        "1/window 0", "1/window 1", "1/emotions 0", "1/emotions 1",
    ]  # fmt: skip
    # topic: 1 油田, 2 油田 … by the number alone; the window has seen 3 and brings 4 and 5.
    assert shown["1/window 0"].splitlines()[-2:] == ["已有事件：（无）", "需要回答的句子：1、2、3"]
    assert shown["1/window 1"].splitlines() == [
        "对话片段：",
        "[3] 乙：这是第3句。",
        "[4] 甲：这是第4句。",
        "[5] 乙：这是第5句。",
        "",
        f"已有事件：{'；'.join(dict.fromkeys(topic(n) or OTHER for n in (1, 2, 3)))}",
        "需要回答的句子：4、5",
    ]
    event = topic(5) or OTHER
    mine = [n for n in range(1, 6) if (topic(n) or OTHER) == event]
    assert shown["1/sextuple 5"].splitlines() == [
        f"事件：{event}",
        f"参与者：{'、'.join(dict.fromkeys('甲乙'[n % 2] for n in mine))}",
        "经过：",
        *(f"[{n}] {'甲乙'[n % 2]}谈它：这是第{n}句。" for n in mine),
        "",
        "这句话：[5] 乙：这是第5句。",
    ]
    assert shown["1/emotions 1"].splitlines() == [
        *(
            f"[{n}] {'甲乙'[n % 2]}：【{topic(n) or OTHER}】"
            f"target{n}｜aspect{n}｜opinion{n}｜sentiment{n}｜rationale{n}"
            for n in (3, 4, 5)
        ),
        "",
        "需要回答的句子：4、5",
    ]


def test_the_switches_do_what_they_say() -> None:
    long = dialogue(12)
    for keys, steps in (
        ({"window": 4, "step": 4}, (3, 12, 1)),
        ({"window": None}, (1, 12, 1)),
        ({"emotion_window": None, "emotion_step": 1}, (1, 12, 1)),
        ({"emotion_window": 4, "emotion_step": 2}, (1, 12, 5)),
    ):
        questions, _ = asked(configured(TASK, keys), long)
        names = [question.inputs["step"] for question in questions]
        assert tuple(map(names.count, ("window", "sextuple", "emotions"))) == steps, keys


@pytest.mark.parametrize("way", WAYS)
def test_the_same_replies_lead_to_the_same_questions(way: dict[str, Any]) -> None:
    task, example = configured(TASK, way), dialogue(25)
    first, answer = asked(task, example)
    assert asked(task, example) == (first, answer)
    ids = [question.id for question in first]
    assert len(set(ids)) == len(ids)
    row = task.data.write(example, answer)
    assert not [f for f in task.data.check(example, row, None) if "sentiment" not in f]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_taught_is_what_a_perfect_run_sees(way: dict[str, Any]) -> None:
    task = configured(TASK, {**way, "merge": False})
    for example in Reader(task).read(SAMPLE):
        taught = list(task.answer.training_examples(example))
        for question in taught:
            Draft202012Validator(task.ask.schema(question, NONE)).validate(
                json.loads(task.ask.target(question))
            )
            assert task.ask.decode(task.ask.target(question), question, NONE) == Decoded(
                question.answer or {}
            )
        number = iter(range(len(taught)))

        def reply(
            call: int, question: Example, taught: list[Example] = taught, number: Any = number
        ) -> Decoded:
            assert call == next(number)
            assert replace(taught[call], answer=question.answer) == question
            return Decoded(taught[call].answer or {})

        answer = run_steps(task.answer.solving(example), reply)
        told = [{field: one[field] for field in FIELDS} for one in answer["sentences"]]
        gold = example.answer or {}
        assert told == [{field: one[field] for field in FIELDS} for one in gold["sentences"]]
        # No emotion is lost on the way, though gold does not say of which sentence it is.
        assert reasons(answer["holders"]) == reasons(gold["holders"])


def reasons(holders: Any) -> dict[str, list[str]]:
    return {
        one["holder"]: sorted(m["reason"] for e in one["events"] for m in e["emotions"])
        for one in holders
    }


@pytest.mark.parametrize("merge", [True, False])
def test_every_way_merges_if_it_is_to(merge: bool) -> None:
    task, example = (
        configured(TASK, {"way": "whole", "merge": merge}),
        next(Reader(TASK).read(SAMPLE)),
    )
    reply = TASK.ask.target(example)  # 甲 is negative twice about 饮酒之争
    answer = run_steps(
        task.answer.solving(example), lambda _, question: task.ask.decode(reply, question, NONE)
    )
    chains = [len(event["emotions"]) for event in answer["holders"][0]["events"]]
    assert chains == ([1, 1] if merge else [2, 1])


@pytest.mark.parametrize("way", WAYS)
@given(
    reply=st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)
)
def test_whatever_a_step_is_answered_with_the_answer_is_complete(
    way: dict[str, Any], reply: str
) -> None:
    task, example = configured(TASK, way), next(Reader(TASK).read(SAMPLE))
    answer = run_steps(
        task.answer.solving(example), lambda _, question: task.ask.decode(reply, question, NONE)
    )
    assert list(task.data.check(example, task.data.write(example, answer), None)) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"way": "windows"}, "solve: way: Input should be"),
        ({"windw": 3}, "no setting 'windw'; did you mean 'window'"),
        ({"window": 4, "step": 5}, "step must not exceed its window, 4"),
        ({"step": 0}, "greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match="solve: ") as error:
        configured(TASK, given)
    assert told in str(error.value)
    with pytest.raises(UserError, match="takes one call"):
        configured(load_task("judgment"), given)


def test_all_real_dialogues_are_read(shared: Path) -> None:
    folder = shared / "emocaustics"
    examples = list(Reader(TASK).read(folder))
    assert len(examples) == 700
    assert [int(example.id) for example in examples] == sorted(int(e.id) for e in examples)
    broken = [e.id for e in examples if e.answer and e.answer["holders"] is None]
    assert broken == ["117", "421", "451"]
    notes = {e.id: e.notes[0] for e in examples if e.id in broken}
    assert all(note.startswith(f"emo/emo_{key}.json") for key, note in notes.items())
    assert sum(len(example.turns) for example in examples) == 43676
    assert sum("sentiment" in note for example in examples for note in example.notes) > 50


def matching_of(alike: dict[tuple[str, str], float], *, agrees: bool = True) -> Matching:
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
    assert holder_points(gold, told, matching_of(alike)) == pytest.approx(0.3125)
    assert holder_points(gold, told, matching_of(alike, agrees=False)) == 0.0
    assert holder_points(gold, told, matching_of({**alike, ("争吵", "吵架"): 0.7})) == 0.0


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


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("是", True),
        ("否。", False),
        ("“是”", True),
        ("**Yes**", True),
        ("NO", False),
        ("不是", False),
        ("<think>是不是呢</think>\n是", True),
        ("否。前者是盗窃，后者是销赃。", False),
        ("No, the first is 是", False),
        ("是的，二者是同一件事", True),
        ("是否为同一件事：否", None),
        ("前者是盗窃，后者不是", None),
        ("The answer is yes or no", None),
        ("也许", None),
    ],
)
def test_what_a_judge_says(reply: str, said: bool | None) -> None:
    if said is not None:
        assert says_yes(reply, "judge") is said
        return
    with pytest.raises(UserError, match="not one of 是 and 否; set another judge"):
        says_yes(reply, "judge")


def test_metrics_compare_by_what_they_are_given() -> None:
    with pytest.raises(UserError, match="neither agree nor URL#MODEL"):
        comparing(TASK, "ngrams", "yes")
    with pytest.raises(UserError, match="compare no texts"):
        comparing(load_task("judgment"), "ngrams", "http://127.0.0.1:9/v1#m")
    assert comparing(TASK, *BUILT_IN) is TASK
    other = comparing(TASK, "ngrams", "http://127.0.0.1:9/v1#m")
    assert other.score.names == TASK.score.names
    assert other.score.compared_by != TASK.score.compared_by


def test_a_group_with_nothing_to_score_is_null_and_never_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = shutil.copytree(SAMPLE, tmp_path / "gold")
    (gold / "emo/emo_1.json").write_text("{", "utf-8")
    told = folder_of(tmp_path)
    (tmp_path / "groups.jsonl").write_text('{"id":"1","g":"a"}\n{"id":"2","g":"b"}\n', "utf-8")
    (event,) = (metric for metric in TASK.score.metrics if name_of(metric) == "event")
    by_events = replace(TASK, score=replace(TASK.score, metrics=(event,)))
    reader = Reader(by_events, side_groups(tmp_path / "groups.jsonl"))
    found = fairness(reader, gold, told, ["g"], min_n=1)
    numbers = json.loads(json.dumps(found.to_json(), allow_nan=False))["attributes"]["g"]
    assert numbers["groups"]["a"]["value"] is None
    assert numbers["groups"]["b"]["value"] == 1.0
    assert (numbers["worst_group"], numbers["worst"], numbers["mean"]) == ("b", 1.0, 1.0)
    show(found, Console())
    assert "nan" not in capsys.readouterr().out.lower()


TEXTS = st.lists(st.text("甲乙ab ", max_size=6), min_size=1, max_size=5)


@given(TEXTS, TEXTS)
def test_cosines_are_symmetric_and_of_equal_texts_one(texts: list[str], others: list[str]) -> None:
    table = ngrams(texts, others)
    assert table.shape == (len(texts), len(others))
    assert np.allclose(table, ngrams(others, texts).T)
    assert ((table >= 0) & (table <= 1 + 1e-9)).all()
    assert np.allclose(np.diagonal(ngrams(texts, texts)), 1.0)
    # One pair of texts has the same cosine in any company.
    assert np.isclose(ngrams(texts[:1], others[:1])[0, 0], table[0, 0])


def test_cosines_by_hand() -> None:
    # ab: a b ab. abc: a b c ab bc. aab: a twice, b, aa, ab.
    table = ngrams(["ab", ""], ["abc", "aab", "", "丙"])
    first = [3 / np.sqrt(3 * 5), (2 + 1 + 1) / np.sqrt(3 * 7), 0.0, 0.0]
    assert np.allclose(table, [first, [0.0, 0.0, 1.0, 0.0]])
