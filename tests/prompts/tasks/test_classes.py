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
from panjue.prompts.task import Task, load_task
from panjue.prompts.tasks.metrics import CorpusMetric

SEVERITY, ECTHR, SCOTUS, FSCS = (load_task(n) for n in ("severity", "ecthr", "scotus", "fscs"))

LABELS = Labels({"label": {"一年以下": 3, "没有刑期": 1}})


def test_severity() -> None:
    row = {"id": 7, "fact": "某案", "label": 5, "gender": "female", "region": None, "year": 2018}
    example = SEVERITY.data.read(row)
    assert (example.text, example.answer) == ("某案", {"label": "十年以上"})
    assert example.groups == {"gender": "female"}, "what nobody knows is no group"
    assert SEVERITY.gold(example) == {"id": 7, "label": 5}
    published = {"id": 7, "fact": "某案", "defendant_gender": 1, "court_region": "北京"}
    assert SEVERITY.data.read(published).groups == {"gender": "female", "region": "北京"}
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


def test_scotus_has_names_of_classes_and_fscs_numbers() -> None:
    row: dict[str, Any] = {"id": "x", "text": "…", "label": "Economic Activity"}
    row["attributes"] = {"decision_direction": 1, "respondent_type": "person"}
    example = SCOTUS.data.read(row)
    assert example.answer == {"label": "Economic Activity"}
    assert example.groups == {"decision_direction": "liberal", "respondent_type": "person"}
    assert SCOTUS.gold(example) == {"id": "x", "label": "Economic Activity"}
    row = {"id": 1, "text": "…", "label": 1, "decision_language": 2.0, "court_region": 0}
    example = FSCS.data.read(row)
    assert example.answer == {"label": "approval"}
    assert example.groups == {"decision_language": "it"}
    assert FSCS.data.read({**row, "legal_area": -1}) == example, "a missing ClassLabel"
    with pytest.raises(UserError, match="'legal_area' must be a name or a number from 0 to 5"):
        FSCS.data.read({**row, "legal_area": 6})


@pytest.mark.parametrize(
    ("task", "fields", "complaint"),
    [
        (SEVERITY, {"id": None}, "'id' must be"),
        (SEVERITY, {"id": ""}, "'id' is an empty text"),
        (SEVERITY, {"fact": ""}, "'fact' must be"),
        (SEVERITY, {"defendant": 3}, "'defendant' must be a name"),
        (SEVERITY, {"label": 6}, "'label' must be one of 0, 1, 2, 3, 4, 5; found 6"),
        (SEVERITY, {"label": "1"}, "'label' must be one of 0"),
        (SEVERITY, {"label": True}, "'label' must be one of 0"),
        (SEVERITY, {"label": 1.0}, "'label' must be one of 0"),
        (SEVERITY, {"gender": True}, "'gender' must be a name or a number, found True"),
        (ECTHR, {"labels": [10]}, "'labels' must be a list of 0, 1"),
        (ECTHR, {"labels": 1}, "'labels' must be a list of 0, 1"),
        (SCOTUS, {"label": 10}, "'label' must be one of Criminal Procedure, Civil"),
    ],
)
def test_a_bad_line(task: Task, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        task.data.read({"id": 1, "fact": "某案", "text": "某案", **fields})


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
    ("reply", "label"),
    [
        ('```json\n{"label": "十年以上"}\n```', "十年以上"),
        ('{"label":"三年以上五年以下有期徒刑"}', "三年以上五年以下"),
        ('{"label":["十年以上"]}', "十年以上"),
        # One class is the answer, however often it is named.
        ('{"label":"十年以上","label":"十年以上"}', "十年以上"),
        ('{"label":["十年以上","有期徒刑十年以上"]}', "十年以上"),
        ('{"label":["十年以上","并处罚金"]}', "十年以上"),
        ('{"label":"十年\u200b以上"}。', "十年以上"),
        ('{"label":"一年以上三年以下"} 更正：{"label":"十年以上"}', "十年以上"),
        # No class, or several where one is asked for.
        ("", None),
        ("十年以上", None),
        ('{"label":"十年以上', None),
        ('{"label":"十年以上","label":"没有刑期"}', None),
        ('{"label":["没有刑期","十年以上"]}', None),
        ('{"label":"没有刑期、十年以上"}', None),
        ('{"label":"没有刑期或十年以上"}', None),
        ('{"label":"没有刑期"} 更正：{"label":"不明"}', None),
    ],
)
def test_a_class_by_hand(reply: str, label: str | None) -> None:
    decoded = SEVERITY.ask.decode(reply, Example(1, ""), LABELS)
    assert decoded.answer == {"label": label or "一年以下"}, "or the fallback"
    assert decoded.readable == bool(label)
    assert decoded.guesses == (() if label else ((0, "label"),))
    assert len(decoded.repairs) == 1


