"""Long dialogues: every sentence once, nothing looks ahead, and training sees what use sees."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from panjue.prompts.example import Decoded, Example, Turn, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, configured, load_task
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE
from panjue.prompts.tasks.dialogue.solve import OTHER_EVENT, Events, windows

TASK = load_task("dialogue")


SAMPLE = Path(__file__).parents[3] / "prompts/tasks/dialogue/sample.folder"

NONE = Labels()

WAYS: list[dict[str, Any]] = [
    {"way": "whole"},
    {"way": "window", "window": 3, "step": 2},
    {"way": "window", "window": 100},
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
            return Decoded({field: f"{field}{number}" for field in SEXTUPLE})
    return TASK.ask.decode("", question, NONE)


def asked(task: Task, example: Example) -> tuple[list[Example], Any]:
    questions: list[Example] = []

    def reply(_: int, question: Example) -> Decoded:
        questions.append(question)
        return told(question)

    return questions, run_steps(task.solving(example), reply)


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
    events = Events()
    for number, event in enumerate(
        ["口服液之争", "口服液的争论", "孩子上大学", "口服液之争", ""], 1
    ):
        events.add(Turn(number, "甲乙"[number % 2], f"第{number}句"), "它", event)
    # 口服液之争 and 口服液的争论 share 口 服 液 争 口服 服液: 6 / sqrt(9 * 11) = 0.603.
    assert {
        event: [turn.number for turn, _ in seen] for event, seen in events.sentences.items()
    } == {"口服液之争": [1, 2, 4], "孩子上大学": [3], OTHER_EVENT: [5]}
    lines = "[1] 乙谈它：第1句\n[2] 甲谈它：第2句\n"
    assert events.summary(Turn(2, "甲", "第2句")) == (["乙", "甲"], lines)
    with pytest.raises(AssertionError):
        events.add(Turn(1, "甲", "第1句"), "它", "口服液之争")


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
    task = configured(TASK, {"window": 3, "step": 2})
    questions, _ = asked(task, dialogue(5, "甲乙"))
    shown = {
        q.id: task.ask.prompt(q)[0]["content"].split("\n\n", 1)[1].rstrip("\n") for q in questions
    }
    assert [key for key in shown if "sextuple" not in str(key)] == [
        "1/window 0", "1/window 1", "1/emotions 0",
    ]  # fmt: skip
    # topic: 1 油田, 2 油田 … by the number alone; the window has seen 3 and brings 4 and 5.
    assert shown["1/window 0"].splitlines()[-2:] == ["已有事件：（无）", "需要回答的句子：1、2、3"]
    assert shown["1/window 1"].splitlines() == [
        "对话片段：",
        "[3] 乙：这是第3句。",
        "[4] 甲：这是第4句。",
        "[5] 乙：这是第5句。",
        "",
        f"已有事件：{'；'.join(dict.fromkeys(topic(n) or OTHER_EVENT for n in (1, 2, 3)))}",
        "需要回答的句子：4、5",
    ]
    event = topic(5) or OTHER_EVENT
    mine = [n for n in range(1, 6) if (topic(n) or OTHER_EVENT) == event]
    assert shown["1/sextuple 5"].splitlines() == [
        f"事件：{event}",
        f"参与者：{'、'.join(dict.fromkeys('甲乙'[n % 2] for n in mine))}",
        "经过：",
        *(f"[{n}] {'甲乙'[n % 2]}谈它：这是第{n}句。" for n in mine),
        "",
        "这句话：[5] 乙：这是第5句。",
    ]
    assert shown["1/emotions 0"].splitlines() == [
        *(
            f"[{n}] {'甲乙'[n % 2]}：【{topic(n) or OTHER_EVENT}】"
            f"target{n}｜aspect{n}｜opinion{n}｜sentiment{n}｜rationale{n}"
            for n in range(1, 6)
        ),
        "",
        "需要回答的句子：1、2、3、4、5",
    ]


def test_how_many_calls_a_dialogue_takes() -> None:
    for keys, steps in (({"window": 4, "step": 4}, (11, 41, 3)), ({"window": 50}, (1, 41, 3))):
        questions, _ = asked(configured(TASK, keys), dialogue(41))
        names = [question.inputs["step"] for question in questions]
        assert tuple(map(names.count, ("window", "sextuple", "emotions"))) == steps, keys


@pytest.mark.parametrize("way", WAYS)
def test_the_same_replies_lead_to_the_same_questions(way: dict[str, Any]) -> None:
    task, example = configured(TASK, way), dialogue(45)
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
        taught = list(task.training_examples(example))
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

        answer = run_steps(task.solving(example), reply)
        told = [{field: one[field] for field in SEXTUPLE} for one in answer["sentences"]]
        gold = example.answer or {}
        assert told == [{field: one[field] for field in SEXTUPLE} for one in gold["sentences"]]
        # No emotion is lost on the way, though gold does not say of which sentence it is.
        assert reasons(answer["holders"]) == reasons(gold["holders"])


@pytest.mark.parametrize("way", WAYS)
def test_gold_of_a_holder_who_says_nothing_is_not_taught(way: dict[str, Any]) -> None:
    task = configured(TASK, way)
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


@pytest.mark.parametrize("merge", [True, False])
def test_every_way_merges_if_it_is_to(merge: bool) -> None:
    task, example = (
        configured(TASK, {"way": "whole", "merge": merge}),
        next(Reader(TASK).read(SAMPLE)),
    )
    reply = TASK.ask.target(example)  # 甲 is negative twice about 饮酒之争
    answer = run_steps(
        task.solving(example), lambda _, question: task.ask.decode(reply, question, NONE)
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
        task.solving(example), lambda _, question: task.ask.decode(reply, question, NONE)
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
