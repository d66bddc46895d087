import json
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.check import Notes, check, moved_rows, unscorable
from panjue.eval.metric_values import metric_values
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from tests.records import Row, Write

TASK = load_task("judgment")
Rows = list[dict[str, Any]]
FIRST = ("甲", ["盗窃罪"], ["264"], 8)
ALSO = ("乙", ["诈骗罪"], ["266"], 10)
KEYS = (1, 2, 3, "x")


@pytest.fixture
def cases(case: Row, write: Write) -> Path:
    """Return four unlabelled cases."""
    return write("cases.jsonl", [case(key, FIRST, ALSO, gold=False) for key in KEYS])


@pytest.fixture
def rows(row: Row) -> Rows:
    """Return a clean hand-in."""
    return [row(key, FIRST, ALSO) for key in KEYS]


Faults = Callable[[bytes | Rows], list[str]]


@pytest.fixture
def faults(cases: Path, tmp_path: Path) -> Faults:
    """Return what writes a hand-in and returns its faults, without the file's name."""

    def of(content: bytes | Rows) -> list[str]:
        path = tmp_path / "submission.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else text_of(content))
        found = list(check(Reader(TASK), path, cases))
        assert all(fault.startswith(f"{path}:") and "\n" not in fault for fault in found)
        return [fault.removeprefix(f"{path}:") for fault in found]

    return of


def text_of(rows: Rows) -> bytes:
    return "".join(dump(row) + "\n" for row in rows).encode()


def test_a_missing_and_a_doubled_case(faults: Faults, rows: Rows) -> None:
    assert faults(rows[:2]) == [" id 3 is not answered", " id x is not answered"]
    assert faults([rows[0], *rows]) == ["2: id 1 is already at 1"]


def test_cases_out_of_order(faults: Faults, rows: Rows) -> None:
    found = faults([rows[1], rows[0], rows[3], rows[2]])
    assert found == ["2: id 1 is out of order", "4: id 3 is out of order"]
    # A row out of order is looked at all the same.
    rows[0]["judgments"][0]["penalty"] = 15
    assert faults([rows[1], rows[0], *rows[2:]]) == [
        "2: id 1 is out of order",
        f"2: id 1: {TOO_HIGH}",
    ]


def test_of_rows_out_of_order_the_moved_ones_are_named(
    case: Row, row: Row, write: Write, tmp_path: Path
) -> None:
    cases = write("cases.jsonl", [case(key, FIRST, gold=False) for key in range(30)])
    rows = [row(key, FIRST) for key in range(30)]

    def moved(start: int, end: int) -> list[str]:
        order = rows.copy()
        order.insert(end, order.pop(start))
        path = write("submission.jsonl", order)
        return [fault.split(": ", 1)[1] for fault in check(Reader(TASK), path, cases)]

    assert moved(29, 0) == ["id 29 is out of order"]
    assert moved(0, 29) == ["id 0 is out of order"]
    assert moved(20, 7) == ["id 20 is out of order"]
    assert len(list(check(Reader(TASK), write("s.jsonl", rows[::-1]), cases))) == 29


@given(st.permutations(range(7)))
def test_without_the_moved_rows_the_others_are_in_order(order: list[int]) -> None:
    gone = moved_rows(order)
    rest = [position for number, position in enumerate(order) if number not in gone]
    assert rest == sorted(rest)
    longest = max(
        size
        for size in range(8)
        if any(list(part) == sorted(part) for part in combinations(order, size))
    )
    assert len(rest) == longest


def test_an_unknown_id(faults: Faults, cases: Path, rows: Rows, row: Row) -> None:
    found = faults([*rows, row(9, ALSO), {"judgments": []}])
    assert found == [f"5: id 9 is no case of {cases}", "6: no 'id'"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"[]", "expected a JSON object, found list"),
        (b'{"id": 1, "name": "\xb5\xc1"}', "not UTF-8 at byte 19"),
    ],
)
def test_a_broken_line(faults: Faults, rows: Rows, line: bytes, complaint: str) -> None:
    [found] = faults(text_of(rows).replace(b"\n", b"\n" + line + b"\n", 1))
    assert found.startswith(f"2: {complaint}")


def test_an_id_of_another_type_and_another_order_of_defendants(faults: Faults, rows: Rows) -> None:
    turned = {**rows[0], "id": str(rows[0]["id"]), "judgments": rows[0]["judgments"][::-1]}
    found = faults([turned, *rows[1:]])
    assert [text.split(": ", 2)[2] for text in found] == [
        f"the id is {turned['id']!r}, the case has {rows[0]['id']!r}",
        "the defendants are not in the order of the case",
    ]


def test_empty_lines(faults: Faults) -> None:
    unanswered = [f" id {key} is not answered" for key in KEYS]
    assert faults(b"\n \n") == ["1: the line is empty", "2: the line is empty", *unanswered]


NO_CLASS = "$.judgments[0].penalty: 8.0 is no whole number"
TOO_HIGH = "$.judgments[0].penalty: 15 is greater than the maximum of 14"


