"""The fairness report on files small enough to work out by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from panjue.eval.fairness import Fairness, attribute_remarks, fairness, header_lines, show_fairness
from panjue.eval.score import score
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import load_task

TASK = load_task("severity")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    return path


def case(key: int, label: int, **groups: Any) -> dict[str, Any]:
    return {"id": key, "fact": f"案{key}", "label": label, **groups}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four men, two women, one nobody knows; the men's last two and one woman are wrong."""
    gold = [
        case(1, 1, gender="male", region="北京"),
        case(2, 1, gender="male", region="北京"),
        case(3, 2, gender="male", region="上海"),
        case(4, 2, gender="male", region="上海"),
        case(5, 1, gender="female", region="北京"),
        case(6, 2, gender="female", region=None),
        case(7, 1, gender=None, region="北京"),
    ]
    told = {1: 1, 2: 1, 3: 1, 4: 3, 5: 1, 6: 1, 7: 1}
    write(tmp_path / "gold.jsonl", gold)
    write(tmp_path / "submission.jsonl", [{"id": k, "label": v} for k, v in told.items()])
    return tmp_path


def made(folder: Path, *by: str, min_n: int = 2, side: Path | None = None) -> Fairness:
    """Report by accuracy alone, which is worked out by hand more easily than macro F1."""
    accuracy = replace(TASK, score=replace(TASK.score, metrics=TASK.score.metrics[:1]))
    return made_of(Reader(accuracy, side_groups(side)), folder, *by, min_n=min_n)


def made_of(reader: Reader, folder: Path, *by: str, min_n: int) -> Fairness:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panjue.eval.fairness.MIN_EXAMPLES", min_n)
        return fairness(reader, folder / "gold.jsonl", folder, by)


def test_the_numbers_by_hand(folder: Path) -> None:
    found = made(folder, "gender").attributes["gender"]
    assert list(found.groups) == ["male", "female"]
    male, female = found.groups["male"], found.groups["female"]
    assert (male.n, male.value, female.n, female.value) == (4, 0.5, 2, 0.5)
    assert (found.mean, found.disparity, found.worst, found.gap) == (0.5, 0, 0.5, 0)
    assert found.unknown == 1
    assert male.low <= male.value <= male.high


def test_disparity_is_the_population_deviation(folder: Path) -> None:
    found = made(folder, "region").attributes["region"]
    assert {name: group.value for name, group in found.groups.items()} == {"北京": 1, "上海": 0}
    assert (found.mean, found.disparity, found.gap) == (0.5, 0.5, 1)
    assert (found.worst, found.worst_group) == (0, "上海")


def test_macro_f1_of_a_group_is_over_its_own_classes(folder: Path) -> None:
    found = made_of(Reader(TASK), folder, "gender", min_n=1)
    assert found.metric == "macro_f1"
    # Men: 4/5 for class 1, 0 for 2 and for 3; women: 2/3 and 0.
    groups = found.attributes["gender"].groups
    assert groups["male"].value == pytest.approx(4 / 15)
    assert groups["female"].value == pytest.approx(1 / 3)


def test_small_groups_are_shown_and_count_for_nothing(folder: Path) -> None:
    found = made(folder, "gender", min_n=3).attributes["gender"]
    assert (found.groups["female"].flagged, found.groups["male"].flagged) == (True, False)
    assert (found.mean, found.gap, found.disparity) == (0.5, None, None), "one is no two"
    none = made(folder, "gender", min_n=20).attributes["gender"]
    assert (none.mean, none.disparity, none.worst, none.gap, none.worst_group) == (None,) * 5
    assert len(none.groups) == 2


def test_a_side_file_and_rows_that_it_lacks(folder: Path) -> None:
    side = write(folder / "side.jsonl", [{"id": 1, "court": "高"}, {"id": 5, "court": 3}])
    found = made(folder, "court", min_n=1, side=side).attributes["court"]
    assert {name: group.n for name, group in found.groups.items()} == {"高": 1, "3": 1}
    assert found.unknown == 5
    write(side, [{"id": 1, "court": "高"}, {"id": 1, "court": "低"}])
    with pytest.raises(UserError, match=r"side.jsonl:2: id 1 occurs twice"):
        side_groups(side)
    write(side, [{"id": 1, "court": ["高"]}])
    with pytest.raises(UserError, match=r"side.jsonl:1: group 'court' must be one text"):
        side_groups(side)
    write(side, [{"id": 1, "gender": "other"}, {"id": 2, "gender": None}])
    found = made(folder, "gender", min_n=1, side=side).attributes["gender"]
    assert {n: g.n for n, g in found.groups.items()} == {"male": 2, "female": 2, "other": 1}


