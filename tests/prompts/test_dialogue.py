"""Long dialogues: every sentence once, nothing looks ahead, and training sees what use sees."""

import json
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from panjue.prompts.bucket import NOTE, OTHER, Bucket, windows
from panjue.prompts.errors import BadRow, UserError
from panjue.prompts.files import LARGEST_LINE
from panjue.prompts.fit import GAP
from panjue.prompts.labels import Labels
from panjue.prompts.sextuples import FIELDS, MOST_EVENTS, emotion_faults
from panjue.prompts.similarity import ngrams
from panjue.prompts.task import (
    Decoded,
    Example,
    Task,
    Turn,
    configured,
    drive,
    load_task,
)
from panjue.prompts.tasks.dialogue import joined, merged

TASK = load_task("dialogue")
SAMPLE = Path(__file__).parents[1] / "samples/dialogue.folder"
NONE = Labels()

WAYS: list[dict[str, Any]] = [
    {"way": "whole"},
    {"way": "retrieval", "nearest": 2},
    {"way": "window", "window": 3, "step": 2, "emotion_window": 4, "emotion_step": 3},
    {"way": "window", "window": None, "bucket": False, "emotions": "whole"},
]

sizes = st.integers(1, 40).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k)))


def dialogue(sentences: int, holders: str = "甲乙丙") -> Example:
    chat = [
        {"Holder": holders[i % len(holders)], "sentence": f"这是第{i}句。"}
        for i in range(1, sentences + 1)
    ]
    return TASK.from_row({"id": "1", "chat": chat})


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
    return TASK.decode("", question, NONE)


def asked(task: Task, example: Example) -> tuple[list[Example], Any]:
    questions: list[Example] = []

    def reply(_: int, question: Example) -> Decoded:
        questions.append(question)
        return told(question)

    return questions, drive(task.solving(example), reply)


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


def test_windows_of_twenty_by_five() -> None:
    assert list(windows(32, 20, 5)) == [
        (range(0), range(20)),
        (range(5, 20), range(20, 25)),
        (range(10, 25), range(25, 30)),
        (range(15, 30), range(30, 32)),
    ]


@given(st.integers(1, 60), sizes)
def test_the_bucket_has_every_sentence_once_whatever_the_windows(
    sentences: int, size: tuple[int, int]
) -> None:
    task = configured(TASK, {"window": size[0], "step": size[1], "same_event": 1.0})
    _, answer = asked(task, dialogue(sentences))
    events = [one["event"] for one in answer["sentences"]]
    assert [one["id"] for one in answer["sentences"]] == list(range(1, sentences + 1))
    assert events == [topic(n) or OTHER for n in range(1, sentences + 1)]
    assert [one["opinion"] for one in answer["sentences"]] == [
        f"opinion{n}" for n in range(1, sentences + 1)
    ]


def test_an_event_that_is_much_alike_is_the_same() -> None:
    bucket = Bucket(ngrams, 0.6)
    for number, event in enumerate(
        ["口服液之争", "口服液的争论", "孩子上大学", "口服液之争", ""], 1
    ):
        bucket.add(Turn(number, "甲乙"[number % 2], f"第{number}句"), "它", event)
    # 口服液之争 and 口服液的争论 share 口 服 液 争 口服 服液: 6 / sqrt(9 * 11) = 0.603.
    assert [(entry.event, entry.sentence_ids) for entry in bucket.entries] == [
        ("口服液之争", [1, 2, 4]),
        ("孩子上大学", [3]),
        (OTHER, [5]),
    ]
    assert bucket.of(2).description(3) == "[1] 乙谈它：第1句\n[2] 甲谈它：第2句\n"
    assert bucket.of(2).holders(1) == ["乙"]
    with pytest.raises(AssertionError):
        bucket.add(Turn(1, "甲", "第1句"), "它", "口服液之争")


