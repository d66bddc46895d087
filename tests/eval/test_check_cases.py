"""A file of cases is checked to its end, and counted."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from panjue.eval.check import check_cases
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from tests.eval.records import Row, Write

READER = Reader(load_task("judgment"))
THEFT, FRAUD = (["盗窃罪"], ["264"], 8), (["诈骗罪", "盗窃罪"], ["266"], 10)
NAMES = "'defendants' must list the defendants' names, one or more, each once"


Panjue = Callable[..., CompletedProcess[str]]


@pytest.fixture
def cases(case: Row, write: Write) -> Path:
    """Return three good cases, one of them without gold, and four bad rows."""
    rows = [
        case(1, ("甲", *THEFT), ("乙", *FRAUD)),
        {**case(2, ("丙", *THEFT)), "fact": ""},
        case(3, ("丙", *THEFT), gold=False),
        case(1, ("丙", *THEFT)),
        {**case(5, ("丙", *THEFT)), "defendants": []},
        {**case(6, ("丙", *THEFT)), "fact": "丙盗窃。"},
        [],
    ]
    return write("cases.jsonl", rows)


def test_every_bad_row_is_named_and_everything_else_is_counted(cases: Path, panjue: Panjue) -> None:
    done = panjue("check", cases)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"{cases}:2: 'fact' must be a text that is not empty",
        f"{cases}:4: id 1 is already used at 1",
        f"{cases}:5: {NAMES}",
        f"{cases}:7: expected a JSON object, found list",
        "cases: 3, 2 with a gold answer, 1 without",
        "cases by defendants: 1: 2, 2: 1",
        "charges: 2 different, 4 in all; 盗窃罪: 3, 诈骗罪: 1",
        "articles: 2 different, 3 in all; 264: 2, 266: 1",
        f"penalty: 2 different, 3 in all; {PENALTIES[8]}: 2, {PENALTIES[10]}: 1",
        f"{cases}: 4 faults",
    ]


def test_gold_that_training_refuses_is_counted(case: Row, write: Write) -> None:
    rows = [
        case(1, ("甲", *THEFT)),
        case(2, ("甲", [], ["264"], 8)),
        case(3, ("甲", ["盗窃罪"], [], 8)),
    ]
    [line] = [
        line
        for line in check_cases(READER, write("cases.jsonl", rows))[1]
        if "training refuses" in line
    ]
    assert line.startswith("2 gold answers that training refuses; the first: 2: ")


def test_many_labels_are_counted_and_the_most_frequent_shown(case: Row, write: Write) -> None:
    rows = [case(n, ("甲", [f"罪{n:02}", "盗窃罪"], ["264"], 8)) for n in range(20)]
    _, lines = check_cases(READER, write("cases.jsonl", rows))
    [charges] = [line for line in lines if line.startswith("charges")]
    assert charges.startswith("charges: 21 different, 40 in all; 盗窃罪: 20, 罪00: 1, 罪01: 1")
    assert charges.endswith("罪13: 1, 6 others")


def test_a_submission_is_no_file_of_cases(row: Row, write: Write, panjue: Panjue) -> None:
    path = write("submission.jsonl", [row(1, ("甲", *THEFT)), row(2, ("乙", *FRAUD))])
    done = panjue("check", path)
    assert done.returncode == 2
    assert (done.stdout, done.stderr) == (
        "",
        f"panjue: {path}: no row is a case; the first, 1: 'fact' must be a text that is not empty; "
        "its fields are id, judgments; a case has id, fact, defendants, outcomes; to check a "
        "submission, add --cases CASES (read as task 'judgment': is that right?)\n",
    )
    write_json(path.parent / "manifest.json", {"task": "judgment"})
    done = panjue("check", path.parent)
    assert done.returncode == 2
    assert f"{path.parent}: is a run folder; to check a submission, add --cases" in done.stderr


def test_a_file_without_cases_is_named(tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").touch()
    with pytest.raises(UserError, match=r"cases\.jsonl: has no cases$"):
        check_cases(READER, tmp_path / "cases.jsonl")


@pytest.mark.parametrize("name", task_folders())
def test_the_sample_of_every_task_is_clean(name: str) -> None:
    task = load_task(name)
    for sample in sorted(task_folders()[name].glob("sample.*")):
        examples = list(Reader(task).read(sample))
        faults, counts = check_cases(Reader(task), sample)
        assert faults == []
        assert counts[0].startswith(f"cases: {len(examples)}, ")
        assert len(counts) >= 1 + len(task.ask.labels(examples).counts)
