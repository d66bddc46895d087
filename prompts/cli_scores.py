"""The commands of `panjue` that read answers: scores, comparisons, reports, faults."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from panjue.prompts.labels import load_labels
from panjue.prompts.options import (
    Embeddings,
    JudgeName,
    OnBad,
    OptionalTask,
    SubmissionPath,
    protect_inputs,
    submission_of,
)
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256, write_json
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import comparing, load_task

app = typer.Typer()

JsonPath = Annotated[Path | None, typer.Option(help="also write the numbers here")]

GoldPath = Annotated[Path | None, typer.Option(help="default: the test file that was answered")]


@app.command()
def score(
    gold: Path,
    submission: SubmissionPath,
    task: OptionalTask = None,
    json: JsonPath = None,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
    on_bad_row: OnBad = "stop",
) -> None:
    """Score SUBMISSION against GOLD by the task's official metric."""
    from panjue.eval.score import score as compute
    from panjue.eval.score import show

    submission, name, note = submission_of(submission, gold, task)
    task_used = comparing(load_task(name), embeddings, judge)
    reader = Reader(task_used, on_bad_row=on_bad_row)
    with protect_inputs(reader.skipped, json, inputs=(gold, submission), note=note):
        scores = compute(reader, gold, submission)
    show(scores, Console())
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        skipped = {"skipped_rows": len(reader.skipped.rows)}
        digest = sha256(task_used.data.submission.find(submission))
        write_json(json, {**scores.to_json(), **skipped, "submission_sha256": digest})


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="a run folder")],
    second: Annotated[Path, typer.Argument(help="another run of the same cases")],
    gold: GoldPath = None,
    json: JsonPath = None,
) -> None:
    """Compare two runs: metrics, SECOND minus FIRST, and the cases won and lost."""
    from panjue.eval.answers import open_answers
    from panjue.eval.compare import check_runs, compare_runs, show_runs

    first_run, run = open_answers(first, gold), open_answers(second, gold)
    check_runs(first_run, run, same_file=gold is None)
    with protect_inputs(run.reader.skipped, json, inputs=(first, second, run.test)):
        comparison = compare_runs(run.reader, run.test, first_run.folder, run.folder)
    show_runs(comparison, (first, second), Console())
    if run.reader.skipped.rows:
        print(run.reader.skipped)
    if json:
        write_json(json, comparison.to_json())


@app.command()
def report(run: Path, gold: GoldPath = None) -> None:
    """Write a page on RUN: scores, errors and every case; and its model card."""
    from panjue.eval.report_page import main

    main(run, gold)


@app.command()
def fairness(
    gold: Path,
    submission: SubmissionPath,
    by: Annotated[str, typer.Option(help="attributes, separated by commas")],
    task: OptionalTask = None,
    groups: Annotated[Path | None, typer.Option(help="JSONL: id and further groups")] = None,
    json: JsonPath = None,
) -> None:
    """Report the headline metric by groups: mean, disparity, worst group, gap, possible causes."""
    from panjue.eval.fairness import fairness as compute
    from panjue.eval.fairness import show

    submission, name, note = submission_of(submission, gold, task)
    reader = Reader(load_task(name), side_groups(groups))
    attributes = [name.strip() for name in by.split(",") if name.strip()]
    with protect_inputs(reader.skipped, json, inputs=(gold, submission, groups), note=note):
        result = compute(reader, gold, submission, attributes)
    show(result, Console())
    if json:
        write_json(json, result.to_json())


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(help="a submission or its run folder; without --cases, cases")
    ],
    cases: Annotated[Path | None, typer.Option(help="the test file of the submission")] = None,
    labels: Annotated[Path | None, typer.Option(help="a labels.json: reject other labels")] = None,
    task: OptionalTask = None,
    on_bad_row: OnBad = "stop",
) -> None:
    """Print every fault of a submission or a file of cases, with its place; exit code 1 if any."""
    from panjue.eval.check import check as find_faults
    from panjue.eval.check_cases import check_cases

    if cases is None and (labels or on_bad_row == "skip"):
        raise UserError("--labels, --on-bad-row: are for a submission; add --cases CASES")
    label_sets = load_labels(labels) if labels else None
    faults = 0
    file, name, note = submission_of(file, cases, task)
    reader = Reader(load_task(name), on_bad_row=on_bad_row)
    with protect_inputs(reader.skipped, inputs=(), note=note):
        if cases is None:
            result = check_cases(reader, file)
            faults = len(result.faults)
            print(*result.lines(), sep="\n")
        else:
            for fault in find_faults(reader, file, cases, label_sets):
                print(fault)
                faults += 1
    if reader.skipped.rows:
        print(reader.skipped)
    print(f"{file}: {faults} faults" if faults else f"{file}: clean")
    raise typer.Exit(1 if faults else 0)