def test_an_account_says_where_it_shortens() -> None:
    bucket = Bucket(ngrams, 0.6)
    entry = bucket.add(Turn(1, "甲", "长" * (NOTE + 1)), "", "事")
    assert entry.description(1) == f"[1] 甲谈{OTHER}：{'长' * NOTE}{GAP}\n"


@given(st.integers(2, 40), sizes)
def test_an_account_cut_at_a_sentence_is_the_snapshot_of_its_window(
    sentences: int, size: tuple[int, int]
) -> None:
    turns = dialogue(sentences).turns
    bucket, snapshots = Bucket(ngrams, 1.0), {}
    for _, new in windows(sentences, *size):
        for i in new:
            bucket.add(turns[i], "它", topic(turns[i].number))
        snapshot = deepcopy(bucket)
        snapshots.update({turns[i].number: snapshot for i in new})
    for number, snapshot in snapshots.items():
        lines = snapshot.of(number).description(10**6).splitlines()
        until = [line for line in lines if int(line[1 : line.index("]")]) <= number]
        assert bucket.of(number).description(number).splitlines() == until


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_sentence_is_read_without_what_comes_after_it(way: dict[str, Any]) -> None:
    task, long = configured(TASK, way), dialogue(30)
    questions, _ = asked(task, long)
    sextuples = [q for q in questions if q.inputs["step"] == "sextuple"]
    assert [q.turns[0].number for q in sextuples] == list(range(1, 31))
    for i, question in enumerate(sextuples, start=1):
        content = task.prompt(question)[0]["content"]
        assert f"第{i}句" in content
        assert not any(f"第{later}句" in content for later in range(i + 1, 31))
        shorter, _ = asked(task, dialogue(i))
        same = [q for q in shorter if q.inputs["step"] == "sextuple"][-1]
        if way["way"] == "retrieval":  # what comes later cannot matter at all
            assert task.prompt(same)[0] == task.prompt(question)[0]


def test_what_each_step_is_shown() -> None:
    """The second window of two, the last sentence, and the emotions of the last window."""
    task = configured(
        TASK, {"window": 3, "step": 2, "emotion_window": 3, "emotion_step": 2, "same_event": 1}
    )
    questions, _ = asked(task, dialogue(5, "甲乙"))
    shown = {q.id: task.prompt(q)[0]["content"].split("\n\n", 1)[1].rstrip("\n") for q in questions}
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
        ({"emotions": "whole", "emotion_window": 3, "emotion_step": 1}, (1, 12, 1)),
        ({"emotion_window": 4, "emotion_step": 2}, (1, 12, 5)),
        ({"way": "retrieval", "emotion_window": 4, "emotion_step": 4}, (0, 12, 3)),
    ):
        questions, _ = asked(configured(TASK, keys), long)
        names = [question.inputs["step"] for question in questions]
        assert tuple(map(names.count, ("window", "sextuple", "emotions"))) == steps, keys
    just_before, _ = asked(configured(TASK, {"bucket": False, "window": 3, "step": 1}), long)
    last = next(q for q in just_before if q.id == "1/sextuple 12")
    assert [line[: line.index("]")] for line in last.text.splitlines()] == ["[9", "[10", "[11"]


def test_retrieval_shows_the_nearest_in_their_order() -> None:
    said = ["苹果很甜", "天气不错", "苹果很贵", "他走了", "苹果很甜很贵"]
    chat = [{"Holder": "甲", "sentence": sentence} for sentence in said]
    task = configured(TASK, {"way": "retrieval", "nearest": 2})
    questions, _ = asked(task, TASK.from_row({"id": "1", "chat": chat}))
    last = next(q for q in questions if q.id == "1/sextuple 5")
    assert last.text == "[1] 甲：苹果很甜\n[3] 甲：苹果很贵\n"


