"""Classes of a closed list: FairLex's files in their published field names, and odd replies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from panjue.eval.fairness import fairness
from panjue.eval.score import score
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, load_task
from panjue.prompts.tasks.metrics import CorpusMetric

SEVERITY, ECTHR, SCOTUS, FSCS = map(load_task, ("severity", "ecthr", "scotus", "fscs"))
LABELS = Labels({"label": {"一年以下": 3, "没有刑期": 1}})


@pytest.mark.parametrize(
    ("task", "fields", "answer", "groups"),
    [
        (SEVERITY, {"label": 5, "gender": "female", "region": None}, "十年以上", ["female"]),
        (SEVERITY, {"label": 1, "defendant_gender": 1.0}, "一年以下", ["female"]),
        (SEVERITY, {"label": 0, "court_region": "北京"}, "没有刑期", ["北京"]),
        (SEVERITY, {"label": 0, "court_region": 5}, "没有刑期", ["Guangxi"]),
        (SEVERITY, {"label": -1, "court_region": 0.0}, None, ["Beijing"]),
        (ECTHR, {"labels": [9, 1], "applicant_age": 3}, ["Article 3", "Article P1-1"], [">65"]),
        (ECTHR, {"labels": [], "applicant_gender": 0}, [], []),  # 0 is "N/A", no group
        (SCOTUS, {"label": "Unions", "attributes": {"respondent_type": 1}}, "Unions", ["person"]),
        (SCOTUS, {"label": "Unions", "attributes": 3}, "Unions", []),
        (SCOTUS, {"label": 6}, "Unions", []),
        (SCOTUS, {"label": 10}, "Federal Taxation", []),  # of eleven areas; the database has 14
        (FSCS, {"label": 1, "legal_area": -1}, "approval", []),  # a missing ClassLabel
    ],
)
def test_rows_as_they_are_published(
    task: Task, fields: dict[str, Any], answer: Any, groups: list[str]
) -> None:
    example = task.data.read({"id": 7, "text": "某案", **fields})
    [key] = task.answer.fields
    assert (example.text, list(example.groups.values())) == ("某案", groups)
    assert example.answer == (None if answer is None else {key: answer})
    if answer is None:
        return
    assert task.data.read({"id": 7, "text": "某案", **task.gold(example)}).answer == example.answer


@pytest.mark.parametrize("sign", ["\u200b", "\ufeff", "\u00ad"])
def test_invisible_characters_are_left_out(sign: str) -> None:
    row = {"id": 7, "text": f"Cer{sign}t.", "label": f"Un{sign}ions", "respondent_type": sign}
    example = SCOTUS.data.read(row)
    assert (example.text, example.answer, example.groups) == ("Cert.", {"label": "Unions"}, {})


def test_the_prompt_names_the_person_without_invisible_characters() -> None:
    row = {"id": 7, "fact": "李\u200b某A行窃。", "region": "北京\ufeff", "defendant": "李\u200b某A"}
    example = SEVERITY.data.read(row)
    assert (example.names, example.groups) == (("李某A",), {"region": "北京"})
    assert example.text == "李某A行窃。"
    assert "判断被告人李某A的刑期" in SEVERITY.ask.prompt(example)[0]["content"]
    nobody = SEVERITY.data.read({"id": 7, "fact": "某案"})
    assert nobody.names == ()
    assert "判断被告人的刑期" in SEVERITY.ask.prompt(nobody)[0]["content"]


@pytest.mark.parametrize(
    ("task", "fields", "complaint"),
    [
        (SEVERITY, {"id": None}, "'id' must be"),
        (SEVERITY, {"fact": ""}, "'fact' must be"),
        (SEVERITY, {"defendant": 3}, "'defendant' must be a name"),
        (SEVERITY, {"label": 6}, "'label' must be one of 0, 1, 2, 3, 4, 5; found 6"),
        (SEVERITY, {"label": "1"}, "'label' must be one of 0"),
        (SEVERITY, {"label": True}, "'label' must be one of 0"),
        (SEVERITY, {"label": 1.0}, "'label' must be one of 0"),
        (SEVERITY, {"gender": True}, "'gender' must be a name or a number, found True"),
        (ECTHR, {"labels": [10]}, "'labels' must be a list of 0, 1"),
        (ECTHR, {"labels": 1}, "'labels' must be a list of 0, 1"),
        (SCOTUS, {"label": 11}, "'label' must be one of Criminal Procedure, Civil"),
        (SCOTUS, {"label": True}, "'label' must be one of Criminal Procedure, Civil"),
        (SEVERITY, {"region": 7}, "'region' must be a name or a number from 0 to 6"),
        (FSCS, {"legal_area": 6}, "'legal_area' must be a name or a number from 0 to 5"),
    ],
)
def test_a_bad_line(task: Task, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        task.data.read({"id": 1, "fact": "某案", "text": "某案", **fields})


def test_the_line_number_is_the_id_of_a_row_that_has_none(tmp_path: Path) -> None:
    """FairLex's files have no ids."""
    unlabelled = {"text": "…", "label": None}
    rows = [{"text": "…", "label": 1}, {"id": "x", **unlabelled}, {"id": "", **unlabelled}]
    path = tmp_path / "cases.jsonl"
    path.write_text("// a remark\n" + "\n".join(map(dump, rows)), "utf-8")
    reader = Reader(FSCS, on_bad_row="skip")
    assert [example.id for example in reader.read(path)] == [2, "x"]
    assert list(reader.skipped.rows.values()) == ["'id' is an empty text"]
    path.write_text(dump(rows[:2] + rows[:1]), "utf-8")
    assert [example.id for example in Reader(FSCS).read(path)] == [1, "x", 3]


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ('```json\n{"label": "十年以上"}\n```', "十年以上"),
        ('{"label":"三年以上五年以下有期徒刑"}', "三年以上五年以下"),
        # One class is the answer, however often it is named.
        ('{"label":"十年以上","label":"十年以上"}', "十年以上"),
        ('{"label":["十年以上","并处罚金"]}', "十年以上"),
        ('{"label":"十年\u200b以上"}。', "十年以上"),
        ('{"label":"一年以上三年以下"} 更正：{"label":"十年以上"}', "十年以上"),
        # No class, or several where one is asked for.
        ("", None),
        ('{"label":"十年以上","label":"没有刑期"}', None),
        ('{"label":["没有刑期","十年以上"]}', None),
        ('{"label":"没有刑期、十年以上"}', None),
        ('{"label":"没有刑期"} 更正：{"label":"不明"}', None),
    ],
)
def test_a_class_by_hand(reply: str, label: str | None) -> None:
    decoded = SEVERITY.ask.decode(reply, Example(1, ""), LABELS)
    assert decoded.answer == {"label": label or "一年以下"}, "or the fallback"
    assert decoded.readable == bool(label)
    assert decoded.from_fallback == (() if label else ((0, "label"),))
    assert len(decoded.repairs) == 1


