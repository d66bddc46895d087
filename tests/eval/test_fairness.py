"""The fairness report on files small enough to work out by hand."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from panjue.eval.fairness import Attribute, Fairness, fairness, show_fairness
from panjue.eval.score import score
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import load_task

TASK = load_task("severity")


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    return path


def person(key: int, label: int, **groups: Any) -> dict[str, Any]:
    return {"id": key, "fact": f"案{key}", "label": label, **groups}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four men, two women, one nobody knows; the men's last two and one woman are wrong."""
    gold = [
        person(1, 1, gender="male", region="北京"),
        person(2, 1, gender="male", region="北京"),
        person(3, 2, gender="male", region="上海"),
        person(4, 2, gender="male", region="上海"),
        person(5, 1, gender="female", region="北京"),
        person(6, 2, gender="female", region=None),
        person(7, 1, gender=None, region="北京"),
    ]
    write(tmp_path / "gold.jsonl", gold)
    answers = enumerate([1, 1, 1, 3, 1, 1, 1], start=1)
    write(tmp_path / "submission.jsonl", ({"id": key, "label": label} for key, label in answers))
    return tmp_path


def made(folder: Path, *by: str, least: int = 2, side: Path | None = None) -> Fairness:
    """Report by accuracy alone, which is worked out by hand more easily than macro F1."""
    accuracy = replace(TASK, score=replace(TASK.score, metrics=TASK.score.metrics[:1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panjue.eval.fairness.MIN_EXAMPLES", least)
        reader = Reader(accuracy, side_groups(side))
        return fairness(reader, folder / "gold.jsonl", folder, by)


def sizes(attribute: Attribute) -> dict[str, int]:
    return {name: group.n for name, group in attribute.groups.items()}


def values(attribute: Attribute) -> dict[str, float]:
    return {name: group.value for name, group in attribute.groups.items()}


def test_the_numbers_by_hand(folder: Path) -> None:
    report = made(folder, "gender", "region")
    assert (report.metric, report.total, report.examples) == ("accuracy", 4 / 7, 7)
    gender, region = report.attributes["gender"], report.attributes["region"]
    assert list(sizes(gender).items()) == [("male", 4), ("female", 2)], "the largest first"
    assert values(gender) == {"male": 0.5, "female": 0.5}
    assert gender.unknown == 1
    male = gender.groups["male"]
    assert male.low < male.value < male.high
    assert values(region) == {"北京": 1, "上海": 0}
    assert (region.mean, region.disparity, region.gap) == (0.5, 0.5, 1)
    assert (region.worst, region.worst_group) == (0, "上海")


def test_small_groups_are_shown_and_count_for_nothing(folder: Path) -> None:
    one = made(folder, "gender", least=3).attributes["gender"]
    assert [group.flagged for group in one.groups.values()] == [False, True]
    assert (one.mean, one.worst_group, one.gap, one.disparity) == (0.5, "male", None, None)
    none = made(folder, "gender", least=20).attributes["gender"]
    assert (none.mean, none.disparity, none.worst, none.gap, none.worst_group) == (None,) * 5
    assert len(none.groups) == 2


def test_a_side_file_counts_more_than_the_case(folder: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "gender": "other", "court": 3.0},
        {"id": 2, "gender": None},
    ]
    side = write(folder / "side.jsonl", rows)
    found = made(folder, "gender", "court", side=side).attributes
    assert sizes(found["gender"]) == {"male": 2, "female": 2, "other": 1}
    assert (sizes(found["court"]), found["court"].unknown) == ({"3": 1}, 6)


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ({"id": 1, "court": "低"}, r"side.jsonl:2: id 1 occurs twice"),
        ({"id": 2, "court": ["高"]}, r"side.jsonl:2: group 'court' must be one text"),
        ({"court": "高"}, r"side.jsonl:2: 'id' must be a whole number or a string"),
    ],
)
def test_a_bad_row_of_a_side_file(folder: Path, second: dict[str, Any], complaint: str) -> None:
    side = write(folder / "side.jsonl", [{"id": 1, "court": "高"}, second])
    with pytest.raises(UserError, match=complaint):
        side_groups(side)


def test_a_table_of_groups_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a table; groups are JSON lines, e\.g\. {\"id\": 7"):
        side_groups(tmp_path / "groups.csv")


UNKNOWN: list[Any] = [None, "", " ", "-", "nan", "NaN", "None", "null", "N/A", "<NA>", math.nan]


@pytest.mark.parametrize("value", UNKNOWN)
def test_unknown_is_unknown_wherever_it_is_written(value: Any, folder: Path) -> None:
    rows = [
        person(1, 1, gender=value),
        person(2, 1, gender="male"),
        person(3, 1, groups={"court": value}),
        person(4, 1, gender="female", groups={"court": "高"}),
    ]
    write(folder / "gold.jsonl", rows)
    side = write(folder / "side.jsonl", [{"id": 2, "gender": value}])
    found = made(folder, "gender", "court", side=side).attributes
    assert (sizes(found["gender"]), found["gender"].unknown) == ({"female": 1}, 3)
    assert (sizes(found["court"]), found["court"].unknown) == ({"高": 1}, 3)
    assert score(Reader(TASK), folder / "gold.jsonl", folder).groups["court"].keys() == {"-", "高"}


