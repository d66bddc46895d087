"""Classes of a closed list: FairLex's files in their published field names, and odd replies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.classes import macro_f1

SEVERITY, ECTHR, SCOTUS, FSCS = (load_task(n) for n in ("severity", "ecthr", "scotus", "fscs"))

LABELS = Labels({"label": {"一年以下": 3, "没有刑期": 1}})


def test_severity() -> None:
    row = {"id": 7, "fact": "某案", "label": 5, "gender": "female", "region": None, "year": 2018}
    example = SEVERITY.data.read(row)
    assert (example.text, example.answer) == ("某案", {"label": "十年以上"})
    assert example.groups == {"gender": "female"}, "what nobody knows is no group"
    assert SEVERITY.gold(example) == {"id": 7, "label": 5}
    assert "判断被告人的刑期" in SEVERITY.ask.prompt(example)[0]["content"]
    about = SEVERITY.data.read({**row, "defendant": "李某A"})
    assert "判断被告人李某A的刑期" in SEVERITY.ask.prompt(about)[0]["content"]
    assert about.names == ("李某A",), "the sentences that introduce them stay"


def test_ecthr() -> None:
    row = {
        "id": 1, "text": "…", "labels": [9, 1], "defendant_state": 0, "applicant_gender": 0,
        "applicant_age": 3,
    }  # fmt: skip
    example = ECTHR.data.read(row)
    assert example.answer == {"labels": ["Article 3", "Article P1-1"]}
    assert example.groups == {"defendant_state": "C.E. European", "applicant_age": ">65"}
    assert ECTHR.data.read({**row, "labels": []}).answer == {"labels": []}
    assert ECTHR.gold(example) == {"id": 1, "labels": [1, 9]}


def test_scotus_and_fscs_take_numbers_or_names() -> None:
    row: dict[str, Any] = {"id": "x", "text": "…", "label": "Economic Activity"}
    row["attributes"] = {"decision_direction": 1, "respondent_type": "person"}
    assert SCOTUS.data.read(row).answer == {"label": "Economic Activity"}
    assert SCOTUS.gold(SCOTUS.data.read(row)) == {"id": "x", "label": "Economic Activity"}
    with pytest.raises(UserError, match="one of the names of classes"):
        SCOTUS.data.read({**row, "label": 10})
    assert SCOTUS.data.read(row).groups == {
        "decision_direction": "liberal", "respondent_type": "person",
    }  # fmt: skip
    row = {"id": 1, "text": "…", "label": 1, "decision_language": 2, "court_region": 0}
    assert FSCS.data.read(row).groups == {"decision_language": "it"}
    assert FSCS.data.read({**row, "label": "approval"}) == FSCS.data.read(row)
    assert FSCS.data.read({**row, "legal_area": -1}) == FSCS.data.read(row), "a missing ClassLabel"
    with pytest.raises(UserError, match="'legal_area' must be a name or a number from 0 to 5"):
        FSCS.data.read({**row, "legal_area": 6})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"id": None}, "'id' must be"),
    ({"id": ""}, "'id' is an empty text"),
    ({"fact": ""}, "'fact' must be"),
    ({"label": 6}, "'label' must be one of the numbers from 0 to 5"),
    ({"label": "1"}, "'label' must be one of the numbers"),
    ({"label": True}, "'label' must be one of the numbers"),
]


@pytest.mark.parametrize(("fields", "complaint"), BAD)
def test_a_bad_line(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        SEVERITY.data.read({"id": 1, "fact": "某案", "label": 1, **fields})
    with pytest.raises(UserError, match="a list of numbers from 0 to 9"):
        ECTHR.data.read({"id": 1, "text": "…", "labels": [10]})


def test_the_line_number_is_the_id_of_a_row_that_has_none(tmp_path: Path) -> None:
    """FairLex's files have no ids."""
    rows = [{"text": "…", "label": 1}, {"id": "x", "text": "…"}, {"id": "", "text": "…"}]
    path = tmp_path / "cases.jsonl"
    path.write_text("// a remark\n" + "\n".join(map(dump, rows)), "utf-8")
    reader = Reader(FSCS, on_bad_row="skip")
    assert [example.id for example in reader.read(path)] == [2, "x"]
    assert list(reader.skipped.rows.values()) == ["'id' is an empty text"]


def test_invisible_characters_make_no_other_person_and_no_other_group() -> None:
    row = {"id": 7, "fact": "李\u200b某A行窃。", "label": 5, "region": "北京", "defendant": "李某A"}
    marked = {**row, "region": "北京\ufeff", "defendant": "李\u200b某A"}
    example = SEVERITY.data.read(marked)
    assert (example.names, example.groups) == (("李某A",), {"region": "北京"})
    assert example.text == "李某A行窃。"


