"""Cloze questions: files, the contest's form, replies that are nearly right."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.check import check
from panjue.eval.score import ScoreResult, score
from panjue.eval.show_scores import remarks
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
        ({"qid": " "}, "'qid' must be a text that is not empty, or a whole number"),
        ({"qid": True}, "'qid' must be a text"),
        ({"qid": 1.5}, "'qid' must be a text"),
        ({"query": " "}, "'query' must be a text"),
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
        ("Twelve", "twelve"),
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
        f1(gold, {"ret": "peru"})


@pytest.mark.parametrize(
    ("answers", "ret"),
    [
        (["one"], ["1", "one"]),
        (["twenty-one", "peru", "one"], ["21", "peru", "1", "twenty-one", "one"]),
        (["1", "one"], ["1", "one"]),
        (["one", "a", "b", "c", "d"], ["1", "a", "b", "c", "d"]),
        (["twenty-fold", "three gorges dam"], ["twenty-fold", "three gorges dam"]),
    ],
)
def test_a_number_is_handed_in_as_digits_and_as_words(answers: list[str], ret: list[str]) -> None:
    assert TASK.data.write(EXAMPLE, {"answers": answers}) == {"id": "q", "ret": ret}


def test_no_real_gold_answer_is_lost(real_data: Path) -> None:
    for name in ("train", "dev"):
        for example in Reader(TASK).read(real_data / f"kct/{name}.jsonl"):
            for reference in example.references[0]:
                row = TASK.data.write(example, {"answers": [contest_form(reference)]})
                assert f1({"references": ((reference,),)}, row) == 1, reference


GOLD = [
    {"qid": "0001", "query": "a [MASK].", "answer": ["peru"]},
    {"qid": "0002", "query": "b [MASK].", "answer": ["cuba", "the sea"]},
]
NUMBERED = [
    {"qid": 1, "query": "no mask.", "answer": ["peru"]},
    {"qid": 2, "query": "[MASK] [MASK].", "answer": ["cuba"]},
]
PERU = '"[""peru""]"'
CUBA = '"[""x"",""cuba""]"'
SEVENTH = '"[""a"",""b"",""c"",""d"",""e"",""f"",""peru""]"'
PLAIN = f"id,ret\n0001,{PERU}\n0002,{CUBA}\n"


def kct(folder: Path, gold: list[dict[str, Any]], table: str) -> ScoreResult:
    (folder / "gold.jsonl").write_text("\n".join(map(dump, gold)), "utf-8")
    (folder / "submission.csv").write_text(table, "utf-8", newline="")
    return score(Reader(TASK), folder / "gold.jsonl", folder)


@pytest.mark.parametrize(
    ("gold", "table", "f1_of_contest"),
    [
        (GOLD, PLAIN, 1),
        (GOLD, f"\ufeff{PLAIN}", 1),
        (GOLD, PLAIN.replace("000", ""), 1),
        (GOLD, PLAIN.replace("\n", "\n\n").replace("\n", "\r\n"), 1),
        (GOLD, f"ret,id\n{PERU},1.0\n{CUBA}, 0002\n", 1),
        (GOLD, f"id,why,ret\n2,-,{CUBA}\n1,-,{PERU}\n", 1),
        (GOLD, f"id,ret\n1,{SEVENTH}\n2,{CUBA}\n", 1),
        (GOLD, f'id,ret\n1,"[""""]"\n2,{CUBA}\n', 0.5),
        (NUMBERED, PLAIN, 1),
        (NUMBERED, PLAIN.replace("000", ""), 1),
    ],
)
def test_tables_that_the_contest_reads(
    tmp_path: Path, gold: list[dict[str, Any]], table: str, f1_of_contest: float
) -> None:
    """The scores are those of "Official evaluation script for KCT version 1.0", as kept in
    zetian1025/BDCI509_Reproduction (f8a8a17 of 2021-09-30), run with pandas 3.1.1."""
    scores = kct(tmp_path, gold, table)
    assert (scores.total.mean["f1"], scores.void) == (f1_of_contest, "")
    found = list(check(Reader(TASK), tmp_path, tmp_path / "gold.jsonl"))
    more = [":2: id 1: 'ret' has 7 answers: 1 to 5 are asked for, though all count"]
    blank = [":2: id 1: 'ret' must be a list of texts"]
    told = more if SEVENTH in table else blank if '""""' in table else []
    expected = [f"{tmp_path / 'submission.csv'}{fault}" for fault in told]
    if table.startswith("id,why"):  # the contest does not mind the order
        expected = [f"{tmp_path / 'submission.csv'}:3: id 1 is out of order"]
    assert found == expected


