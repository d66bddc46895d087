"""Cloze questions: files, the contest's form, replies that are nearly right."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.score import score
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.shorten import shorten
from panjue.prompts.task import load_task
from panjue.prompts.tasks.cloze.task import contest_form, f1
from panjue.serve.decoding import ranked

TASK = load_task("cloze")
EXAMPLE = Example("q", "born in [MASK].")
COUNTED = Labels({"answers": {"france": 5, "japan": 3, "italy": 2, "spain": 2, "peru": 1}})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"qid": " "}, "'qid' must be a text that is not empty"),
        ({"qid": 1}, "'qid' must be a text"),
        ({"query": "[MASK] in [MASK]."}, r"'query' must be a text with one \[MASK\]"),
        ({"answer": []}, "'answer' must list one text or more"),
    ],
)
def test_a_bad_row(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        TASK.data.read({"qid": "q", "query": "born in [MASK].", **fields})


def test_a_question_never_loses_its_mask() -> None:
    query = "it rains! " * 30 + "he is from [MASK]! " + "it rains! " * 30
    example = TASK.data.read({"qid": "q", "query": query, "answer": None})
    assert (example.answer, example.references) == (None, ())
    shortened = shorten(example, 60, lambda example: len(example.text))
    assert (shortened.fits, "[MASK]" in shortened.example.text) == (True, True)


@given(st.text())
def test_the_contest_form_stays_as_it_is(text: str) -> None:
    assert contest_form(contest_form(text)) == contest_form(text)


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("1785-12-17", "1785 december 17"),
        ("1785/01/07", "1785 january 7"),
        ("October 17th, 1785", "1785 october 17"),
        ("17 Oct. 1785", "1785 october 17"),
        ("1997 september 01", "1997 september 01"),
        ("1785-13-17", "1785-13-17"),
        ("10 17 1785", "10 17 1785"),
        ("17 oc 1785", "17 oc 1785"),
        ("Twelve", "12"),
        ("twenty-one", "21"),
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


FORM = "an answer converted to the contest's format"
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
        (dump({"answers": ["a" * 100]}), ["a" * 100], []),
        (dump({"answers": ["a" * 101]}), ["a" * 100], [OTHER, FORM]),
        ('```json\n{"answers": ["peru", "chi', ["peru"], [OTHER]),
    ],
)
def test_replies_by_hand(reply: str, answers: list[str], repairs: list[str]) -> None:
    decoded = TASK.ask.decode(reply, EXAMPLE, COUNTED)
    assert (decoded.answer["answers"], list(decoded.repairs)) == (answers, repairs)
    assert decoded.readable


@pytest.mark.parametrize(
    ("ret", "complaint"),
    [
        (["peru"], None),
        (["a", "b", "c", "d", "e"], None),
        ([], "list of texts"),
        (["a", "b", "c", "d", "e", "f"], "6 answers"),
        (["a", "a"], "twice"),
        ([1], "list of texts"),
    ],
)
def test_faults(ret: Any, complaint: str | None) -> None:
    found = list(TASK.data.check(EXAMPLE, {"id": "q", "ret": ret}, None))
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def test_without_an_answer_the_score_is_0() -> None:
    gold = {"references": (("peru",),)}
    assert f1(gold, {"ret": []}) == f1(gold, None) == 0
    with pytest.raises(TypeError):
        f1(gold, {"ret": ["a", "b", "c", "d", "e", "peru"]})


@given(st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True)))
def test_a_ranked_list_is_full_and_names_nobody_twice(lists: list[list[str]]) -> None:
    replies = [dump({"answers": answers}) for answers in lists]
    found = ranked(TASK, EXAMPLE, replies, COUNTED)["answers"]
    assert len(found) == len(set(found)) == 5
    if len(lists) == 1:
        assert found[: len(lists[0])] == lists[0], "one reply keeps its order"


def test_groups_and_the_fallback(tmp_path: Path) -> None:
    rows = [
        {"qid": "1", "query": "[MASK]", "answer": ["peru"], "domain": "Facts"},
        {"qid": "2", "query": "a [MASK]", "answer": ["cuba"], "NeedReasoning": True},
    ]
    gold = tmp_path / "gold.jsonl"
    gold.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    COUNTED.save(tmp_path)
    (tmp_path / "submission.csv").write_text('id,ret\n1,"[""chile""]"\n2,"[""cuba""]"\n', "utf-8")
    found = score(Reader(TASK), gold, tmp_path).to_json()
    assert (found["f1"], found["baselines"]) == (0.5, {"commonest answers": {"f1": 0.5}})
    assert found["groups"]["domain"]["Facts"]["f1"] == 0
    assert found["groups"]["NeedReasoning"]["True"]["f1"] == 1