@pytest.mark.parametrize(
    ("reply", "labels"),
    [
        ('{"labels":["Article 5","Article 3"]}', ["Article 3", "Article 5"]),
        ('{"labels":["article 3"]}', ["Article 3"]),
        ('So: {"labels": []}', []),
        ('```{"labels": [ ] }```', []),
        ('{"labels":["Article 13","Article 18"]}', None),
        ('{"labels":[', None),  # cut: nobody can say that the set is empty
        ('{"labels":[}', None),
        ('{"labels":{}}', None),
        ('{"labels":[],"labels":["Article 3"]}', None),
        ('{"labels":["Article 5"],"labels":["Article 3"]}', None),
        ('{"labels":["Article 3"],"labels":["Article 3"]}', ["Article 3"]),
        ('{"labels":["Article 5","Art', ["Article 5"]),
        ('{"labels":["Article 5"]} Correction: {"labels":["Article 3"]}', ["Article 3"]),
        ('{"labels":["Article 5"]} Correction: {"labels":[]}', []),
    ],
)
def test_a_set_by_hand(reply: str, labels: list[str] | None) -> None:
    """A set counts as it is given or not at all."""
    decoded = ECTHR.ask.decode(reply, Example(1, ""), Labels())
    assert decoded.answer == {"labels": ["Article 2"] if labels is None else labels}
    assert decoded.readable == (labels is not None)
    assert decoded.guesses == (((0, "labels"),) if labels is None else ())
    assert len(decoded.repairs) == 1


def test_the_fallback_may_be_an_empty_set() -> None:
    decoded = ECTHR.ask.decode("", Example(1, ""), Labels({"label": {"none": 2, "Article 3": 1}}))
    assert decoded.answer == {"labels": []}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"id": 1, "labels": []}, None),
        ({"id": 1, "labels": [0, 9]}, None),
        ({"id": "1", "labels": [0]}, "the id is '1'"),
        ({"id": 1, "labels": [10]}, "must be a list of"),
        ({"id": 1, "label": 0}, "the fields must be id and labels"),
        ({"id": 1, "labels": [], "text": ""}, "the fields must be id and labels"),
    ],
)
def test_faults(row: dict[str, Any], complaint: str | None) -> None:
    faults = list(ECTHR.data.check(Example(1, ""), row, None))
    assert len(faults) == bool(complaint)
    assert (complaint or "") in "".join(faults)


def test_macro_f1_by_hand() -> None:
    *_, macro_f1 = SEVERITY.score.metrics
    assert isinstance(macro_f1, CorpusMetric)

    def value(*pairs: tuple[int, int | None]) -> float:
        counts = []
        for gold, given in pairs:
            row = None if given is None else {"label": given}
            counts.append(macro_f1.counts({"label": gold}, row))
        return float(macro_f1.value(np.sum(counts, axis=0)))

    # F1 of 0: 2 * 2 / (3 + 2); of 1: 2 * 1 / (1 + 2); the others never occur.
    assert value((0, 0), (0, 0), (0, 1), (1, 1)) == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert value((0, 0), (1, None)) == pytest.approx(1 / 2), "no row: class 1 is missed"