@pytest.mark.parametrize(
    ("reply", "labels"),
    [
        ('{"labels":["Article 5","Article 3"]}', ["Article 3", "Article 5"]),
        ('So: {"labels": []}', []),
        ('{"labels":["Article 13","Article 18"]}', None),
        ('{"labels":[', None),  # cut: nobody can say that the set is empty
        ('{"labels":{}}', None),
        ('{"labels":[],"labels":["Article 3"]}', None),
        ('{"labels":["Article 5","Art', ["Article 5"]),
        ('{"labels":["Article 5"]} Correction: {"labels":[]}', []),
    ],
)
def test_a_set_by_hand(reply: str, labels: list[str] | None) -> None:
    """A set counts as it is given or not at all."""
    decoded = ECTHR.ask.decode(reply, Example(1, ""), Labels())
    assert decoded.answer == {"labels": ["Article 2"] if labels is None else labels}
    assert decoded.readable == (labels is not None)
    assert decoded.from_fallback == (((0, "labels"),) if labels is None else ())
    assert len(decoded.repairs) == 1


def test_the_fallback_may_be_an_empty_set() -> None:
    decoded = ECTHR.ask.decode("", Example(1, ""), Labels({"label": {"none": 2, "Article 3": 1}}))
    assert decoded.answer == {"labels": []}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"id": 1, "labels": [0, 9]}, None),
        ({"id": "1", "labels": [0]}, "the id is '1'"),
        ({"id": 1, "labels": [10]}, "must be a list of"),
        ({"id": 1, "labels": [], "text": ""}, "the fields must be id and labels"),
    ],
)
def test_faults(row: dict[str, Any], complaint: str | None) -> None:
    faults = list(ECTHR.data.check(Example(1, ""), row, None))
    assert len(faults) == bool(complaint)
    assert (complaint or "") in "".join(faults)