@pytest.mark.parametrize("way", WAYS)
def test_the_same_replies_lead_to_the_same_questions(way: dict[str, Any]) -> None:
    task, example = configured(TASK, way), dialogue(25)
    first, answer = asked(task, example)
    assert asked(task, example) == (first, answer)
    ids = [question.id for question in first]
    assert len(set(ids)) == len(ids)
    row = task.submission(example, answer)
    assert not [f for f in task.faults(example, row, None) if "sentiment" not in f]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_taught_is_what_a_perfect_run_sees(way: dict[str, Any]) -> None:
    task = configured(TASK, {**way, "merge": False})
    for example in task.read(SAMPLE):
        taught = list(task.taught(example))
        for question in taught:
            Draft202012Validator(task.schema(question, NONE)).validate(
                json.loads(task.target(question))
            )
            assert task.decode(task.target(question), question, NONE) == Decoded(
                question.answer or {}
            )
        number = iter(range(len(taught)))

        def reply(
            call: int, question: Example, taught: list[Example] = taught, number: Any = number
        ) -> Decoded:
            assert call == next(number)
            assert replace(taught[call], answer=question.answer) == question
            return Decoded(taught[call].answer or {})

        answer = drive(task.solving(example), reply)
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


STATES = st.sampled_from(["positive", "negative", "doubt"])
CHAINS = st.lists(
    st.fixed_dictionaries(
        {"state": STATES, "reason": st.text("甲乙；，", min_size=1), "source_id": STATES}
    )
)


@given(CHAINS)
def test_a_merged_chain_has_no_equal_neighbours_and_loses_nothing(chain: list[Any]) -> None:
    found = merged(chain)
    states = [one["state"] for one in found]
    assert all(a != b for a, b in pairwise(states))
    assert "；".join(o["reason"] for o in found) == "；".join(o["reason"] for o in chain)
    assert merged(found) == found


@pytest.mark.parametrize("merge", [True, False])
def test_every_way_merges_if_it_is_to(merge: bool) -> None:
    task, example = configured(TASK, {"way": "whole", "merge": merge}), next(TASK.read(SAMPLE))
    reply = TASK.target(example)  # 甲 is negative twice about 饮酒之争
    answer = drive(task.solving(example), lambda _, question: task.decode(reply, question, NONE))
    chains = [len(event["emotions"]) for event in answer["holders"][0]["events"]]
    assert chains == ([1, 1] if merge else [2, 1])


def test_merging_by_hand() -> None:
    def emotion(state: str, reason: str, source: str) -> dict[str, str]:
        return {"state": state, "reason": reason, "source_id": source}

    chain = [
        emotion("negative", "被骂", "2"),
        emotion("negative", "被打", "3"),
        emotion("positive", "和好", "2"),
        emotion("negative", "又被骂", "2"),
    ]
    assert merged(chain) == [
        emotion("negative", "被骂；被打", "2,3"),
        emotion("positive", "和好", "2"),
        emotion("negative", "又被骂", "2"),
    ]
    assert [one["source_id"] for one in chain] == ["2", "3", "2", "2"]  # not changed
    turns = [Turn(1, "1", "…", "争吵"), Turn(2, "2", "…", "争吵")]
    windows_ = [
        Decoded({"holders": [{"holder": "1", "events": [{"event": "争吵", "emotions": part}]}]})
        for part in (chain[:1], chain[1:2])
    ]
    assert joined(turns, windows_, merge=True) == [
        {"holder": "1", "events": [{"event": "争吵", "emotions": [merged(chain)[0]]}]},
        {"holder": "2", "events": []},
    ]


@pytest.mark.parametrize("way", WAYS)
@given(
    reply=st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)
)
def test_whatever_a_step_is_answered_with_the_answer_is_complete(
    way: dict[str, Any], reply: str
) -> None:
    task, example = configured(TASK, way), next(TASK.read(SAMPLE))
    answer = drive(task.solving(example), lambda _, question: task.decode(reply, question, NONE))
    assert list(task.faults(example, task.submission(example, answer), None)) == []


