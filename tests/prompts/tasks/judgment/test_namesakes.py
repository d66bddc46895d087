"""Two defendants of one name are told apart by their place: read, asked, decoded, scored, checked.

So does the contest, whose code goes by position alone.
"""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from panjue.eval.metric_values import metric_values
from panjue.eval.shown import items_of
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES, sentence
from panjue.prompts.tasks.judgment.repair import decode
from panjue.prompts.tasks.judgment.task import check, schema, target
from tests.prompts.tasks.judgment.test_repair import WRAPPINGS, answered
from tests.prompts.tasks.judgment.test_schema import matches

TASK = load_task("judgment")
THEFT = {"charges": ["盗窃罪"], "articles": ["264"]}
FRAUD = {"charges": ["诈骗罪"], "articles": ["266"]}
ROBBERY = {"charges": ["抢劫罪"], "articles": ["263"]}
TWELVE = {"name": "张某", **THEFT, "penalty": sentence(imprisonment=12)}
SIX = {"name": "张某", **FRAUD, "penalty": sentence(imprisonment=6)}
SIXTY = {"name": "李某", **ROBBERY, "penalty": sentence(imprisonment=60)}
CASE: dict[str, Any] = {
    "id": 0,
    "fact": "张某与另一张某、李某作案。",
    "defendants": ["张某", "李某", "张某"],
    "outcomes": [TWELVE, SIX, SIXTY],
}
NAMES = st.lists(st.sampled_from(["张某", "李某", "e\u0301", "\u00e9"]), min_size=2, max_size=5)
"""Names that are often equal, the last two after their normalization (NFC)."""


def told(*judgments: dict[str, Any]) -> dict[str, Any]:
    return {"id": 0, "judgments": list(judgments)}


def test_outcomes_of_one_name_are_those_of_the_defendants_in_order() -> None:
    example = TASK.data.read(CASE)
    assert example.names == ("张某", "李某", "张某")
    assert example.answer is not None
    assert [one["charges"] for one in example.answer["judgments"]] == [
        THEFT["charges"],
        ROBBERY["charges"],
        FRAUD["charges"],
    ]
    assert example.notes == ("2 defendants are called '张某': told apart by their place alone",)
    assert TASK.data.read({**CASE, "outcomes": None}).names == example.names


@pytest.mark.parametrize("defendants", [["张某", "李某"], ["张某", "张某", "张某", "李某"]])
def test_each_defendant_needs_an_outcome(defendants: list[str]) -> None:
    with pytest.raises(UserError, match="\"张某\"]: not in both 'defendants' and 'outcomes'"):
        TASK.data.read({**CASE, "defendants": defendants})


def test_names_that_are_equal_when_normalized() -> None:
    pair = [{**TWELVE, "name": "e\u0301"}, {**SIX, "name": "\u00e9"}]
    case = {**CASE, "defendants": ["\u00e9", "e\u0301"], "outcomes": pair}
    example = TASK.data.read(case)
    assert example.answer is not None
    assert [one["charges"] for one in example.answer["judgments"]] == [["盗窃罪"], ["诈骗罪"]]
    row = TASK.gold(example)
    assert [one["name"] for one in row["judgments"]] == ["\u00e9", "e\u0301"]
    assert metric_values(TASK, row, row, "")[-1] == 1


@pytest.mark.parametrize(
    ("judgments", "final"),
    [
        (((THEFT, 11), (FRAUD, 13)), 1),
        (((FRAUD, 13), (THEFT, 11)), 1 / 3),
        (((THEFT, 11), (THEFT, 11)), 2 / 3),
    ],
)
def test_the_score_is_that_of_the_contest(judgments: Any, final: float) -> None:
    """The numbers are those of drdz/baseline (CAIL2024, c4790bf of 2025-07-08): its one-hot
    vectors and case-level metrics, of judgments in the order of the outcomes."""
    gold = TASK.gold(TASK.data.read({**CASE, "defendants": ["张某", "张某", "李某"]}))
    rows = [{"name": "张某", **fields, "penalty": penalty} for fields, penalty in judgments]
    row = told(*rows, {"name": "李某", **ROBBERY, "penalty": 8})
    assert metric_values(TASK, gold, row, "")[-1] == pytest.approx(final)
    is_right = [all(field.correct for field in item) for _, item in items_of(TASK, gold, row)]
    assert sum(is_right) / 3 == pytest.approx(final), "and a report shows the same"


FAULTS = [
    (["张某", "李某", "张某"], []),
    (["张某", "张某", "李某"], ["the defendants are not in the order of the case"]),
    (["张某", "李某"], ["defendant '张某' is answered 1 times, not 2"]),
    (["李某"], ["defendant '张某' is not answered"]),
    (["张某", "李某", "张某", "张某"], ["defendant '张某' is answered 3 times, not 2"]),
    (["张某", "李某", "张某", "李某"], ["defendant '李某' is answered 2 times"]),
]


@pytest.mark.parametrize(("names", "faults"), FAULTS)
def test_faults(names: list[str], faults: list[str]) -> None:
    row = told(*({"name": name, **THEFT, "penalty": 11} for name in names))
    assert list(check(TASK.data.read(CASE), row, None)) == faults


@settings(max_examples=40)
@given(case=answered(NAMES))
def test_the_schema_takes_the_gold_reply(labels: Labels, case: Example) -> None:
    rules = schema(case, labels)
    assert Draft202012Validator(rules).is_valid(json.loads(target(case)))
    assert matches(rules, target(case))


@pytest.mark.parametrize("wrapping", ["{}", *WRAPPINGS.values()])
@settings(max_examples=40)
@given(case=answered(NAMES))
def test_nothing_is_lost_or_mixed_up(labels: Labels, wrapping: str, case: Example) -> None:
    reply = wrapping.format(target(case))
    decoded = decode(reply, case, labels)
    assert decoded.answer == case.answer
    cut = decode(reply.removesuffix("]}"), case, labels)
    assert cut.answer == case.answer


@settings(max_examples=100)
@given(case=answered(NAMES), data=st.data())
def test_a_cut_reply_gives_nobody_the_answer_of_another(
    labels: Labels, case: Example, data: st.DataObject
) -> None:
    whole = target(case)
    decoded = decode(whole[: data.draw(st.integers(0, len(whole)))], case, labels)
    assert case.answer is not None
    pairs = zip(decoded.answer["judgments"], case.answer["judgments"], strict=True)
    for number, (found, right) in enumerate(pairs):
        if not decoded.is_fallback(number, "penalty"):
            assert found["penalty"] == right["penalty"]
        if not decoded.is_fallback(number, "charges"):
            assert {*found["charges"]} <= {*right["charges"]}


def test_one_answer_for_two_of_a_name_is_nobodys(labels: Labels) -> None:
    example = Example(1, "事", names=("张某", "李某", "张某"))
    own = {"charges": ["诈骗罪"], "articles": ["266"], "penalty": PENALTIES[5]}
    rows = [{"name": "张某", **own}, {"name": "李某", **own}]
    decoded = decode(dump({"judgments": rows}), example, labels)
    guessed = [decoded.is_fallback(number, "penalty") for number in range(3)]
    assert guessed == [True, False, True]
    assert "张某: 2 of this name cannot be told apart, dropped" in decoded.repairs
    # A bare list, as models without a grammar write it, has an order too.
    rows.append({"name": unicodedata.normalize("NFKC", "张某"), **own})
    bare = decode(dump(rows), example, labels)
    assert not any(bare.is_fallback(number, "penalty") for number in range(3))