@pytest.mark.parametrize(
    ("table", "void"),
    [
        (f"id,ret\n0001,{PERU}\n", "1 missing"),
        (f"{PLAIN}3,{CUBA}\n", "1 of no case"),
        (f"{PLAIN}2,{CUBA}\n", "1 for the second time"),
        (f"id,ret\n1,{PERU}\n1,{PERU}\n", "1 missing, 1 for the second time"),
        (f"id,ret\n1,[]\n2,{CUBA}\n", "1 without an answer"),
    ],
)
def test_tables_that_the_contest_gives_no_score(tmp_path: Path, table: str, void: str) -> None:
    """The script of KCT 1.0 (f8a8a17, see above) prints `2;2;None`, and stops at an empty list."""
    scores = kct(tmp_path, GOLD, table)
    assert scores.void == void
    [line] = [one.english for one in remarks(scores) if "contest" in one.english]
    assert line == f"the contest gives no score to such a file; rows: {void}"
    assert scores.to_json()["void"] == void


@pytest.mark.parametrize(
    ("table", "place"),
    [
        (PLAIN.replace("id,ret", "qid,ret"), ":1: the header has no id and ret but 'qid,ret'"),
        (PLAIN.replace("id,ret", "id, ret"), ":1: the header has no id and ret but 'id, ret'"),
        (f"id,ret\n1,\n2,{CUBA}\n", ":2: nothing in column 'ret'"),
        (f"id,ret,why\n1,{PERU},\n2,{CUBA},-\n", ":2: nothing in column 'why'"),
        (f"id,ret\n1,{PERU}\n2\n", ":3: 1 columns instead of 2"),
        (f"id,ret\n1,{PERU}\n2,cuba\n", ":3: 'ret' is not JSON such as [\"…\"]: 'cuba'"),
    ],
)
def test_tables_that_nobody_can_score(tmp_path: Path, table: str, place: str) -> None:
    """The script of KCT 1.0 (f8a8a17, see above) prints `2;2;None` or stops."""
    with pytest.raises(UserError) as caught:
        kct(tmp_path, GOLD, table)
    told = f"submission.csv{place}; the contest gives no score to such a file"
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize("sign", ["\u200b", "\ufeff", "\u00ad"])
def test_invisible_characters_are_left_out_of_what_is_asked_and_learned(sign: str) -> None:
    row = {"qid": "q", "query": f"born{sign} in [MASK].", "answer": [f"pe{sign}ru"]}
    example = TASK.data.read(row)
    assert (example.text, example.answer) == ("born in [MASK].", {"answers": ["peru"]})
    assert example.references == ((f"pe{sign}ru",),), "the contest's script keeps them"
    decoded = TASK.ask.decode(dump({"answers": [f"pe{sign}ru"]}), EXAMPLE, COUNTED)
    assert decoded.answer == {"answers": ["peru"]}


def test_a_query_with_no_or_two_masks_is_noted() -> None:
    none, two = [TASK.data.read(row) for row in NUMBERED]
    assert (none.id, none.names, two.names) == (1, (), ("[MASK]",))
    assert none.notes == ("the query has 0 [MASK] instead of one",)
    assert two.notes == ("the query has 2 [MASK] instead of one",)
    assert TASK.data.read(GOLD[0]).notes == ()


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
