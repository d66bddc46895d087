"""The commands of `panjue` that read answers: scores, comparisons, reports, faults."""

from dataclasses import replace
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
    guarded,
    task_of,
)
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import answers_in, atomic_write, sha256, write_json
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import comparing, load_task

app = typer.Typer()


@app.command()
def score(
    gold: Path,
    submission: SubmissionPath,
    task: OptionalTask = None,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    against: Annotated[
        Path | None, typer.Option(help="another submission: print differences and their certainty")
    ] = None,
    out_of_domain: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="GOLD SUBMISSION", help="of another domain: its scores and the mean"),
    ] = None,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
    on_bad_row: OnBad = "stop",
) -> None:
    """Score SUBMISSION against GOLD by the task's official metric."""
    from panjue.eval import compare
    from panjue.eval.leaderboard import leaderboard_line
    from panjue.eval.next_step import after_scores
    from panjue.eval.score import domain_means, show
    from panjue.eval.score import score as compute

    submission = answers_in(submission, gold)
    name, note = task_of(task, submission)
    task_used = comparing(load_task(name), embeddings, judge)
    reader = Reader(task_used, on_bad_row=on_bad_row)
    console = Console()
    files = (gold, submission, against, *(out_of_domain or ()))
    with guarded(reader.skipped, json, inputs=files, note=note):
        scores = compute(reader, gold, submission)
        other_scores = None
        if out_of_domain:
            other_gold, other = out_of_domain
            other_scores = compute(reader, other_gold, answers_in(other, other_gold))
        against = against and answers_in(against, gold)
        differences = compare.compare(reader, gold, submission, against) if against else {}
    show(scores, console)
    numbers = scores.to_json()
    if against:
        compare.show(differences, against, console, scores.compared_by)
        numbers["against"] = {name: vars(d) for name, d in differences.items()}
    if other_scores:
        console.print("\nout of domain:")
        show(other_scores, console)
        numbers["out_of_domain"] = other_scores.to_json()
        numbers["domain_means"] = domain_means(scores, other_scores)
        for name, mean in numbers["domain_means"].items():
            console.print(f"{name}, mean of both domains: {mean:.4f}")
    numbers["skipped_rows"] = len(reader.skipped.rows)
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        numbers["submission_sha256"] = sha256(task_used.data.submission.find(submission))
        write_json(json, numbers)
    if line := leaderboard_line(scores, submission, task_used):
        print(f"for a leaderboard: {line}")
    is_of_gold = not scores.missing and not scores.extra_rows
    if is_of_gold and (command := after_scores(submission, gold)):
        print(f"next: {command}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="a run folder")],
    second: Annotated[Path, typer.Argument(help="another run of the same cases")],
    gold: Annotated[Path | None, typer.Option(help="default: the test file of both runs")] = None,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    fail_if_worse: Annotated[
        bool, typer.Option(help="exit code 1 if SECOND has the lower headline metric")
    ] = False,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
) -> None:
    """Compare two runs: metrics, SECOND minus FIRST, and the cases won and lost."""
    from panjue.eval.answers import open_run
    from panjue.eval.compare import check_runs, compare_runs, show_runs

    first_run, run = open_run(first, gold), open_run(second, gold)
    check_runs(first_run, run, same_file=gold is None)
    reader = replace(run.reader, task=comparing(run.task, embeddings, judge))
    with guarded(reader.skipped, json, inputs=(first, second, run.test)):
        comparison = compare_runs(reader, run.test, first_run.folder, run.folder)
    show_runs(comparison, (first, second), Console())
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        write_json(json, comparison.to_json())
    raise typer.Exit(1 if fail_if_worse and comparison.is_worse else 0)


@app.command()
def report(
    run: Path,
    gold: Annotated[Path | None, typer.Option(help="default: the test file of RUN")] = None,
    html: Annotated[Path | None, typer.Option(help="default: RUN/report.html")] = None,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
) -> None:
    """Write a page on RUN: scores, errors and every case; and its model card."""
    from panjue.eval.report_page import main

    main(run, gold, html, embeddings, judge)


@app.command()
def fairness(
    gold: Path,
    submission: SubmissionPath,
    by: Annotated[str, typer.Option(help="attributes, separated by commas")],
    task: OptionalTask = None,
    groups: Annotated[Path | None, typer.Option(help="JSONL: id and further groups")] = None,
    train: Annotated[
        Path | None, typer.Option(help="the training file; default: that of the run folder")
    ] = None,
    train_groups: Annotated[Path | None, typer.Option(help="--groups of the training file")] = None,
    metric: Annotated[str | None, typer.Option(help="default: the task's headline")] = None,
    min_n: Annotated[int, typer.Option(min=1, help="flag groups with fewer examples")] = 20,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    html: Annotated[Path | None, typer.Option(help="also write a page with plots here")] = None,
    on_bad_row: OnBad = "stop",
) -> None:
    """Report a metric by groups: mean, disparity, worst group, gap and possible causes."""
    from panjue.eval.fairness import report
    from panjue.eval.fairness_page import page, show

    submission = answers_in(submission, gold)
    name, note = task_of(task, submission)
    reader = Reader(load_task(name), side_groups(groups), on_bad_row=on_bad_row)
    attributes = [name.strip() for name in by.split(",") if name.strip()]
    files = (gold, submission, groups, train, train_groups)
    with guarded(reader.skipped, json, html, inputs=files, note=note):
        result = report(
            name,
            reader,
            gold,
            submission,
            attributes,
            train=train,
            train_groups=train_groups,
            metric=metric,
            min_n=min_n,
        )
    show(result, Console())
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        write_json(json, result.to_json())
    if html:
        with atomic_write(html) as out:
            out.write(page(result))
        print(f"written: {html}")


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
    file = answers_in(file, cases)
    name, note = task_of(task, file)
    reader = Reader(load_task(name), on_bad_row=on_bad_row)
    with guarded(reader.skipped, inputs=(), note=note):
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