@pytest.mark.parametrize(
    ("by", "complaint"),
    [
        (
            ["gendre"],
            r"no example has 'gendre'; did you mean 'gender'\? \(there are gender, region",
        ),
        (["gender", "gender"], "each once"),
        ([], "name one or more attributes"),
    ],
)
def test_an_unknown_attribute_is_refused(folder: Path, by: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        made(folder, *by)


def test_groups_of_a_line_are_an_object(folder: Path) -> None:
    write(folder / "gold.jsonl", [person(1, 1, groups=["court"])])
    with pytest.raises(UserError, match="groups must be an object"):
        made(folder, "court")


def printed(report: Fairness, capsys: pytest.CaptureFixture[str]) -> str:
    show_fairness(report, Console(width=200))
    return capsys.readouterr().out


def test_single_defendants_are_unweighted_as_in_the_table_of_score(
    case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty single defendants have weight 0: beside another case, they do not count."""
    reader = Reader(load_task("judgment"))
    cases = []
    for number, names in enumerate(["甲"] * 20 + ["甲乙"]):
        row = case(number, *((name, ["盗窃罪"], ["264"], 11) for name in names))
        cases.append({**row, "groups": {"g": "both"}})
    gold = write(tmp_path / "gold.jsonl", cases)
    write(tmp_path / "submission.jsonl", [{"id": n, "judgments": []} for n in range(21)])
    report = fairness(reader, gold, tmp_path, ["g", "defendants"])
    scores = score(reader, gold, tmp_path)
    for attribute, found in report.attributes.items():
        for name, group in found.groups.items():
            summary = scores.groups[attribute][name]
            assert (group.n, group.value) == (summary.examples, summary.mean["final"])
    both = report.attributes["g"].groups["both"]
    assert (both.n, both.counted, both.flagged) == (21, 1, True), "its value is that of one case"
    by_number = report.attributes["defendants"].groups
    assert {name: group.counted for name, group in by_number.items()} == {"2": 1, "1": 0}
    assert all(group.flagged for group in by_number.values())
    text = printed(report, capsys)
    assert "20 (0 counted)" in text
    assert text.count("unweighted means, as all examples have weight 0: 1\n") == 1
    assert "21 (1 counted)" in text
    assert text.startswith("final 0.0000 over all 21 (1 counted) examples")


def persons_of(names: Sequence[str], right: Mapping[str, bool], case: Any, folder: Path) -> Path:
    """Write a case for each text of names, in its group, and answers that are right or wrong."""
    cases, answers = [], []
    for number, together in enumerate(names):
        row = case(number, *((name, ["盗窃罪"], ["264"], 11) for name in together))
        cases.append({**row, "groups": {"court": together}})
        judged = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": 11}
        judgments = [{"name": name, **judged} for name in together] if right[together] else []
        answers.append({"id": number, "judgments": judgments})
    write(folder / "submission.jsonl", answers)
    return write(folder / "gold.jsonl", cases)


def test_cases_that_count_for_nothing_are_in_no_number_over_groups(
    case: Any, tmp_path: Path
) -> None:
    """Single defendants, all judged wrong, have weight 0 in the official metric."""
    right = {"甲": False, "乙丙": True, "丁戊": False, "己": True}
    names = ["甲"] * 30 + ["乙丙"] * 20 + ["丁戊"] * 20
    gold = persons_of(names, right, case, tmp_path)
    reader = Reader(load_task("judgment"))
    report = fairness(reader, gold, tmp_path, ["court"])
    court = report.attributes["court"]
    assert (report.total, report.counted, report.examples) == (0.5, 40, 70)
    assert (court.mean, court.disparity, court.worst, court.gap) == (0.5, 0.5, 0, 1)
    assert court.worst_group == "丁戊"
    assert [*court.groups] == ["丁戊", "乙丙", "甲"], "those first that count"

    gold = persons_of(["甲"] * 30 + ["己"] * 20, right, case, tmp_path)
    court = fairness(reader, gold, tmp_path, ["court"]).attributes["court"]
    assert (court.mean, court.gap, court.worst_group) == (0.5, 1, "甲"), "in a file of such cases"


def test_what_is_printed_and_the_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    side = write(folder / "side.jsonl", [{"id": 7, "gender": "[/b]"}])
    write(folder / "submission.jsonl", [{"id": 1, "label": 1}])
    report = made(folder, "gender", "region", side=side)
    text = printed(report, capsys)
    lines = [
        "accuracy 0.1429 over all 7 examples",
        "6 examples have no row and count as unanswered",
        "[/b]*",
        "mean 0.1250, disparity 0.1250, worst 0.0000 (female), gap 0.2500",
        "* 1 groups with under 20 examples that count: not compared",
        "1 examples are in no group: their group is unknown",
    ]
    assert [line for line in lines if line not in text] == []
    none = printed(made(folder, "gender", least=20), capsys)
    assert "no group has 20 examples that count: no mean, disparity, worst or gap" in none
    numbers = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert numbers["attributes"]["region"]["groups"].keys() == {"北京", "上海"}
    assert numbers["missing"] == 6