@pytest.mark.parametrize(
    ("judgments", "expected"),
    [
        ([ALSO, ALSO], ["defendant '甲' is not answered", "defendant '乙' is answered 2 times"]),
        ([FIRST, ALSO, ("丙", *FIRST[1:])], ["'丙' is no defendant of this case"]),
        ([("甲", ["盗窃罪"], ["264"], 15), ALSO], [TOO_HIGH]),
        ([("甲", ["盗窃罪"], ["264"], 8.0), ALSO], [NO_CLASS]),
        ([("甲", [], ["264"], 8), ALSO], ["$.judgments[0].charges: [] should be non-empty"]),
    ],
)
def test_defendants_and_shape(
    faults: Faults, rows: Rows, row: Row, judgments: list[object], expected: list[str]
) -> None:
    found = faults([rows[0], row(2, *judgments), *rows[2:]])
    assert found == [f"2: id 2: {text}" for text in expected]


def test_keys_that_are_missing_or_foreign(faults: Faults, rows: Rows) -> None:
    del rows[0]["judgments"][1]["penalty"]
    rows[1]["judgments"][0]["reason"] = "因"
    added = "Additional properties are not allowed"
    assert faults(rows) == [
        "1: id 1: $.judgments[1]: 'penalty' is a required property",
        f"2: id 2: $.judgments[0]: {added} ('reason' was unexpected)",
    ]


def test_an_unknown_label_is_a_fault_where_the_labels_are_known(
    faults: Faults, rows: Rows, tmp_path: Path
) -> None:
    rows[2]["judgments"][0]["charges"] = ["盗窃", "诈骗罪"]
    rows[3]["judgments"][1]["articles"] = ["9"]
    assert faults(rows) == ["3: id 3: 甲: charges has '盗窃', which does not end in 罪"]
    charges, articles = ["盗窃罪", "诈骗罪"], ["264", "266"]
    collect([{"charges": charges, "articles": articles, "penalty": [PENALTIES[8]]}]).save(tmp_path)
    assert faults(rows) == [
        "3: id 3: 甲: charges has the unknown label '盗窃'; did you mean '盗窃罪'?",
        "4: id x: 乙: articles has the unknown label '9'",
    ]


def test_a_label_outside_the_lists_of_a_stage_is_a_fault(
    cases: Path, rows: Rows, tmp_path: Path, write: Write
) -> None:
    """A list is of one field, and says nothing of the other."""
    rows[2]["judgments"][0]["charges"] = ["盗窃"]
    rows[3]["judgments"][1]["articles"] = ["9"]
    path = write("submission.jsonl", rows)
    charges, articles = tmp_path / "charge2idx.json", tmp_path / "article2idx.json"
    write_json(charges, {"盗窃罪": 0, "诈骗罪": 1, "抢劫罪": 2})
    write_json(articles, ["264", "266"])
    of_charge = f"{path}:3: id 3: 甲: charges has the unknown label '盗窃'; did you mean '盗窃罪'?"
    of_article = f"{path}:4: id x: 乙: articles has the unknown label '9'"
    found = [
        list(check(Reader(TASK), path, cases, None, lists)) for lists in ([charges], [articles])
    ]
    assert found == [[of_charge], [of_article]]
    assert list(check(Reader(TASK), path, cases, None, [charges, articles])) == [
        *found[0],
        *found[1],
    ]


@pytest.mark.parametrize(
    ("field", "label", "why"),
    [
        ("charges", "盗窃", "which does not end in 罪"),
        ("charges", "盗窃罪 ", "with a blank at an end"),
        ("charges", "盗窃罪、诈骗罪", "which is several charges in one text"),
        ("charges", "盗窃罪 诈骗罪", "which is several charges in one text"),
        ("articles", "第264条", "which is not written as articles are: 264, 303-2, 287.2"),
        ("articles", "２６４", "which is not written as articles are: 264, 303-2, 287.2"),
        ("articles", "\u3000264", "with a blank at an end"),
        ("articles", "133之一", "which is not written as articles are: 264, 303-2, 287.2"),
    ],
)
def test_a_label_of_another_form_is_a_fault_where_no_labels_are_known(
    faults: Faults, rows: Rows, field: str, label: str, why: str
) -> None:
    rows[2]["judgments"][0][field] = [label]
    assert faults(rows) == [f"3: id 3: 甲: {field} has {label!r}, {why}"]


def test_every_official_label_has_the_form_of_one(faults: Faults, rows: Rows) -> None:
    long = "掩饰、隐瞒犯罪所得、犯罪所得收益罪"
    rows[0]["judgments"][0]["charges"] = [long, "组织、领导、参加黑社会性质组织罪"]
    rows[0]["judgments"][0]["articles"] = ["264", "303-2", "287.2", "133.1-1", "13"]
    assert faults(rows) == []


def test_labels_of_another_form_in_gold_are_no_fault(case: Row, row: Row, write: Write) -> None:
    cases = write("cases.jsonl", [case(1, ("甲", ["盗窃"], ["刑法264"], 8))])
    for labels in (["盗窃"], ["刑法264"]), (["诈骗"], ["刑法266"]):
        path = write("submission.jsonl", [row(1, ("甲", *labels, 8))])
        assert list(check(Reader(TASK), path, cases)) == []