def test_a_class_without_a_row_is_missed() -> None:
    *_, macro_f1 = SEVERITY.score.metrics
    assert isinstance(macro_f1, CorpusMetric)
    counts = [
        macro_f1.counts({"label": 0}, {"label": 0}),
        macro_f1.counts({"label": 1}, None),
    ]
    assert macro_f1.value(np.sum(counts, axis=0)) == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("name", "cases", "total", "of_groups"),
    [
        ("severity", "a00 a01", 2 / 3, {"a": 2 / 3}),
        ("severity", "a00 a01 b11 b11 c23 c54", 0.366667, {"a": 2 / 3, "b": 1, "c": 0}),
        ("fscs", "a00 a01 b00 b11", 0.733333, {"a": 2 / 3, "b": 1}),
        ("scotus", "a00 a03 a66 b76", 0.444444, {"a": 0.833333, "b": 0}),
    ],
)
def test_macro_f1_is_over_the_classes_in_gold_of_the_group(
    tmp_path: Path, name: str, cases: str, total: float, of_groups: dict[str, float]
) -> None:
    """The numbers are those of `eval` of FairLex's data sets (coastalcph/fairlex, b3f539a of
    2023-07-25, with wilds 2.0.0), run on these cases: group, gold label, predicted label."""
    task = load_task(name)
    words = task.score.order["class"]
    gold, rows = [], []
    for key, (group, *labels) in enumerate(map(list, cases.split())):
        right, told = [words[int(label)] if name == "scotus" else int(label) for label in labels]
        gold.append({"id": key, "text": "…", "groups": {"g": group}, "label": right})
        rows.append({"id": key, "label": told})
    (tmp_path / "gold.jsonl").write_text("\n".join(map(dump, gold)), "utf-8")
    (tmp_path / "submission.jsonl").write_text("\n".join(map(dump, rows)), "utf-8")
    scores = score(Reader(task), tmp_path / "gold.jsonl", tmp_path)
    assert scores.total.mean["macro_f1"] == pytest.approx(total, abs=1e-6)
    found = {group: summary.mean["macro_f1"] for group, summary in scores.groups["g"].items()}
    assert found == pytest.approx(of_groups, abs=1e-6)
    report = fairness(Reader(task), tmp_path / "gold.jsonl", tmp_path, ["g"])
    assert {key: group.value for key, group in report.attributes["g"].groups.items()} == found


def test_the_empty_set_is_an_eleventh_class_as_in_the_paper() -> None:
    """A perfect submission of all articles and "none" has 1.0 by FairLex's code of the paper
    (coastalcph/fairlex, 2bce307 of 2022-03-02); that of b3f539a, 2023-07-25, gives 0.9167."""
    *_, macro_f1 = ECTHR.score.metrics
    assert isinstance(macro_f1, CorpusMetric)
    rows: list[dict[str, Any]] = [{"labels": [number]} for number in range(10)]
    rows.append({"labels": []})
    counts = [macro_f1.counts(row, row) for row in rows]
    assert macro_f1.value(np.sum(counts, axis=0)) == 1
