"""Reading cases: what is accepted, and what a wrong line is told."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from panjue.eval.shown import items_of
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.metric import charge_f1
from panjue.prompts.tasks.judgment.penalties import PENALTIES, sentence
from panjue.prompts.tasks.judgment.read import by_hand

TASK = load_task("judgment")
PENALTY = sentence(imprisonment=12, fine=5000)
FRAUD = {"charges": ["诈骗罪"], "articles": [266, " 266", "303-2"]}
THEFT = {"charges": ["盗窃罪"], "articles": ["264"]}
CASE: dict[str, Any] = {
    "id": 0,
    "fact": "甲、乙行窃。",
    "defendants": ["甲", "乙"],
    "outcomes": [
        {"name": "乙", "penalty": PENALTY, **FRAUD},
        {"name": "甲", "penalty": PENALTY, **THEFT},
    ],
}


def test_a_line_by_hand() -> None:
    example = TASK.data.read(CASE)
    assert (example.id, example.text, example.names) == (0, "甲、乙行窃。", ("甲", "乙"))
    assert example.inputs == {"defendants": "甲、乙"}
    assert example.groups == {"defendants": "2"}
    assert example.notes == ()
    fraud = {"charges": ["诈骗罪"], "articles": ["266", "303-2"]}
    assert example.answer == {  # in the order of the defendants, labels as text and once
        "judgments": [
            {"name": "甲", **THEFT, "penalty": PENALTIES[11]},
            {"name": "乙", **fraud, "penalty": PENALTIES[11]},
        ]
    }
    assert TASK.data.read({**CASE, "outcomes": None}).answer is None
    assert TASK.data.read({**CASE, "outcomes": []}).answer is None


@pytest.mark.parametrize("flags", [(0, 0), (1, 0), (0, 1), (0.0, 1.0)])
def test_flags_may_be_numbers(flags: tuple[float, float]) -> None:
    """As in drdz/baseline (CAIL2024, c4790bf of 2025-07-08), which asks whether they are true."""
    death, life = flags
    penalty = {**PENALTY, "death_penalty": death, "life_imprisonment": life}
    outcomes = [{"name": "甲", "penalty": penalty, **THEFT}]
    example = TASK.data.read({**CASE, "defendants": ["甲"], "outcomes": outcomes})
    assert example.answer is not None
    expected = PENALTIES[0 if death else 1 if life else 11]
    assert example.answer["judgments"][0]["penalty"] == expected


def test_the_defendants_may_be_those_of_the_outcomes() -> None:
    """As in drdz/baseline (CAIL2024, c4790bf of 2025-07-08), which never reads `defendants`."""
    without = {key: value for key, value in CASE.items() if key != "defendants"}
    assert TASK.data.read(without).names == ("乙", "甲")
    with pytest.raises(UserError, match=NAMES):
        TASK.data.read({**without, "outcomes": None})
    with pytest.raises(UserError, match=NAMES):
        TASK.data.read({**without, "outcomes": []})


def test_five_defendants_and_more_are_one_group() -> None:
    assert by_hand("事实", list("甲乙丙丁")).groups == {"defendants": "4"}
    assert by_hand("事实", list("甲乙丙丁戊")).groups == {"defendants": "5+"}


FIRST = "defendant '乙':"
BOTH = "not in both 'defendants' and 'outcomes'"
NAMED = "'outcomes' needs the 'name' of each, found"
NAMES = "'defendants' must list the defendants' names, one or more"


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("id", ..., "'id' must be a whole number or a string"),
        ("id", " ", "'id' is an empty text"),
        ("fact", " \n", "'fact' must be a text that is not empty"),
        ("fact", " \u200b", "'fact' must be a text that is not empty"),
        ("defendants", [], NAMES),
        ("defendants", ["甲", "\u200b"], NAMES),
        ("defendants", ["甲", "乙", "甲\ufeff"], f'["甲"]: {BOTH}'),
        ("defendants", ["甲", 2], NAMES),
        ("defendants", ["甲", "丙"], f'["丙","乙"]: {BOTH}'),
        ("defendants", ["甲", "乙 "], f'["乙","乙 "]: {BOTH}'),
        ("outcomes", "", "'outcomes' must be a list, found \"\""),
        ("outcomes", [3], f"{NAMED} 3"),
        ("outcomes 0", ..., f'["乙"]: {BOTH}'),
        ("outcomes 0", {"name": None}, f'{NAMED} {{"name":null}}'),
        ("outcomes 1 name", 7, f'{NAMED} {{"name":7,"penalty":{{"surveillance":0,"d'),
        ("outcomes 1 name", "乙", f'["乙","甲"]: {BOTH}'),
        ("outcomes 0 charges", ..., f"{FIRST} 'charges' is missing"),
        ("outcomes 0 charges", "诈骗罪", f"{FIRST} 'charges' must be a list, found \"诈骗罪\""),
        ("outcomes 0 charges", ["\u200b"], f"{FIRST} 'charges' has \"\u200b\", which is no label"),
        ("outcomes 0 charges", [12], f"{FIRST} 'charges' has 12, which is no label"),
        ("outcomes 0 articles", [True], f"{FIRST} 'articles' has true, which is no label"),
        ("outcomes 0 articles", [264.0], f"{FIRST} 'articles' has 264.0, which is no label"),
        ("outcomes 0 articles", [0], f"{FIRST} 'articles' has 0, which is no label"),
        ("outcomes 0 articles", [["1"]], f"{FIRST} 'articles' has [\"1\"], which is no label"),
        ("outcomes 0 penalty", None, f"{FIRST} 'penalty' must be an object, found null"),
        ("outcomes 0 penalty detention", ..., f"{FIRST} 'detention' is missing"),
        (
            "outcomes 0 penalty death_penalty",
            2,
            f"{FIRST} 'death_penalty' must be true or false, found 2",
        ),
    ],
)
def test_a_wrong_line_is_told_what_is_wrong(
    tmp_path: Path, place: str, value: object, complaint: str
) -> None:
    wrong = copy.deepcopy(CASE)
    inner: Any = wrong
    *outer, last = [int(step) if step.isdigit() else step for step in place.split()]
    for step in outer:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{dump(CASE)}\n\n{dump(wrong)}\n", "utf-8")
    examples = Reader(TASK).read(path)
    assert next(examples).id == 0
    with pytest.raises(UserError) as caught:
        next(examples)
    said, *columns = re.split("; (?:the row|an object in 'outcomes') has ", str(caught.value))
    assert said == f"{path}:3: {complaint}"
    assert bool(columns) == (value is ... and place in {"id", "outcomes 0 charges"})


@pytest.mark.parametrize("key", ["id", "charges", "imprisonment"])
def test_a_key_that_is_given_twice_makes_a_bad_row(tmp_path: Path, key: str) -> None:
    twice = dump(CASE).replace(f'"{key}":', f'"{key}":1,"{key}":')
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{twice}\n{dump({**CASE, 'id': 2})}\n", "utf-8")
    with pytest.raises(UserError, match=f":1: not JSON: the key {key!r} is given twice$"):
        list(Reader(TASK).read(path))
    assert [example.id for example in Reader(TASK, on_bad_row="skip").read(path)] == [2]
    path.write_text(f"[{twice}]", "utf-8")
    with pytest.raises(UserError, match=f"the key {key!r} is given twice$"):
        list(Reader(TASK).read(path))


@pytest.mark.parametrize("sign", ["\u200b", "\ufeff", "\u200e", "\u00ad"])
def test_invisible_characters_are_left_out_but_for_the_submission(sign: str) -> None:
    marked = copy.deepcopy(CASE)
    marked["fact"] = f"甲{sign}、{sign}乙行窃。"
    marked["defendants"] = [f"甲{sign}", "乙"]
    theft = {"charges": [f"盗窃罪{sign}"], "articles": [f"{sign}264"]}
    marked["outcomes"][1] |= {"name": f"{sign}甲", **theft}
    plain = TASK.data.read(CASE)
    example = TASK.data.read(marked)
    assert example.answer == plain.answer
    assert example.names == plain.names
    assert example.inputs == plain.inputs
    assert example.text == plain.text, "so the names are found in it"
    assert example.notes == (f"the name {f'甲{sign}'!r} has invisible characters, left out",)
    row = TASK.gold(example)
    assert [judgment["name"] for judgment in row["judgments"]] == marked["defendants"]
    assert list(TASK.data.check(example, row, None)) == []
    assert [name for name, _ in items_of(TASK, row, row)] == ["甲", "乙"]
    of_plain = TASK.gold(plain)
    assert charge_f1(row, of_plain) == charge_f1(of_plain, row) == 1


def test_a_row_of_another_format_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(dump([CASE, {"text": "甲盗窃。", "label": 1}]), "utf-8")
    with pytest.raises(
        UserError, match=r"row 2: 'id' must be a whole number or a string; .* text, label; "
    ):
        list(Reader(TASK).read(path))
