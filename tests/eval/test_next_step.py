"""The last lines of `decode`, `generate` and `score`, and scores of cases that were fitted on."""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.prompts.example import Example
from panjue.prompts.plumbing.files import read_json, sha256, write_json
from panjue.prompts.reader import is_held_out

from .test_tune import GOLD, make_run

Row = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
Panjue = Callable[..., CompletedProcess[str]]


def change(run: Path, **changes: object) -> None:
    made = read_json(run / "manifest.json")["generate"]
    write_json(run / "manifest.json", {"generate": {**made, **changes}})


def last_line(done: CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return str(done.stdout.splitlines()[-1])


def follow(panjue: Panjue, line: str) -> CompletedProcess[str]:
    """Run the command that a line gives, as it is printed."""
    word, command, *rest = shlex.split(line)
    assert (word, command) == ("next:", "panjue")
    return panjue(*rest)


def test_each_command_names_the_next_which_works_as_printed(
    case: Row, write: Write, tmp_path: Path, panjue: Panjue
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    change(run, trained_sha256="that of the adapter")
    line = last_line(panjue("decode", run))
    assert line == f"next: panjue score {tmp_path}/cases.jsonl {run}"
    line = last_line(follow(panjue, line))
    assert line == f"next: panjue report {run}"
    other = tmp_path / "other name.jsonl"
    other.write_text("// gold\n" + (tmp_path / "cases.jsonl").read_text("utf-8"), "utf-8")
    line = last_line(panjue("score", other, run))
    assert line == f"next: panjue report {run} --gold '{other}'"
    assert follow(panjue, line).returncode == 0
    told = panjue("score", write("less.jsonl", [case(0, *GOLD)]), run)
    assert "next:" not in told.stdout, "a report wants gold of all cases"
    told = panjue("score", other, run / "submission.jsonl")
    assert "next:" not in told.stdout


def test_answers_without_gold_are_checked(
    case: Row, write: Write, tmp_path: Path, panjue: Panjue
) -> None:
    run = make_run(case, write, tmp_path, gold=False)
    line = last_line(panjue("decode", run))
    assert line == f"next: panjue check {run} --cases {tmp_path}/cases.jsonl"
    assert follow(panjue, line).stdout == f"{run}: clean\n"
    change(run, on_bad_row="skip")
    assert last_line(panjue("decode", run)).endswith("cases.jsonl --on-bad-row skip")


@pytest.mark.parametrize(
    ("made", "remark"),
    [
        ({}, "these cases were trained on (all but a tenth): {trained} was trained on {test}"),
        ({"held_out": True}, None),
        ({"adapter": "none"}, None),
        ({"test_sha256": "another"}, None),
    ],
)
def test_a_score_of_cases_that_were_trained_on_says_so(
    made: Mapping[str, object],
    remark: str | None,
    case: Row,
    write: Write,
    tmp_path: Path,
    panjue: Panjue,
) -> None:
    run, test = make_run(case, write, tmp_path, gold=True), tmp_path / "cases.jsonl"
    panjue("decode", run)
    write_json(tmp_path / "adapter/manifest.json", {"train_sha256": sha256(test)})
    change(run, **made)
    json_file = tmp_path / "scores.json"
    done = panjue("score", test, run, "--json", json_file)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    if remark is None:
        assert "trained on" not in shown
        assert "in_sample" not in read_json(json_file)
        return
    text = remark.format(trained=tmp_path / "adapter", test=test)
    assert f"{text}; expect lower scores on other cases" in shown
    assert read_json(json_file)["in_sample"] == text


def test_a_score_of_cases_that_the_decision_rule_was_fitted_on_says_so(
    case: Row, write: Write, tmp_path: Path, panjue: Panjue
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    panjue("tune", run)
    panjue("decode", run)
    done = panjue("score", tmp_path / "cases.jsonl", run)
    assert (
        f"the decision rule was fitted on these cases: {tmp_path}/adapter/decision.json; "
        "expect lower scores on other cases"
    ) in " ".join(done.stdout.split())


def test_after_answers_to_held_out_cases_comes_the_fit_and_then_the_report(
    case: Row, write: Write, tmp_path: Path, panjue: Panjue
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    rows = [case(i, *GOLD) | {"fact": f"事实{i}。"} for i in range(60)]
    asked = [row["id"] for row in rows if is_held_out(Example(row["id"], row["fact"]))]
    test = write("cases.jsonl", rows)
    first = json.loads((run / "completions.jsonl").read_text("utf-8").splitlines()[0])
    write("run/completions.jsonl", [{**first, "id": key} for key in asked])
    change(run, test_sha256=sha256(test), held_out=True)
    line = last_line(panjue("decode", run))
    assert line == f"next: panjue tune {run}"
    assert follow(panjue, line).returncode == 0
    assert last_line(panjue("decode", run)) == f"next: panjue report {run}"
