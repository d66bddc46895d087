"""Two runs side by side: a difference that is known is found, and nothing where there is none."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from rich.console import Console

from panjue.eval.compare import check_runs, compare_runs, show_runs
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.answers import open_answers
from tests.records import Row, Write, write_answers

TASK = load_task("judgment")
DAMAGED = 30


@pytest.fixture(scope="module")
def runs(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a run that answers the real dev cases as gold, and its copy, damaged at 30 cases."""
    folder, gold = tmp_path_factory.mktemp("runs"), real_data / "drdz/dev.jsonl"
    rows = [dict(TASK.gold(example)) for example in Reader(TASK).read(gold)]
    write_run(folder / "good", gold, rows)
    wrong = {"charges": ["不存在罪"], "articles": ["9999"]}  # the penalty stays right
    for row in rows[:DAMAGED]:
        row["judgments"] = [{**one, **wrong} for one in row["judgments"]]
    write_run(folder / "damaged", gold, rows)
    return folder / "good", folder / "damaged"


def write_run(folder: Path, gold: Path, rows: list[Any]) -> None:
    Labels().save(folder)
    write_answers(folder, gold)
    (folder / "submission.jsonl").write_text("".join(dump(row) + "\n" for row in rows), "utf-8")


def test_a_known_difference_is_found(runs: tuple[Path, Path], real_data: Path) -> None:
    gold = real_data / "drdz/dev.jsonl"
    found = compare_runs(Reader(TASK), gold, *runs)
    weights = [TASK.score.weight(example) for example in Reader(TASK).read(gold)]
    lost = -0.6 * sum(weights[:DAMAGED]) / sum(weights)
    difference = found.differences["final"]
    # Where gold itself has no label the official F1 is 0 in both runs, and less is lost.
    assert difference.mean == pytest.approx(lost, abs=0.002)
    assert difference.low < lost < difference.high < 0
    assert found.differences["penalty_accuracy"].mean == 0
    assert difference.first + difference.mean == pytest.approx(difference.second)
    ids = [example.id for example in Reader(TASK).read(gold)]
    assert found.examples == 285
    assert found.won == []
    assert set(found.lost) == set(ids[:DAMAGED])
    same = compare_runs(Reader(TASK), gold, runs[1], runs[1])
    assert all((d.mean, d.low, d.high) == (0, 0, 0) for d in same.differences.values())


def test_the_command_prints_the_differences_and_the_cases_won_and_lost(
    runs: tuple[Path, Path], panjue: Callable[..., CompletedProcess[str]]
) -> None:
    good, damaged = runs
    done = panjue("compare", good, damaged)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "damaged against good: 0 examples won, 30 lost, 255 alike" in said
    assert "┃ good ┃ damaged ┃ second - first ┃" in said
    *_, counts, lost = done.stdout.splitlines()
    assert counts.endswith("alike"), "nothing was won, so that there is no such line"
    assert lost.startswith("lost, the largest change first: ")
    assert lost.count(",") == DAMAGED