def test_what_can_be_read_of_a_cut_reply_is_read() -> None:
    example = next(TASK.read(SAMPLE))
    reply = TASK.target(example)
    decoded = TASK.decode(reply[: reply.index('{"id":3')] + '{"id":3,"target":"乙', example, NONE)
    assert decoded.readable
    gold = example.answer or {}
    assert decoded.answer["sentences"][:2] == gold["sentences"][:2]
    assert not any(decoded.answer["sentences"][2][field] for field in FIELDS)
    assert [one["events"] for one in decoded.answer["holders"]] == [[], []]


def test_what_the_schema_cannot_hold_is_refused_in_training() -> None:
    chat = [
        {"Holder": "1", "sentence": "好。", "Target": "它", "Aspect": "质量", "Opinion": "好",
         "Sentiment": sentiment, "Rationale": "用过"}
        for sentiment in ("positive", "Neutral")
    ]  # fmt: skip
    emo = {"1": {"events": [{"event": "评价", "emotions": [
        {"state": "defensive", "reason": "用过", "source_id": "1"}]}]}}  # fmt: skip
    example = TASK.from_row({"id": "9", "chat": chat, "emo": emo})
    assert example.notes == (
        "sentence 2: the sentiment 'Neutral' is none of the five",
        "holder 1: the state 'defensive' is none of them",
    )
    bad = [
        question.id
        for question in TASK.taught(example)
        if TASK.decode(TASK.target(question), question, NONE).repairs
    ]
    assert bad == ["9/sextuple 2", "9/emotions 0"]
    broken = TASK.from_row(
        {"id": "9", "chat": chat, "emo": None, "emo_problem": "emo/emo_9.json: torn"}
    )
    assert broken.notes[0] == "emo/emo_9.json: torn"
    assert TASK.gold(broken)["emo"] is None
    refused = [q.id for q in TASK.taught(broken) if TASK.decode(TASK.target(q), q, NONE).repairs]
    assert refused == ["9/sextuple 2", "9/emotions 0"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"similarity": "words"}, "neither ngrams, nor a folder, nor URL#MODEL"),
        ({"kept_in": "/tmp"}, "no setting 'kept_in'"),
        ({"way": "windows"}, "solve: way: Input should be"),
        ({"windw": 3}, "no setting 'windw'; did you mean 'window'"),
        ({"window": 4, "step": 5}, "step must not exceed its window, 4"),
        ({"step": 0}, "greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=r"solve: |similarity: ") as error:
        configured(TASK, given)
    assert told in str(error.value)
    with pytest.raises(UserError, match="takes one call"):
        configured(load_task("judgment"), given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda row: row.update(chat=[]), "must list one sentence or more"),
        (lambda row: row["chat"][1].update(sentence=3), "sentence 2: 'sentence' and 'Holder'"),
        (lambda row: row["chat"][1].pop("Target"), "some sentences have Target"),
        (lambda row: row["chat"][0].update(Aspect=None), "sentence 1: 'Aspect' must be a text"),
    ],
)
def test_broken_chats_are_named(change: Callable[[Any], None], told: str) -> None:
    row = {"id": "1", "chat": json.loads((SAMPLE / "chat/chat_1.json").read_text("utf-8"))}
    change(row)
    with pytest.raises(UserError, match=told):
        TASK.from_row(row)


@pytest.mark.parametrize(
    "emo",
    [
        [],
        {"1": []},
        {"1": {"events": [{"event": "事"}]}},
        {"1": {"events": [{"event": "事", "emotions": [{"state": "doubt"}]}]}},
    ],
)
def test_broken_emotions_are_told_and_no_row_is_lost(emo: Any) -> None:
    row = {"id": "1", "chat": json.loads((SAMPLE / "chat/chat_1.json").read_text("utf-8"))}
    example = TASK.from_row({**row, "emo": emo})
    assert example.answer is not None
    assert example.answer["holders"] is None
    assert example.notes[0].startswith("emo/emo_1.json: ")
    assert list(emotion_faults(emo))


