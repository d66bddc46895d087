"""Long dialogues: every sentence once, nothing looks ahead, and training sees what use sees."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from panjue.prompts.example import Answer, Decoded, Example, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.render import neutralize
from panjue.prompts.task import configured, load_task, task_folders
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE
from panjue.prompts.tasks.dialogue.solve import CONTEXT

TASK = load_task("dialogue")
SAMPLE = task_folders()["dialogue"] / "sample.folder"
EXAMPLE = next(Reader(TASK).read(SAMPLE))
GOLD: Answer = EXAMPLE.answer or {}


def dialogue(sentences: int) -> Example:
    numbers = range(1, sentences + 1)
    chat = [{"Holder": "甲乙丙"[n % 3], "sentence": f"这是第{n}句。"} for n in numbers]
    return TASK.data.read({"id": "1", "chat": chat})


@given(st.integers(1, 80), st.integers(1, 40))
def test_every_sentence_is_asked_once_and_nothing_after_it_is_shown(
    sentences: int, window: int
) -> None:
    task = configured(TASK, {"window": window})
    questions = []

    def reply(_: int, question: Example) -> Decoded:
        questions.append(question)
        return task.ask.decode("", question, Labels())

    answer = run_steps(task.solving(dialogue(sentences)), reply)
    assert [turn.number for q in questions for turn in q.turns] == list(range(1, sentences + 1))
    assert [one["id"] for one in answer["sentences"]] == list(range(1, sentences + 1))
    assert len({question.id for question in questions}) == len(questions)
    for question in questions:
        shown = [int(number) for number in re.findall(r"这是第(\d+)句", question.text)]
        first, last = question.turns[0].number, question.turns[-1].number
        assert len(question.turns) <= window
        assert shown == list(range(max(1, first - CONTEXT), last + 1))


def test_dialogues_are_grouped_by_their_length() -> None:
    groups = [dialogue(sentences).groups["turns"] for sentences in (1, 20, 21, 60, 61)]
    assert groups == ["1-20", "1-20", "21-60", "21-60", "61+"]


def test_what_a_call_is_shown() -> None:
    *_, last = configured(TASK, {"window": 3}).training_examples(EXAMPLE)
    content = TASK.ask.prompt(last)[0]["content"]
    assert content.split("\n\n", 1)[1].splitlines() == [
        "对话：",
        *(f"[{t.number}] {t.holder}：{neutralize(t.sentence)}" for t in EXAMPLE.turns),
        "",
        "已有事件：饮酒之争；儿子升学",
        "需要回答的句子：4、5",
    ]


def events_of(answer: Answer) -> dict[str, list[tuple[str, list[str]]]]:
    """Return holder -> (event, sorted reasons of its emotions) of all events, sorted."""
    events = {}
    for holder in answer["holders"]:
        events[holder["holder"]] = sorted(
            (event["event"], sorted(emotion["reason"] for emotion in event["emotions"]))
            for event in holder["events"]
        )
    return events


@pytest.mark.parametrize("window", [1, 2, 100])
def test_what_is_taught_is_what_a_perfect_run_sees(window: int) -> None:
    task = configured(TASK, {"window": window})
    for example in Reader(task).read(SAMPLE):
        gold = example.answer or {}
        absent = {"holder": "不在场的人", "events": gold["holders"][0]["events"]}
        holders = [absent, *gold["holders"]]  # what he feels is not taught
        taught = list(task.training_examples(replace(example, answer={**gold, "holders": holders})))
        for question in taught:
            target = task.ask.target(question)
            Draft202012Validator(task.ask.schema(question, Labels())).validate(json.loads(target))
            assert task.ask.decode(target, question, Labels()) == Decoded(question.answer or {})

        def reply(call: int, question: Example, taught: list[Example] = taught) -> Decoded:
            assert replace(taught[call], answer=question.answer) == question
            return Decoded(taught[call].answer or {})

        answer = run_steps(task.solving(example), reply)
        assert answer["sentences"] == gold["sentences"]
        # No emotion is lost on the way, though gold does not say of which sentence it is.
        assert events_of(answer) == events_of(gold)


@given(reply=st.text() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps))
def test_whatever_a_call_is_answered_with_the_answer_is_complete(reply: str) -> None:
    task = configured(TASK, {"window": 2})
    answer = run_steps(
        task.solving(EXAMPLE), lambda _, question: task.ask.decode(reply, question, Labels())
    )
    assert list(task.data.check(EXAMPLE, task.data.write(EXAMPLE, answer), None)) == []


def test_a_reply_that_is_cut_is_read_as_far_as_it_goes() -> None:
    reply = TASK.ask.target(EXAMPLE)
    cut = TASK.ask.decode(reply[: reply.index('"source_id"')], EXAMPLE, Labels())
    assert cut.answer["sentences"] == GOLD["sentences"]
    assert [event["event"] for event in cut.answer["holders"][0]["events"]] == ["饮酒之争"]


def test_a_holder_who_is_answered_in_parts_has_the_events_of_all() -> None:
    [first, *others] = GOLD["holders"]
    emotion = {"state": "doubt", "reason": "又问", "source_id": ""}
    further = {"event": "另一事", "emotions": [emotion]}
    again = {"holder": first["holder"], "events": [*first["events"], further]}
    reply = json.dumps({**GOLD, "holders": [first, *others, again]})
    decoded = TASK.ask.decode(reply, EXAMPLE, Labels())
    assert decoded.answer["holders"] == [again, *others]
    assert decoded.repairs


def test_a_reply_without_a_sentence_or_a_holder_is_unreadable() -> None:
    assert not TASK.ask.decode('{"sentences": [], "holders": []}', EXAMPLE, Labels()).readable


@pytest.mark.parametrize(
    ("task", "settings", "complaint"),
    [
        ("dialogue", {"windw": 3}, "solve: no setting 'windw'; did you mean 'window'"),
        ("dialogue", {"window": 0}, "solve: .*greater than or equal to 1"),
        ("judgment", {"window": 3}, "solve: this task takes one call"),
    ],
)
def test_wrong_settings_are_named(task: str, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        configured(load_task(task), settings)


@pytest.mark.parametrize(
    ("chat", "complaint"),
    [
        ([], "the chat must list one sentence or more"),
        ([{"sentence": "…"}], "sentence 1: 'sentence' and 'Holder' must be texts"),
        ([{"Holder": "甲", "sentence": "…", "Target": ""}], "some sentences have Target"),
        (
            [{"Holder": "甲", "sentence": "…", **dict.fromkeys(map(str.title, SEXTUPLE), 3)}],
            "sentence 1: 'Target' must be a text",
        ),
    ],
)
def test_a_bad_dialogue(chat: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        TASK.data.read({"id": "1", "chat": chat})


@pytest.mark.parametrize(
    ("sentiment", "state", "note"),
    [
        ("", "", None),
        ("doubt", "doubt", None),
        ("", "joy", "holder 甲: the state 'joy' is none of the five"),
        ("joy", "", "sentence 1: the sentiment 'joy' is none of the five"),
    ],
)
def test_gold_may_have_an_empty_state(sentiment: str, state: str, note: str | None) -> None:
    labels = {**{field.title(): "" for field in SEXTUPLE}, "Sentiment": sentiment}
    emotion = {"state": state, "reason": "理由", "source_id": "1"}
    emo = {"甲": {"events": [{"event": "事件", "emotions": [emotion]}]}}
    chat = [{"Holder": "甲", "sentence": "…", **labels}]
    example = TASK.data.read({"id": "1", "chat": chat, "emo": emo})
    assert example.notes == ((note,) if note else ())


def test_emotions_of_a_holder_who_says_nothing_are_noted() -> None:
    """No reply can have them, and training leaves them out."""
    emotion = {"state": "doubt", "reason": "理由", "source_id": "1"}
    felt = {"events": [{"event": "事件", "emotions": [emotion, emotion]}]}
    emo = {"甲": felt, "乙": felt, "丙": {"events": []}}
    chat = [{"Holder": "甲", "sentence": "…", **{field.title(): "" for field in SEXTUPLE}}]
    example = TASK.data.read({"id": "1", "chat": chat, "emo": emo})
    assert example.notes == ("holder 乙 says nothing: 2 emotions that no reply can have",)
    [question] = TASK.training_examples(example)
    assert [one["holder"] for one in (question.answer or {})["holders"]] == ["甲"]


@pytest.mark.parametrize(
    ("emotions", "note"),
    [
        ({}, "emo/emo_1.json is missing: no events are scored"),
        ({"emo_problem": "emo/emo_1.json: not JSON"}, "emo/emo_1.json: not JSON"),
        ({"emo": {"甲": {}}}, "emo/emo_1.json: 甲.events: Field required"),
    ],
)
def test_gold_emotions_that_cannot_be_used_are_noted(emotions: dict[str, Any], note: str) -> None:
    chat = [{"Holder": "甲", "sentence": "…", **{field.title(): "" for field in SEXTUPLE}}]
    example = TASK.data.read({"id": "1", "chat": chat, **emotions})
    assert (example.notes, (example.answer or {})["holders"]) == ((note,), None)


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        ('"aspect"', '"aspects"', ["sentence 1: the sextuple has no aspect"]),
        ('"emotions"', '"emotion"', ["emo.甲.events.0.emotions: Field required"]),
        ('"state": "negative"', '"state": ""', ["holder 甲: the state '' is none of the five"]),
        ('"holder"', '"who"', ["chat.0.holder: Field required"]),
        ('"holder": "甲"', '"holder": "乙"', ["sentence 1: the text or the holder differs"]),
        ('"emo": {"甲"', '"emo": {"乙"', ["holder '甲' is not answered"]),
        ('"chat": [', '"chat": [], "c": [', ["the chat must list 5 sentences"]),
    ],
)
def test_faults_of_a_submission(old: str, new: str, faults: list[str]) -> None:
    text = json.dumps(TASK.gold(EXAMPLE), ensure_ascii=False)
    assert old in text
    row = json.loads(text.replace(old, new, 1))
    found = list(TASK.data.check(EXAMPLE, row, None))
    assert len(found) == len(faults)
    assert all(map(str.startswith, found, faults))


def test_all_real_dialogues_are_read(real_data: Path) -> None:
    examples = list(Reader(TASK).read(real_data / "emocaustics"))
    assert len(examples) == 700
    assert [int(example.id) for example in examples] == sorted(int(e.id) for e in examples)
    broken = [e for e in examples if e.answer and e.answer["holders"] is None]
    assert [example.id for example in broken] == ["117", "421", "451"]
    assert all(e.notes[0].startswith(f"emo/emo_{e.id}.json") for e in broken)
    assert sum(len(example.turns) for example in examples) == 43676
    assert sum("sentiment" in note for example in examples for note in example.notes) > 50
    silent = [e.id for e in examples if any("says nothing" in note for note in e.notes)]
    assert len(silent) == 155
