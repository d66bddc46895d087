"""Submissions of dialogues: read as the organisers' scripts read them, and with their names.

The official figures come from `get_emo_score.py` and `get_quadruples_score.py` of
zRzRzRzRzRzRzR/EmoCaustics at commit 0f9ba5e of 12 April 2025. Where a copy is present,
`tests/eval/test_official.py` has the scripts give them again.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from panjue.eval.check import check
from panjue.eval.compare import compare_runs
from panjue.eval.metric_values import metric_values, submission_rows
from panjue.eval.score import score
from panjue.eval.shown import items_of
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.tasks.dialogue.dialogues import DIALOGUES
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE
from tests.eval.emocaustics import CASES, GOLD_EMO, TASK, Answer, own_scores

READER = Reader(TASK)


@pytest.fixture
def gold(tmp_path: Path) -> Path:
    return tmp_path / "gold"


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    return tmp_path / "answers"


@pytest.mark.parametrize("name", CASES)
def test_answers_count_as_in_the_scripts(name: str, gold: Path, answers: Path) -> None:
    """A case with `own` scores is one of the differences that the page of tasks tells."""
    case = CASES[name]
    answer = Answer()
    case.damage(answer)
    answer.write(gold, answers, "1")
    assert own_scores(gold, answers)["1"] == pytest.approx(case.own or case.official, abs=1e-4)
    found = list(check(READER, answers, gold))
    place = f"{answers}:chat/output_chat_1.json: id 1: "
    assert found == [place + fault for fault in case.faults]
    assert score(READER, gold, answers).faulty == bool(found)


def test_a_submission_has_the_names_and_numbers_that_the_scripts_read(
    gold: Path, answers: Path
) -> None:
    """Given so, gold has 100.0 and 1.0 in the scripts. The names and texts of 0.4 gave it 0.0."""
    Answer().write(gold, answers, "1")
    [example] = READER.read(gold)
    assert (example.answer or {})["holders"][0]["events"] == GOLD_EMO["1"]["events"]
    with DIALOGUES.writing(answers.with_name("written")) as write:
        write(TASK.gold(example))
    assert files_of(answers.with_name("written")) == files_of(answers)


def files_of(folder: Path) -> dict[str, Any]:
    """Return name -> content of the files in a folder of folders."""
    files = {}
    for path in folder.glob("*/*"):
        files[str(path.relative_to(folder))] = json.loads(path.read_text("utf-8"))
    return files


@pytest.mark.parametrize(
    ("source", "written"),
    [("2", 2), ("02", 2), (" 2", 2), ("２", 2), (2, 2), ("2,3", "2,3"), ("self", "self")],
)
def test_sources_are_numbers_where_they_can_be(source: int | str, written: int | str) -> None:
    answer = Answer()
    answer.gold_emo["2"]["events"][0]["emotions"][0]["source_id"] = source
    row = {"id": "1", "chat": answer.gold_chat, "emo": answer.gold_emo}
    gold = TASK.gold(TASK.data.read(row))
    [event] = gold["emo"]["2"]["events"]
    assert event["emotions"][0]["source_id"] == written
    for alike in {written, str(written)}:
        answer.event("2")["emotions"][0]["source_id"] = alike
        given = {"chat": answer.chat, "emo": answer.emo}
        assert metric_values(TASK, gold, given, "").tolist() == [1, 1, 1]


def test_answers_with_the_names_of_0_4_are_read(gold: Path, answers: Path) -> None:
    Answer().write(gold, answers, "1")
    old = answers.with_name("old")
    Answer().write(gold, old, "1")
    (old / "chat/output_chat_1.json").rename(old / "chat/chat_1.json")
    (old / "emo/output_emotions_1.json").rename(old / "emo/emo_1.json")
    assert own_scores(gold, old) == own_scores(gold, answers)
    changes = compare_runs(READER, gold, old, answers).differences.values()
    assert [change.mean for change in changes] == [0, 0]
    fault = "the organisers' scripts do not read {}; `panjue decode` gives other names"
    assert list(check(READER, old, gold)) == [
        f"{old}:chat/chat_1.json: id 1: {fault.format(name)}"
        for name in ("chat_1.json", "emo_1.json")
    ]


def test_the_emotions_of_a_baseline_may_have_another_name(gold: Path, answers: Path) -> None:
    """The scripts read `_events`, and no `_steps`; of two answers to a dialogue they score both."""
    Answer().write(gold, answers, "1")
    emo = answers / "emo"
    (emo / "output_emotions_1.json").rename(emo / "output_emotions_1_events.json")
    write_json(emo / "output_emotions_1_steps.json", [{"step": 1}])
    assert own_scores(gold, answers) == {"1": [1, 1]}
    assert list(check(READER, answers, gold)) == []
    write_json(emo / "output_emotions_1.json", {})
    names = "output_emotions_1.json and output_emotions_1_events.json"
    with pytest.raises(UserError, match=f"{names} answer the same dialogue; delete all but one"):
        submission_rows(TASK, answers)


@pytest.mark.parametrize(
    ("missing", "scores"),
    [("chat/output_chat_1.json", [1, 0]), ("emo/output_emotions_1.json", [0, 1])],
)
def test_one_of_the_two_files_may_be_missing(
    missing: str, scores: list[float], gold: Path, answers: Path
) -> None:
    """Who ran one of the baselines has no other; the scripts score each on its own."""
    Answer().write(gold, answers, "1")
    (answers / missing).unlink()
    assert own_scores(gold, answers) == {"1": scores}
    [fault] = check(READER, answers, gold)
    assert fault.endswith(f"id 1: {missing} is missing")


def test_check_says_what_a_dialogue_was_never_asked(gold: Path, answers: Path) -> None:
    Answer().write(gold, answers / "submission", "1")
    refusals = {"refusals": ["1/1: too long"]}
    digest = sha256(answers / "submission")
    write_json(answers / "decode.json", {"submission_sha256": digest, **refusals})
    for path in (answers, answers / "submission"):
        [fault] = check(READER, path, gold)
        assert "without a reply: 1, their answers are not the model's: id 1/1: too long" in fault


def test_gold_that_is_null_is_none(gold: Path, answers: Path) -> None:
    answer = Answer()
    for field in SEXTUPLE:
        answer.gold_chat[0][field.title()] = None
    answer.chat[0]["final_model_response"] = []
    answer.write(gold, answers, "1")
    assert own_scores(gold, answers) == {"1": [1, 1]}
    for field in SEXTUPLE:
        answer.gold_chat[1][field.title()] = None
    answer.write(gold, answers, "1")
    assert [example.answer for example in READER.read(gold)] == [None]


@pytest.mark.parametrize("value", [None, {"1": None}, {"1": {"events": None}}, [], "x"])
def test_gold_emotions_that_are_none_are_noted(value: object, gold: Path, answers: Path) -> None:
    answer = Answer()
    answer.gold_emo = value  # type: ignore[assignment]
    answer.write(gold, answers, "1")
    [example] = READER.read(gold)
    assert [note.partition(":")[0] for note in example.notes] == ["emo/emo_1.json"]
    assert score(READER, gold, answers).total.mean["sextuple"] == 1


VALUES: tuple[Any, ...] = (
    None,
    True,
    3,
    -1,
    0.5,
    "",
    "乙",
    "2",
    [],
    {},
    [None],
    [[]],
    {"events": None},
    [{"event": 1}],
)


def test_no_answer_is_too_odd_to_be_scored_checked_and_shown(
    request: pytest.FixtureRequest,
) -> None:
    for seed in range(20_000 if request.config.getoption("--torture") else 1000):
        draw = random.Random(seed)
        answer = Answer()
        parts = [answer.chat, answer.emo]
        for _ in range(draw.randint(1, 4)):
            spoil(draw.choice(parts), draw)
        example = TASK.data.read({"id": "1", "chat": answer.gold_chat, "emo": answer.gold_emo})
        row = {"id": "1", "chat": answer.chat, "emo": answer.emo}
        assert all("\n" not in fault for fault in TASK.data.check(example, row, None))
        for gold in (TASK.gold(example), TASK.as_gold(row)):
            assert all(0 <= value <= 1 for value in metric_values(TASK, gold, row, ""))
            for _, fields in items_of(TASK, gold, row):
                json.dumps([(field.gold, field.predicted) for field in fields])


def spoil(value: Any, draw: random.Random) -> None:
    """Replace, drop or add something in a JSON value, at any depth."""
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    if not keys:
        return
    key = draw.choice(keys)
    inner = value[key]
    if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
        spoil(inner, draw)
    elif draw.random() < 0.3:
        del value[key]
    else:
        value[key] = draw.choice(VALUES)