def test_a_folder_without_dialogues_is_named(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="no folder with dialogues"):
            list(TASK.read(place))


def test_what_is_no_file_is_a_bad_row(tmp_path: Path) -> None:
    for kind in ("chat", "emo"):
        shutil.copytree(SAMPLE / kind, tmp_path / kind)
    (tmp_path / "chat/chat_8.json").mkdir()
    (tmp_path / "chat/chat_9.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "chat/chat_10.json").write_text('[{"Holder": "\\ud800", "sentence": ""}]', "utf-8")
    Path(os.fsdecode(bytes(tmp_path) + b"/chat/chat_\xff.json")).write_text("[]", "utf-8")
    (tmp_path / "chat/chat_11.json").write_bytes(b"[" + b" " * (LARGEST_LINE + 1) + b"]")
    (tmp_path / "emo/emo_2.json").unlink()
    (tmp_path / "emo/emo_2.json").mkdir()
    bad: list[BadRow] = []
    read = list(replace(TASK, bad=bad.append).read(tmp_path))
    assert [example.id for example in read] == ["1", "2"]
    assert read[1].notes == ("emo/emo_2.json: Is a directory",)
    reasons = {str(one.place): one.reason for one in bad}
    assert reasons["chat/chat_8.json"] == "Is a directory"
    assert "No such file" in reasons["chat/chat_9.json"]
    assert "escape stands alone" in reasons["chat/chat_10.json"]
    assert "larger than 16 MiB" in reasons["chat/chat_11.json"]
    assert len(reasons) == 5
    for one in bad:
        str(one).encode("utf-8")


def test_texts_are_cut_to_what_the_schema_allows() -> None:
    example = next(TASK.read(SAMPLE))
    question = next(q for q in TASK.taught(example) if q.inputs["step"] == "sextuple")
    long = json.dumps(dict.fromkeys(FIELDS, "长" * 500))
    decoded = TASK.decode(long, question, NONE)
    assert {field: len(decoded.answer[field]) for field in FIELDS} == {
        "target": 60, "aspect": 60, "opinion": 80, "sentiment": 0, "rationale": 120,
    }  # fmt: skip
    events = [{"event": f"事{i}", "emotions": []} for i in range(MOST_EVENTS + 3)]
    reply = json.dumps({"holders": [{"holder": "甲", "events": events}]})
    assert len(TASK.decode(reply, example, NONE).answer["holders"][0]["events"]) == MOST_EVENTS


def test_all_real_dialogues_are_read(shared: Path) -> None:
    folder = shared / "emocaustics"
    examples = list(TASK.read(folder))
    assert len(examples) == 700
    assert [int(example.id) for example in examples] == sorted(int(e.id) for e in examples)
    broken = [e.id for e in examples if e.answer and e.answer["holders"] is None]
    assert broken == ["117", "421", "451"]
    assert all(
        examples_note(e).startswith(f"emo/emo_{e.id}.json") for e in examples if e.id in broken
    )
    assert sum(len(example.turns) for example in examples) == 43676
    assert sum("sentiment" in note for example in examples for note in example.notes) > 50


def examples_note(example: Example) -> str:
    return example.notes[0]


@pytest.mark.parametrize("way", [{"way": "window"}, {"way": "retrieval"}])
def test_real_dialogues_come_through_without_a_lost_or_doubled_sentence(
    way: dict[str, Any], shared: Path
) -> None:
    task = configured(TASK, way)
    for example in list(task.read(shared / "emocaustics"))[::20]:
        taught = list(task.taught(example))
        for step in {"window": ("window", "sextuple"), "retrieval": ("sextuple",)}[way["way"]]:
            numbers = [t.number for q in taught if q.inputs["step"] == step for t in q.turns]
            assert numbers == list(range(1, len(example.turns) + 1))
