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

from panjue.prompts.example import Decoded, Example, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, configured, load_task
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE, speakers
from panjue.prompts.tasks.dialogue.solve import CONTEXT

TASK = load_task("dialogue")


SAMPLE = Path(__file__).parents[3] / "prompts/tasks/dialogue/sample.folder"

NONE = Labels()

WINDOWS = pytest.mark.parametrize("window", [1, 2, 100])


def dialogue(sentences: int, holders: str = "甲乙丙") -> Example:
    chat = [
        {"Holder": holders[i % len(holders)], "sentence": f"这是第{i}句。"}
        for i in range(1, sentences + 1)
    ]
    return TASK.data.read({"id": "1", "chat": chat})


def told(question: Example) -> Decoded:
    """Answer a question: with an event for each speaker, named by the first sentence."""
    sentences = [
        {"id": turn.number, **{field: f"{field}{turn.number}" for field in SEXTUPLE}}
        for turn in question.turns
    ]
    emotion = {"state": "neutral", "reason": f"理由{question.turns[0].number}", "source_id": ""}
    event = {"event": f"事件{question.turns[0].number % 2}", "emotions": [emotion]}
    holders = [{"holder": name, "events": [event]} for name in speakers(question.turns)]
    return Decoded({"sentences": sentences, "holders": holders})


def asked(task: Task, example: Example) -> tuple[list[Example], Any]:
    questions: list[Example] = []

    def reply(_: int, question: Example) -> Decoded:
        questions.append(question)
        return told(question)

    return questions, run_steps(task.solving(example), reply)


@given(st.integers(1, 80), st.integers(1, 40))
def test_every_sentence_is_asked_once_and_nothing_after_it_is_shown(
    sentences: int, window: int
) -> None:
    task, example = configured(TASK, {"window": window}), dialogue(sentences)
    questions, answer = asked(task, example)
    assert asked(task, example) == (questions, answer), "the same replies, the same questions"
    assert [turn.number for q in questions for turn in q.turns] == list(range(1, sentences + 1))
    assert [one["id"] for one in answer["sentences"]] == list(range(1, sentences + 1))
    assert len({question.id for question in questions}) == len(questions)
    for question in questions:
        shown = [int(number) for number in re.findall(r"这是第(\d+)句", question.text)]
        first, last = question.turns[0].number, question.turns[-1].number
        assert shown == list(range(max(1, first - CONTEXT), last + 1))


def test_what_a_call_is_shown_and_how_the_replies_are_joined() -> None:
    task = configured(TASK, {"window": 2})
    questions, answer = asked(task, dialogue(5, "甲乙"))
    content = task.ask.prompt(questions[2])[0]["content"]
    assert content.split("\n\n", 1)[1].splitlines() == [
        "对话：",
        *(f"[{n}] {'甲乙'[n % 2]}：这是第{n}句。" for n in range(1, 6)),
        "",
        "已有事件：事件1",
        "需要回答的句子：5",
    ]
    [first, second] = answer["holders"]
    assert (first["holder"], second["holder"]) == ("乙", "甲")
    assert [event["event"] for event in first["events"]] == ["事件1"]
    assert [one["reason"] for one in first["events"][0]["emotions"]] == ["理由1", "理由3", "理由5"]
    assert [one["reason"] for one in second["events"][0]["emotions"]] == ["理由1", "理由3"]


@WINDOWS
def test_what_is_taught_is_what_a_perfect_run_sees(window: int) -> None:
    task = configured(TASK, {"window": window})
    for example in Reader(task).read(SAMPLE):
        taught = list(task.training_examples(example))
        for question in taught:
            target = task.ask.target(question)
            Draft202012Validator(task.ask.schema(question, NONE)).validate(json.loads(target))
            assert task.ask.decode(target, question, NONE) == Decoded(question.answer or {})

        def reply(call: int, question: Example, taught: list[Example] = taught) -> Decoded:
            assert replace(taught[call], answer=question.answer) == question
            return Decoded(taught[call].answer or {})

        answer = run_steps(task.solving(example), reply)
        gold = example.answer or {}
        assert answer["sentences"] == gold["sentences"]
        # No emotion is lost on the way, though gold does not say of which sentence it is.
        assert reasons(answer["holders"]) == reasons(gold["holders"])