UNKNOWN: list[Any] = [None, "", " ", "-", "nan", "NaN", "None", "null", "N/A", "<NA>", math.nan]


@pytest.mark.parametrize("value", UNKNOWN)
def test_unknown_is_unknown_wherever_it_is_written(value: Any, folder: Path) -> None:
    rows = [
        case(1, 1, gender=value),
        case(2, 1, gender="male"),
        case(3, 1, groups={"court": value}),
    ]
    write(folder / "gold.jsonl", [*rows, case(4, 1, gender="female", groups={"court": "高"})])
    side = write(folder / "side.jsonl", [{"id": 2, "gender": value}])
    found = made(folder, "gender", "court", min_n=1, side=side).attributes
    assert {name: group.n for name, group in found["gender"].groups.items()} == {"female": 1}
    assert {name: group.n for name, group in found["court"].groups.items()} == {"高": 1}
    assert (found["gender"].unknown, found["court"].unknown) == (3, 3)
    assert score(Reader(TASK), folder / "gold.jsonl", folder).groups["court"].keys() == {"-", "高"}


@pytest.mark.parametrize(("value", "group"), [(0, "male"), (1.0, "female"), (-1, "-"), (-1.0, "-")])
def test_a_number_of_a_named_group_may_be_a_float_as_pandas_writes_it(
    value: float, group: str, folder: Path
) -> None:
    path = write(folder / "gold.jsonl", [case(1, 1, gender=value, groups={"year": 2020.0})])
    [example] = Reader(TASK).read(path)
    assert example.groups.get("gender", "-") == group
    assert example.groups["year"] == "2020"


def test_groups_of_a_line_are_an_object(folder: Path) -> None:
    write(folder / "gold.jsonl", [case(1, 1, groups=["court"])])
    with pytest.raises(UserError, match="groups must be an object"):
        made(folder, "court")


@pytest.mark.parametrize(
    ("by", "complaint"),
    [
        ("gendre", "no example has 'gendre'; did you mean 'gender'"),
        ("gender,gender", "each once"),
        ("", "name one or more attributes"),
    ],
)
def test_an_unknown_attribute_is_refused(folder: Path, by: str, complaint: str) -> None:
    attributes = [name for name in by.split(",") if name]
    with pytest.raises(UserError, match=complaint):
        fairness(Reader(TASK), folder / "gold.jsonl", folder, attributes)


def test_examples_without_a_row_are_told(folder: Path) -> None:
    write(folder / "submission.jsonl", [{"id": 1, "label": 1}])
    found = made(folder, "gender")
    assert (found.missing, found.total) == (6, 1 / 7)
    assert "6 examples have no row" in "".join(header_lines(found))


def test_a_group_s_size_is_its_examples_whatever_their_weight(case: Any, tmp_path: Path) -> None:
    """Twenty single defendants have weight 0; the tables of score and fairness agree."""
    judgment = load_task("judgment")
    rows = []
    for n, names in enumerate(["甲"] * 20 + ["甲乙"]):
        row = case(n, *((name, ["盗窃罪"], ["264"], 11) for name in names))
        rows.append({**row, "groups": {"g": "both", "size": str(len(names))}})
    gold = write(tmp_path / "gold.jsonl", rows)
    write(tmp_path / "submission.jsonl", [{"id": n, "judgments": []} for n in range(21)])
    found = fairness(Reader(judgment), gold, tmp_path, ["g", "size"])
    scores = score(Reader(judgment), gold, tmp_path)
    for attribute, of in found.attributes.items():
        for name, group in of.groups.items():
            summary = scores.groups[attribute][name]
            numbers = (summary.examples, summary.mean["final"], summary.unweighted)
            assert (group.n, group.value, group.unweighted) == numbers
    assert [of.flagged for of in found.attributes["size"].groups.values()] == [False, True]
    assert not found.attributes["g"].groups["both"].flagged
    said = attribute_remarks(found.attributes["size"])
    assert "unweighted means, as all examples have weight 0: 1" in said


def test_the_tables_and_the_json_have_every_group(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made(folder, "gender", "region", min_n=3)
    numbers = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert {"mean", "disparity", "worst", "gap", "groups"} <= numbers["attributes"]["gender"].keys()
    show_fairness(found, Console(width=200))
    printed = capsys.readouterr().out
    for word in ("female*", "male", "上海", "group is unknown"):
        assert word in printed, word


def test_a_group_cannot_write_markup(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "gold.jsonl", [case(1, 1, gender="[/b]")])
    show_fairness(made(folder, "gender", min_n=1), Console(width=200))
    assert "[/b]" in capsys.readouterr().out