def test_the_ids_won_and_lost_are_in_the_order_of_what_they_change(
    case: Row, row: Row, write: Write, tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    right = (["盗窃罪"], ["264"], 13)
    no_penalty = (["盗窃罪"], ["264"], 5)  # 0.4 less
    no_charge = (["诈骗罪"], ["264"], 13)  # 0.3 less
    nothing = (["诈骗罪"], ["266"], 5)
    pairs = {"一": (no_charge, right), "二": (nothing, right), "三": (no_charge, no_penalty)}
    pairs |= {"四": (right, no_charge), "五": (right, nothing), "六": (right, right)}
    gold = write("gold.jsonl", [case(i, ("甲", *right), ("乙", *right)) for i in pairs])
    folders = []
    for number in (0, 1):
        folder = tmp_path / "runs" / f"[b]{number}" / "answers/test"  # no markup
        Labels().save(folder)
        write_answers(folder, gold)
        told = [row(i, ("甲", *of[number]), ("乙", *right)) for i, of in pairs.items()]
        write(str(folder / "submission.jsonl"), told)
        folders.append(folder)
    lines = panjue("compare", *folders).stdout.splitlines()
    assert lines[-3:] == [
        "[b]1/test against [b]0/test: 2 examples won, 3 lost, 1 alike",
        "won, the largest change first: 二, 一",
        "lost, the largest change first: 五, 四, 三",
    ]
    assert "[b]0/test" in "".join(lines[1:3])
    alike = tmp_path / "other/[b]0/answers/test"
    shutil.copytree(folders[0], alike)
    assert (
        panjue("compare", folders[0], alike)
        .stdout.splitlines()[-1]
        .startswith(f"{alike} against {folders[0]}: 0 examples won")
    ), "of one name the paths tell them apart"


def test_runs_of_other_cases_cannot_be_compared(
    runs: tuple[Path, Path], tmp_path: Path, real_data: Path
) -> None:
    lines = (runs[0] / "submission.jsonl").read_text("utf-8").splitlines()
    part = tmp_path / "part.jsonl"
    part.write_text("\n".join(lines[:100]) + "\n", "utf-8")
    for pair in ((runs[0], part), (part, runs[0])):
        with pytest.raises(UserError, match=r": 185 are in only one, id \d+ .* no fair comp"):
            compare_runs(Reader(TASK), real_data / "drdz/dev.jsonl", *pair)


def test_cases_that_count_for_nothing_are_not_alike(case: Row, row: Row, write: Write) -> None:
    """Of one defendant each: they differ, but have weight 0."""
    theft = (["盗窃罪"], ["264"], 11)
    lone = [case(n, ("甲", *theft)) for n in range(25)]
    both = [case(n, ("甲", *theft), ("乙", *theft)) for n in (25, 26)]
    gold = write("gold.jsonl", [*lone, *both])
    right = [row(n, ("甲", *theft)) for n in range(25)] + [row(25, ("甲", *theft)), row(26)]
    wrong = [row(n) for n in range(27)]
    first = write("first.jsonl", right)
    second = write("second.jsonl", wrong)
    found = compare_runs(Reader(TASK), gold, first, second)
    assert (found.won, found.lost, found.alike) == ([], [25], 1)
    assert (found.examples, found.counted) == (27, 2)
    out = StringIO()
    show_runs(found, "a", "b", Console(file=out, width=200))
    said = "0 examples won, 1 lost, 1 alike; 25 have weight 0 and count for nothing"
    assert said in out.getvalue()
    only = write("only.jsonl", [case(n, ("甲", *theft)) for n in range(2)])
    paths = [write(f"{n}.jsonl", rows[:2]) for n, rows in enumerate((right, wrong))]
    found = compare_runs(Reader(TASK), only, *paths)
    assert (found.lost, found.alike, found.counted) == ([0, 1], 0, 2), (
        "all have weight 0: all count"
    )


def test_the_order_of_additions_is_no_change(case: Row, row: Row, write: Write) -> None:
    names = "甲乙丙丁戊"
    gold = write("gold.jsonl", [case(1, *((n, ["甲罪", "乙罪"], ["1"], 11) for n in names))])
    told = [["甲罪"], ["甲罪", "丙罪"], ["甲罪", "乙罪"], ["丙罪"], ["甲罪", "乙罪", "丙罪"]]
    paths = []
    for number, order in enumerate((told, told[::-1])):
        judgments = [(name, of, ["1"], 11) for name, of in zip(names, order, strict=True)]
        paths.append(write(f"{number}.jsonl", [row(1, *judgments)]))
    found = compare_runs(Reader(TASK), gold, *paths)
    back = compare_runs(Reader(TASK), gold, *paths[::-1])
    assert (found.won, found.lost, back.won, back.lost) == ([], [], [], [])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"task": "severity"}, "runs of two tasks, judgment and severity"),
        ({"test_sha256": "0"}, "answered two test files"),
    ],
)
def test_runs_that_were_asked_different_things_cannot_be_compared(
    runs: tuple[Path, Path], change: dict[str, str], told: str
) -> None:
    first = open_answers(runs[0])
    other = replace(first.answers, record=first.record.model_copy(update=change))
    second = replace(first, answers=other)
    with pytest.raises(UserError, match=told):
        check_runs(first, second)
