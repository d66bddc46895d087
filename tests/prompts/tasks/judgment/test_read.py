"""Reading cases: what is accepted, what a wrong line is told, and how tasks are found."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES, sentence

read = Reader(load_task("judgment")).read

PENALTY = sentence(imprisonment=12, fine=5000)
CASE: dict[str, Any] = {
    "id": 0,
    "fact": "甲、乙行窃。",
    "defendants": ["甲", "乙"],
    "outcomes": [
        {
            "name": "乙",
            "penalty": PENALTY,
            "charges": ["诈骗罪"],
            "articles": [266, " 266", "303-2"],
        },
        {"name": "甲", "penalty": PENALTY, "charges": ["盗窃罪"], "articles": ["264"]},
    ],
}


def test_a_line_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(f"// a remark\n{dump(CASE)}\n", "utf-8")
    (example,) = read(path)
    assert (example.id, example.text, example.names) == (0, "甲、乙行窃。", ("甲", "乙"))
    assert example.inputs == {"defendants": "甲、乙"}
    assert example.groups == {"defendants": "2"}
    assert example.answer == {  # in the order of the defendants, labels as text and once
        "judgments": [
            {"name": "甲", "charges": ["盗窃罪"], "articles": ["264"], "penalty": PENALTIES[11]},
            {
                "name": "乙",
                "charges": ["诈骗罪"],
                "articles": ["266", "303-2"],
                "penalty": PENALTIES[11],
            },
        ]
    }


def without(*way: str | int) -> Callable[[dict[str, Any]], None]:
    def change(row: Any) -> None:
        *steps, last = way
        for step in steps:
            row = row[step]
        del row[last]

    return change


def put(value: object, *way: str | int) -> Callable[[dict[str, Any]], None]:
    def change(row: Any) -> None:
        *steps, last = way
        for step in steps:
            row = row[step]
        row[last] = value

    return change


BOTH = "not in both 'defendants' and 'outcomes'"
ONCE = "'outcomes' needs each name once, found"
NAMES = "'defendants' must list the defendants' names, one or more, each once"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (without("id"), "'id' must be a whole number or a string"),
        (put("", "id"), "'id' is an empty text"),
        (put(" ", "id"), "'id' is an empty text"),
        (put(["甲", "\u200b"], "defendants"), NAMES),
        (put(["甲", "甲\ufeff"], "defendants"), NAMES),
        (put(" \n", "fact"), "'fact' must be a text that is not empty"),
        (without("defendants"), NAMES),
        (put(["甲", 2], "defendants"), NAMES),
        (put(["甲", "丙"], "defendants"), f'["丙","乙"]: {BOTH}'),
        (put(["甲", "乙 "], "defendants"), f'["乙","乙 "]: {BOTH}'),
        (without("outcomes", 0), f'["乙"]: {BOTH}'),
        (put(None, "outcomes"), "'outcomes' must be a list, found null"),
        (put([3], "outcomes"), "'outcomes' needs each name once, found 3"),
        (put({"name": "甲"}, "outcomes", 0), "defendant '甲': 'charges' is missing"),
        (put({"name": None}, "outcomes", 0), f'{ONCE} {{"name":null}}'),
        (put(7, "outcomes", 1, "name"), f'{ONCE} {{"name":7,"penalty":{{"surveillance":0,"d'),
        (without("outcomes", 0, "articles"), "defendant '乙': 'articles' is missing"),
        (without("outcomes", 1, "penalty", "detention"), "defendant '乙': 'detention' is missing"),
        *(
            (put(value, "outcomes", 0, *way), f"defendant '乙': {way[-1]!r} {complaint}")
            for way, value, complaint in (
                (("charges",), None, "must be a list, found null"),
                (("charges",), "诈骗罪", 'must be a list, found "诈骗罪"'),
                (("charges",), ["盗窃罪", " "], 'has " ", which is no label'),
                (("charges",), ["盗窃罪", "\u200b"], 'has "\u200b", which is no label'),
                (("charges",), [12], "has 12, which is no label"),
                (("articles",), [True], "has true, which is no label"),
                (("articles",), [264.0], "has 264.0, which is no label"),
                (("articles",), [""], 'has "", which is no label'),
                (("articles",), [-1], "has -1, which is no label"),
                (("articles",), [["264"]], 'has ["264"], which is no label'),
                (("penalty",), None, "must be an object, found null"),
                (("penalty", "death_penalty"), 0, "must be true or false, found 0"),
                (("penalty", "life_imprisonment"), "false", 'must be true or false, found "false"'),
            )
        ),
    ],
)
def test_a_wrong_line_is_told_what_is_wrong(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    wrong = copy.deepcopy(CASE)
    change(wrong)
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{dump(CASE)}\n\n{dump(wrong)}\n", "utf-8")
    examples = read(path)
    assert next(examples).id == 0
    with pytest.raises(UserError) as caught:
        next(examples)
    assert str(caught.value) == f"{path}:3: {complaint}"


TWICE = {
    "id": ('"id":0', '"id":0,"id":1'),
    "fact": ('"fact":', '"fact":"甲行窃。","fact":'),
    "charges": ('"charges":', '"charges":["盗窃罪"],"charges":'),
    "imprisonment": ('"imprisonment":', '"imprisonment":6,"imprisonment":'),
}


@pytest.mark.parametrize("key", TWICE)
def test_a_key_that_is_given_twice_makes_a_bad_row(tmp_path: Path, key: str) -> None:
    twice = dump(CASE).replace(*TWICE[key])
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{twice}\n{dump({**CASE, 'id': 2})}\n", "utf-8")
    with pytest.raises(UserError, match=f":1: not JSON: the key {key!r} is given twice$"):
        list(read(path))
    reader = Reader(load_task("judgment"), on_bad_row="skip")
    assert [example.id for example in reader.read(path)] == [2]
    path.write_text(f"[{twice}]", "utf-8")
    with pytest.raises(UserError, match=f"the key {key!r} is given twice$"):
        list(read(path))


@pytest.mark.parametrize("sign", ["\u200b", "\ufeff", "\u200e", "\u00ad"])
def test_invisible_characters_are_left_out_of_names_and_labels(tmp_path: Path, sign: str) -> None:
    [plain] = read(written(tmp_path, CASE))
    outcomes: list[dict[str, Any]] = CASE["outcomes"]
    marked = [
        {
            **outcome,
            "name": f"{sign}{outcome['name']}",
            "charges": [f"{charge}{sign}" for charge in outcome["charges"]],
            "articles": [f"{sign}{article}" for article in outcome["articles"]],
        }
        for outcome in outcomes
    ]
    case = {**CASE, "fact": CASE["fact"].replace("甲", f"甲{sign}") + sign, "outcomes": marked}
    [read_as] = read(written(tmp_path, {**case, "defendants": [f"甲{sign}", "乙"]}))
    assert read_as.answer == plain.answer
    assert read_as.names == plain.names
    assert read_as.inputs == plain.inputs
    assert read_as.text == plain.text + sign, "a name is found in the facts, which stay as they are"
    assert read_as.notes == (f"the name {f'甲{sign}'!r} has invisible characters, left out",)
    assert plain.notes == ()


def written(folder: Path, case: dict[str, Any]) -> Path:
    path = folder / "cases.jsonl"
    path.write_text(dump(case), "utf-8")
    return path


def test_a_row_of_another_format_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(dump([CASE, {"text": "甲盗窃。", "label": 1}]), "utf-8")
    with pytest.raises(UserError, match=r"row 2: 'id' must be a whole number or a string$"):
        list(read(path))
