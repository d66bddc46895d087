"""Cloze questions: files, the contest's form, replies that are nearly right."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.errors import UserError
from panjue.prompts.fit import fit
from panjue.prompts.labels import Labels
from panjue.prompts.task import Example, load_task
from panjue.prompts.tasks.cloze import contest_form

TASK = load_task("cloze")
EXAMPLE = Example("q", "born in [MASK].")
LABELS = Labels({"answers": {"france": 5, "japan": 3}})


def asked(**fields: Any) -> Example:
    return TASK.from_row({"qid": "q", "query": "born in [MASK].", **fields})


def test_a_question_by_hand() -> None:
    gold = ["Peru", "17 October 1785", "peru", "a", "b", "c", "d"]
    example = asked(answer=gold, domain="Facts", NeedReasoning=False)
    assert example.answer == {"answers": ["peru", "1785 october 17", "a", "b", "c"]}
    assert example.references == (tuple(gold),), "scores compare with all, as they are written"
    assert example.groups == {"domain": "Facts", "NeedReasoning": "False"}
    assert (asked().answer, asked().references, asked().groups) == (None, (), {})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"qid": 3}, "'qid' must be"),
    ({"query": "no mask"}, r"one \[MASK\]"),
    ({"query": "[MASK] [MASK]"}, r"one \[MASK\]"),
    ({"answer": "peru"}, "'answer' must"),
    ({"answer": []}, "'answer' must"),
    ({"answer": [" "]}, "'answer' must"),
]


@pytest.mark.parametrize(("fields", "complaint"), BAD)
def test_a_bad_question(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        asked(**fields)


def test_a_question_never_loses_its_mask() -> None:
    query = "it rains! " * 30 + "he is from [MASK]! " + "it rains! " * 30
    fitted = fit(asked(query=query), 60, lambda example: len(example.text))
    assert (fitted.fits, "[MASK]" in fitted.example.text) == (True, True)


@given(st.text())
def test_the_contest_form_stays_as_it_is(text: str) -> None:
    assert contest_form(contest_form(text)) == contest_form(text)


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("1785-10-17", "1785 october 17"),
        ("1785/03/07", "1785 march 7"),
        ("October 17th, 1785", "1785 october 17"),
        ("17 Oct. 1785", "1785 october 17"),
        ("1785 october 17", "1785 october 17"),
        ("1997 september 01", "1997 september 01"),
        ("1785-13-17", "1785-13-17"),
        ("10 17 1785", "10 17 1785"),
        ("Twelve", "12"),
        ("twenty-one", "21"),
        ("ninety", "90"),
        ("twenty-fold", "twenty-fold"),
        ("peru\ud800", "peru"),
        ("three gorges dam", "three gorges dam"),
        ("2 march regiment", "2 march regiment"),
        ("march 1 dec", "march 1 dec"),
        ("  New   York ", "new york"),
    ],
)
def test_the_contest_form_by_hand(written: str, form: str) -> None:
    assert contest_form(written) == form


FORM = "an answer brought to the contest's form"
TWICE = "an answer repeated or empty"
OTHER = "not the JSON that was asked for"


@pytest.mark.parametrize(
    ("reply", "answers", "repairs"),
    [
        ('{"answers":["peru","chile"]}', ["peru", "chile"], []),
        ('{"answers":["Peru","peru"]}', ["peru"], [FORM, TWICE]),
        ('{"answers":["a","b","c","d","e","f"]}', list("abcde"), [OTHER, "cut to 5 answers"]),
        ('{"answers":"peru"}', ["peru"], [OTHER]),
        ('{"answers":[1785]}', ["1785"], [OTHER]),
        ('["peru", "chile"]', ["peru", "chile"], [OTHER]),
        ('```json\n{"answers": ["peru", "chi', ["peru"], [OTHER]),
        ("<think>hm</think>1. peru\n2. chile\n", ["peru", "chile"], [OTHER]),
        ("1.peru\n2)chile\n3.5", ["peru", "chile", "3.5"], [OTHER]),
        ("- Peru\n\n- Chile", ["peru", "chile"], [OTHER, FORM, FORM]),
        ("peru", ["peru"], [OTHER]),
    ],
)
def test_replies_by_hand(reply: str, answers: list[str], repairs: list[str]) -> None:
    decoded = TASK.decode(reply, EXAMPLE, LABELS)
    assert (decoded.answer["answers"], list(decoded.repairs)) == (answers, repairs)
    assert decoded.readable


@pytest.mark.parametrize("reply", ["", "{}", '{"answers":[]}', '{"answers":[""]}', "\n\n"])
def test_what_says_nothing_is_answered_by_the_commonest(reply: str) -> None:
    decoded = TASK.decode(reply, EXAMPLE, LABELS)
    assert (decoded.answer["answers"], decoded.readable) == (["france", "japan"], False)


@pytest.mark.parametrize(
    ("ret", "complaint"),
    [
        (["peru"], None),
        ([], "0 answers"),
        (["a", "b", "c", "d", "e", "f"], "6 answers"),
        (["a", "a"], "twice"),
        ("a", "list of texts"),
        ([1], "list of texts"),
        ([""], "list of texts"),
    ],
)
def test_faults(ret: Any, complaint: str | None) -> None:
    found = list(TASK.faults(EXAMPLE, {"id": "q", "ret": ret}, None))
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def test_labels_are_the_training_answers_commonest_first(tmp_path: Path) -> None:
    examples = [asked(answer=["Peru"]), asked(answer=["chile", "peru"]), asked()]
    assert list(TASK.labels(examples).counts["answers"].items()) == [("peru", 2), ("chile", 1)]