def test_labels_that_no_gold_answer_has_are_named_with_the_nearest_one(
    case: Row, row: Row, write: Write
) -> None:
    """They may be right in another case, so they are no faults."""
    cases = write("cases.jsonl", [case(key, FIRST, ALSO) for key in range(3)])
    others = ("甲", ["盗窃", "抢劫罪"], ["２６４"], 8)
    path = write("submission.jsonl", [row(key, others, ALSO) for key in range(3)])
    notes = Notes()
    faults = list(check(Reader(TASK), path, cases, notes))
    assert len(faults) == 6, "抢劫罪 has the form of a charge"
    assert [*notes.lines(TASK)][1:] == [
        "labels that no gold answer has: 3 × charges '盗窃'; did you mean '盗窃罪'? | "
        "3 × charges '抢劫罪' | 3 × articles '２６４'; did you mean '264'?"
    ]


def test_what_is_noted_of_the_cases_is_no_fault(
    tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    sample = shutil.copytree(task_folders()["dialogue"] / "sample.folder", tmp_path / "cases")
    task = load_task("dialogue")
    with task.data.submission.writing(tmp_path / "submission") as write_row:
        for example in Reader(task).read(sample):
            write_row(task.gold(example))
    emo = sample / "emo/emo_2.json"
    emo.write_text(emo.read_text("utf-8").replace('"1": {', '"9": {'), "utf-8")
    done = panjue("check", tmp_path / "submission", "--cases", sample, "--task", "dialogue")
    assert done.returncode == 0, done.stderr
    noted = "notes on cases: 1, first: id 2: holder 9 says nothing: 1 emotions that no reply can"
    assert done.stdout.splitlines()[0].startswith(noted)


def test_names_that_the_facts_do_not_have_are_counted(case: Row, row: Row, write: Write) -> None:
    cases = write("cases.jsonl", [case(1, FIRST, ALSO), case(2, ("王五", *FIRST[1:]), ALSO)])
    known = [json.loads(line) for line in cases.read_text("utf-8").splitlines()]
    write("cases.jsonl", [{**one, "fact": "甲、乙行窃。"} for one in known])
    path = write("submission.jsonl", [row(1, FIRST, ALSO), row(2, ("王五", *FIRST[1:]), ALSO)])
    notes = Notes()
    assert list(check(Reader(TASK), path, cases, notes)) == []
    told = "1 of 4 names does not occur in their facts, first: id 2, 王五"
    assert list(notes.lines(TASK)) == [told]


def test_invisible_characters_in_labels_are_a_fault(faults: Faults, rows: Rows) -> None:
    """The contest's code knows no such label; in gold they are left out."""
    rows[2]["judgments"][0]["charges"] = ["盗窃罪\u200b"]
    assert faults(rows) == [r"3: id 3: 甲: charges has '盗窃罪\u200b', with invisible characters"]


def test_a_hand_in_of_other_cases_is_one_line_with_the_counts(
    faults: Faults, rows: Rows, row: Row, cases: Path
) -> None:
    others = [row(key, ("丙", *FIRST[1:]), ("丁", *ALSO[1:])) for key in KEYS]
    assert faults(others) == [
        f" names other defendants than {cases} in 4 of 4 cases; id 1 has 甲、乙 there and 丙、丁 "
        "here; are these the right files?"
    ]
    assert len(faults(others[:2] + rows[2:])) > 2, "half of the rows are of these cases"


WORDS = ("dismissal", "positive", "盗窃罪")
VALUES: tuple[Any, ...] = (*WORDS, 0, -1, 1.5, True, None, [], [1], ["盗窃罪"], {})


def altered(value: Any) -> Iterator[Any]:
    """Yield the value with another one in each of its places, and without each of its parts."""
    yield from VALUES
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            rest = value.copy()
            part = rest.pop(key)
            yield rest
            for other in altered(part):
                yield {**value, key: other} if isinstance(value, dict) else [other, *rest]


@pytest.mark.parametrize("name", task_folders())
def test_what_is_clean_can_be_scored(name: str) -> None:
    task = load_task(name)
    [sample] = task_folders()[name].glob("sample.*")
    example = next(Reader(task).read(sample))
    right = task.data.write(example, example.answer or {})
    refused = 0
    for row in altered(right):
        if isinstance(row, dict) and row.get("id") == example.id:
            faults = list(task.data.check(example, row, None)) or [*unscorable(task, example, row)]
            try:
                metric_values(task, task.gold(example), row, "")
            except UserError:
                refused += 1
                assert faults, row
    assert refused > 3


def test_a_word_where_the_file_has_numbers_is_named(write: Write) -> None:
    cases = write("cases.jsonl", [{"text": "Une affaire."}, {"text": "Ein Fall."}])
    path = write("submission.jsonl", [{"id": 1, "label": "dismissal"}, {"id": 2, "label": 0}])
    told = "'label' must be one of 0, 1; found \"dismissal\""
    assert list(check(Reader(load_task("fscs")), path, cases)) == [f"{path}:1: id 1: {told}"]