@pytest.mark.parametrize(
    ("reply", "label", "repairs", "readable"),
    [
        ('{"label":"十年以上"}', "十年以上", 0, True),
        ('```json\n{"label": "十年以上"}\n```', "十年以上", 1, True),
        ('{"label":"十年以上', "一年以下", 1, False),
        ("十年以上", "一年以下", 1, False),
        ('{"label":"三年以上五年以下有期徒刑"}', "三年以上五年以下", 1, True),
        ("", "一年以下", 1, False),
        ('{"label":["十年以上"]}', "十年以上", 1, True),
    ],
)
def test_replies_by_hand(reply: str, label: str, repairs: int, readable: bool) -> None:
    decoded = SEVERITY.ask.decode(reply, Example(1, ""), LABELS)
    assert (decoded.answer, len(decoded.repairs), decoded.readable) == (
        {"label": label}, repairs, readable,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "labels", "repairs"),
    [
        ('{"labels":["Article 3","Article 5"]}', ["Article 3", "Article 5"], 0),
        ('{"labels":["Article 5","Article 3"]}', ["Article 3", "Article 5"], 1),
        ('{"labels":[]}', [], 0),
        ('So: {"labels": []}', [], 1),
        ('{"labels":["Article 13","Article 18"]}', ["Article 2"], 1),  # the fallback
        ('<think>{"labels":["Article 2"]}</think>{"labels":["article 3"]}', ["Article 3"], 1),
    ],
)
def test_sets_by_hand(reply: str, labels: list[str], repairs: int) -> None:
    decoded = ECTHR.ask.decode(reply, Example(1, ""), Labels())
    assert (decoded.answer, len(decoded.repairs)) == ({"labels": labels}, repairs)


@pytest.mark.parametrize(
    "reply",
    [
        '{"label":"一年以下","label":"十年以上"}',
        '{"label":["一年以下","十年以上"]}',
        '{"label":"一年以下、十年以上"}',
        '{"label":"一年以下或十年以上"}',
        '{"label":"一年以下"} 更正：{"label":"不明"}',
        "",
    ],
)
def test_several_classes_where_one_is_asked_for_are_no_answer(reply: str) -> None:
    decoded = SEVERITY.ask.decode(reply, Example(1, ""), LABELS)
    assert decoded.answer == {"label": "一年以下"}, "the fallback"
    assert decoded.guesses == ((0, "label"),)
    assert decoded.is_guess(0, "label")
    assert not decoded.readable


@pytest.mark.parametrize(
    "reply",
    [
        '{"label":"十年以上","label":"十年以上"}',
        '{"label":["十年以上","有期徒刑十年以上"]}',
        '{"label":["十年以上","并处罚金"]}',
        '{"label":"十年\u200b以上"}。',
        '{"label":"一年以下"} 更正：{"label":"十年以上"}',
    ],
)
def test_one_class_is_the_answer_however_often_it_is_named(reply: str) -> None:
    decoded = SEVERITY.ask.decode(reply, Example(1, ""), LABELS)
    assert decoded.answer == {"label": "十年以上"}
    assert decoded.readable
    assert decoded.repairs
    assert decoded.guesses == ()


@pytest.mark.parametrize(
    ("reply", "labels"),
    [
        ('{"labels":[', None),  # cut: nobody can say that the set is empty
        ('{"labels":[}', None),
        ('{"labels":{}}', None),
        ('{"labels":[],"labels":["Article 3"]}', None),
        ('{"labels":["Article 5"],"labels":["Article 3"]}', None),
        ('{"labels":["Article 3"],"labels":["Article 3"]}', ["Article 3"]),
        ('{"labels":["Article 5","Art', ["Article 5"]),
        ('{"labels":["Article 5"]} Correction: {"labels":["Article 3"]}', ["Article 3"]),
        ('{"labels":["Article 5"]} Correction: {"labels":[]}', []),
        ('```{"labels": [ ] }```', []),
    ],
)
def test_a_set_counts_as_it_is_given_or_not_at_all(reply: str, labels: list[str] | None) -> None:
    decoded = ECTHR.ask.decode(reply, Example(1, ""), Labels())
    assert decoded.answer == {"labels": ["Article 2"] if labels is None else labels}
    assert decoded.is_guess(0, "labels") == (labels is None)
    assert decoded.guesses == (((0, "labels"),) if labels is None else ())


THREE = macro_f1(3, (), several=False)


def value(*pairs: tuple[object, object], key: str = "label") -> float:
    rows = [({key: gold}, None if told is None else {key: told}) for gold, told in pairs]
    return float(THREE.value(np.sum([THREE.counts(gold, told) for gold, told in rows], axis=0)))


def test_by_hand() -> None:
    # F1 of 0: 2 * 2 / (3 + 2); of 1: 2 * 1 / (1 + 2); 2 never occurs.
    assert value((0, 0), (0, 0), (0, 1), (1, 1)) == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert value((0, 0), (1, None)) == pytest.approx(1 / 2), "no row: class 1 is missed"
    assert value((0, 0)) == 1