@WINDOWS
def test_gold_of_a_holder_who_says_nothing_is_not_taught(window: int) -> None:
    task = configured(TASK, {"window": window})
    example = next(Reader(task).read(SAMPLE))
    gold = example.answer or {}
    absent = {"holder": "不在场的人", "events": gold["holders"][0]["events"]}
    real = replace(example, answer={**gold, "holders": [absent, *gold["holders"]]})
    taught = list(task.training_examples(real))
    assert taught == list(task.training_examples(example))


def reasons(holders: Any) -> dict[str, list[str]]:
    return {
        one["holder"]: sorted(m["reason"] for e in one["events"] for m in e["emotions"])
        for one in holders
    }


@WINDOWS
@given(reply=st.text() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps))
def test_whatever_a_call_is_answered_with_the_answer_is_complete(window: int, reply: str) -> None:
    task, example = configured(TASK, {"window": window}), next(Reader(TASK).read(SAMPLE))
    answer = run_steps(
        task.solving(example), lambda _, question: task.ask.decode(reply, question, NONE)
    )
    assert list(task.data.check(example, task.data.write(example, answer), None)) == []


def test_a_reply_that_is_cut_is_read_as_far_as_it_goes() -> None:
    example = next(Reader(TASK).read(SAMPLE))
    reply = TASK.ask.target(example)
    cut = TASK.ask.decode(reply[: reply.index('"source_id"')], example, NONE)
    assert cut.answer["sentences"] == (example.answer or {})["sentences"]
    assert [event["event"] for event in cut.answer["holders"][0]["events"]] == ["饮酒之争"]


def test_a_holder_who_is_answered_in_parts_has_the_events_of_all() -> None:
    example = next(Reader(TASK).read(SAMPLE))
    answer = json.loads(TASK.ask.target(example))
    [first, *others] = answer["holders"]
    emotion = {"state": "doubt", "reason": "又问", "source_id": ""}
    further = {"event": "另一事", "emotions": [emotion]}
    again = {"holder": first["holder"], "events": [*first["events"], further]}
    reply = json.dumps({**answer, "holders": [first, *others, again]})
    read = TASK.ask.decode(reply, example, NONE)
    assert read.answer["holders"] == [again, *others]
    assert read.repairs


@pytest.mark.parametrize("reply", ["", "{}", '{"sentences": [], "holders": []}', "没有观点"])
def test_a_reply_without_a_sentence_or_a_holder_is_unreadable(reply: str) -> None:
    example = next(Reader(TASK).read(SAMPLE))
    assert not TASK.ask.decode(reply, example, NONE).readable


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"windw": 3}, "no setting 'windw'; did you mean 'window'"),
        ({"window": 0}, "greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match="solve: ") as error:
        configured(TASK, given)
    assert told in str(error.value)
    with pytest.raises(UserError, match="takes one call"):
        configured(load_task("judgment"), given)


@pytest.mark.parametrize(("state", "notes"), [("", 0), ("doubt", 0), ("joy", 1)])
def test_gold_may_have_an_empty_state(state: str, notes: int) -> None:
    chat = [{"Holder": "甲", "sentence": "…", **{field.title(): "" for field in SEXTUPLE}}]
    emotion = {"state": state, "reason": "理由", "source_id": "1"}
    emo = {"甲": {"events": [{"event": "事件", "emotions": [emotion]}]}}
    example = TASK.data.read({"id": "1", "chat": chat, "emo": emo})
    assert len(example.notes) == notes


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        ('"aspect"', '"aspects"', 2),
        ('"emotions"', '"emotion"', 1),
        ('"state": "doubt"', '"state": ""', 1),
        ('"holder"', '"who"', 1),
        ('"holder": "甲"', '"holder": "乙"', 1),
        ('"emo": {"甲"', '"emo": {"乙"', 1),
        ('"chat": [', '"chat": [], "c": [', 1),
    ],
)
def test_faults_of_a_submission(old: str, new: str, faults: int) -> None:
    example = dialogue(1, "甲")
    sextuple = {**dict.fromkeys(SEXTUPLE, "…"), "sentiment": "doubt"}
    emotion = {"state": "doubt", "reason": "理由", "source_id": "1"}
    events = [{"event": "事件", "emotions": [emotion]}]
    answer = {"sentences": [sextuple], "holders": [{"holder": "甲", "events": events}]}
    row = TASK.data.write(example, answer)
    assert list(TASK.data.check(example, row, None)) == []
    text = json.dumps(row, ensure_ascii=False)
    assert old in text
    changed = json.loads(text.replace(old, new))
    assert len(list(TASK.data.check(example, changed, None))) == faults


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
