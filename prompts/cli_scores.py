"""The commands of `panjue` that read answers: score, compare, report, check and others.

GOLD is the file with the gold answers. It is the test file itself, or another file with the same
cases. In a block `reader.explaining()`, an error also says which bad rows were skipped before.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console

from panjue.prompts.columns import check_columns, columns_of_words
from panjue.prompts.plumbing.errors import UserError, printable
from panjue.prompts.plumbing.files import sha256, write_json
from panjue.prompts.plumbing.ours import are_scores, check_output
from panjue.prompts.plumbing.records import MANIFEST, SCORES
from panjue.prompts.plumbing.run import ANSWERS, find_answers
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import load_task

if TYPE_CHECKING:
    from panjue.eval.score import ScoreResult
    from panjue.serve.answers import Answered

app = typer.Typer()

JsonPath = Annotated[Path | None, typer.Option(help="also write the numbers here")]
GoldPath = Annotated[Path | None, typer.Option(help="default: the test file that was answered")]
SubmissionPath = Annotated[Path, typer.Argument(help="a submission, or its run folder")]
OptionalTask = Annotated[
    str | None, typer.Option(help="default: that of the run folder, else judgment")
]
OwnColumns = Annotated[
    list[str] | None,
    typer.Option(help="NAME=COLUMN, e.g. fact=content; default: those of the run; repeatable"),
]


class OpenedSubmission(NamedTuple):
    """The submission that the arguments of a command name, and how to read it."""

    submission: Path  # or the folder of answers that contains it
    reader: Reader  # of the task; treats bad rows as the run did
    answered: "Answered | None"  # None for a submission outside a run


def submission_of(
    path: Path, gold: Path, task: str | None, own_columns: Sequence[str] | None = None
) -> OpenedSubmission:
    """Open a submission, a folder of answers, or a run folder with answers to `gold`.

    `submission` of the result is `path` if that is itself a submission (a file, or a folder in
    tasks whose submissions are folders). Otherwise it is the folder of answers that is found.
    """
    from panjue.serve.answers import read_answers, sha256_of_cases, with_cases

    if path.is_file() and ((gold / ANSWERS).is_dir() or (gold / MANIFEST).is_file()):
        # The arguments are swapped. The message repeats them in the right order.
        raise UserError(f"{gold}: has answers; the file of cases comes first: {path} {gold}")
    digest = sha256_of_cases(gold)
    folder = find_answers(path, gold, digest)
    if folder is None:
        reader = Reader(load_task(task or "judgment"), task_is_guessed=task is None)
        return OpenedSubmission(path, with_columns(reader, own_columns), None)
    answers = read_answers(folder)
    record = answers.record
    if task not in (None, record.task):
        raise UserError(f"{folder}: is a run of the task {record.task!r}, not {task!r}")
    answered = with_cases(answers, gold, digest)
    answered = replace(answered, reader=with_columns(answered.reader, own_columns))
    is_submission = not path.is_dir() or answered.task.data.submission.is_one(path)
    submission = path if is_submission else folder
    return OpenedSubmission(submission, answered.reader, answered)


def with_columns(reader: Reader, words: Sequence[str] | None) -> Reader:
    """Return a reader for a file with the names of columns that `--columns` gives."""
    columns = {**reader.columns, **columns_of_words(words or ())}
    check_columns(reader.task.data, columns)
    return replace(reader, columns=columns)


def say_changes(answered: "Answered | None") -> None:
    """Print how training, labels or submission have changed since the cases were answered."""
    from panjue.serve.decoding import edited

    if answered is None:
        return
    submission = answered.task.data.submission.find(answered.folder)
    for line in filter(None, (answered.changed, edited(submission))):
        print(printable(line))


@app.command()
def score(
    gold: Path,
    submission: SubmissionPath,
    task: OptionalTask = None,
    json: JsonPath = None,
    labels: Annotated[
        list[Path] | None,
        typer.Option(help="the only labels that count, as in a stage of the contest; repeatable"),
    ] = None,
    columns: OwnColumns = None,
) -> None:
    """Score SUBMISSION against GOLD by the task's official metric."""
    from panjue.eval.score import score as compute
    from panjue.eval.show_scores import show
    from panjue.finetune.card import update_card
    from panjue.serve.answers import DEMO_ANSWERED
    from panjue.serve.decoding import decoding_of

    submission, reader, answered = submission_of(submission, gold, task, columns)
    check_output(json)
    with reader.explaining():
        scores = compute(reader, gold, submission, answered, labels or ())
    if answered:
        print(f"scores of {answered.folder}")
    show(scores, Console())
    if answered and answered.answers.is_of_demo:
        print(DEMO_ANSWERED)
    reader.skipped.show()
    scored = reader.task.data.submission.find(submission)
    skipped = {"skipped_rows": len(reader.skipped.rows)}
    made = {"submission_sha256": sha256(scored), "panjue": panjue_version()}
    numbers = {**scores.to_json(), **skipped, **made}
    if json:
        write_json(json, numbers, is_ours=are_scores)  # it may only replace earlier scores
    # A run keeps only scores by all labels, and only of a submission as its decoding wrote it.
    if answered is None or labels or decoding_of(scored) is None:
        return
    if reason := not_of_test(answered, scores):
        print(printable(f"these scores are not kept as those of {answered.record.test}: {reason}"))
    elif os.access(answered.folder, os.W_OK):  # another user's run can be scored, too
        write_json(answered.folder / SCORES, {**numbers, "gold_sha256": answered.test_sha256})
        if answered.trained:
            update_card(answered.trained)


def not_of_test(answered: "Answered", scores: "ScoreResult") -> str:
    """Return why scores by GOLD are not valid for the run's test file; empty if they are valid.

    GOLD must have exactly the cases that were answered. It must be the test file itself, or add
    gold answers to a test file without any: a test file with gold answers may have different ones.
    If the test file is gone, it is taken to have none.
    """
    from panjue.serve.answers import with_cases

    if scores.missing or scores.not_in_gold:
        # `examples` are the cases of GOLD, and `missing` those without an answer.
        n_answered = scores.total.examples - scores.missing + scores.not_in_gold
        return f"{answered.test} has {scores.total.examples} cases, and {n_answered} were answered"
    if left_out := answered.left_out():
        return left_out
    if answered.is_answered_file:  # GOLD is the test file itself
        return ""
    try:
        first_of_test = next(with_cases(answered.answers).examples())
    except UserError:  # the test file is gone
        return ""
    if first_of_test.answer is not None:
        return f"it has outcomes of its own, and {answered.test} has others"
    return ""


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="a run folder")],
    second: Annotated[Path, typer.Argument(help="another run of the same cases")],
    gold: GoldPath = None,
) -> None:
    """Compare two runs: SECOND minus FIRST for each metric, and the cases won and lost."""
    from panjue.eval.compare import check_runs, compare_runs, names_of, show_runs
    from panjue.serve.answers import check_complete, open_answers

    first_run = open_answers(first, gold)
    second_run = open_answers(second, gold)
    reader = second_run.reader
    check_runs(first_run, second_run, same_file=gold is None)
    say_changes(first_run)
    say_changes(second_run)
    if gold:  # refuse a file that is not of the answered cases
        check_complete(first_run)
        check_complete(second_run)
    with reader.explaining():
        result = compare_runs(reader, second_run.test, first_run.folder, second_run.folder)
    show_runs(result, *names_of(first_run, second_run), Console())
    reader.skipped.show()


@app.command()
def vote(
    test: Annotated[Path, typer.Argument(help="the file of cases that all runs have answered")],
    out: Annotated[Path, typer.Argument(help="folder for the answers of the vote")],
    runs: Annotated[list[Path], typer.Argument(help="run folders, or folders of answers")],
) -> None:
    """Let the answers of several trainings vote on each field of each person, without an engine."""
    from panjue.eval.vote import vote as write_vote

    for line in write_vote([answers_of_voter(run, test) for run in runs], out):
        print(printable(line))
    print(f"next: {shlex.join(['panjue', 'check', str(out), '--cases', str(test)])}")


def answers_of_voter(run: Path, test: Path) -> "Answered":
    """Open the answers of a run to TEST, for a vote; UserError: the run has none."""
    from panjue.serve.answers import read_answers, sha256_of_cases, with_cases

    digest = sha256_of_cases(test)
    folder = find_answers(run, test, digest)
    answers = read_answers(folder) if folder else None
    if answers is None or answers.record.test_sha256 != digest:
        raise UserError(f"{run}: has no answers to {test}; make them: panjue generate {run} {test}")
    return with_cases(answers, test, digest)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="with run folders, or one of them")] = Path("runs"),
) -> None:
    """List the trainings in FOLDER with base, method, loss, and scores for each test file."""
    from panjue.eval.runs import list_runs, show_listing

    show_listing(list_runs(folder))


@app.command()
def report(run: Path, gold: GoldPath = None) -> None:
    """Write a page about RUN with scores, errors and every case."""
    from panjue.eval.report import write_page
    from panjue.serve.answers import check_complete, open_answers

    answered = open_answers(run, gold)
    if gold:
        check_complete(answered)
    write_page(answered)


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="a run folder, or a folder of answers")],
    key: Annotated[str, typer.Argument(metavar="ID", help="of a case")],
    person: Annotated[str | None, typer.Option(metavar="NAME", help="default: all")] = None,
) -> None:
    """Say why ID was answered so: who answered, likeliest labels, words for and against."""
    from panjue.eval.explain import explain as lines
    from panjue.serve.answers import open_answers

    answered = open_answers(run)
    say_changes(answered)
    for line in lines(answered, key, person):
        print(printable(line))


@app.command()
def fairness(
    gold: Path,
    submission: SubmissionPath,
    by: Annotated[str, typer.Option(help="attributes, separated by commas")],
    task: OptionalTask = None,
    groups: Annotated[Path | None, typer.Option(help="JSONL: id and further groups")] = None,
    json: JsonPath = None,
    columns: OwnColumns = None,
) -> None:
    """Compute the headline metric for groups of cases; print mean, disparity, worst group, gap."""
    from panjue.eval.fairness import fairness as compute
    from panjue.eval.fairness import show_fairness

    submission, reader, answered = submission_of(submission, gold, task, columns)
    reader = replace(reader, side=side_groups(groups))
    attributes = [name.strip() for name in by.split(",") if name.strip()]
    check_output(json)
    with reader.explaining():
        result = compute(reader, gold, submission, attributes)
    show_fairness(result, Console())
    say_changes(answered)
    reader.skipped.show()
    if json:
        numbers = {**result.to_json(), "panjue": panjue_version()}
        # It may only replace numbers of `score` or `fairness`, which have the keys of scores.
        write_json(json, numbers, is_ours=are_scores)


@app.command()
def check(
    submission: SubmissionPath,
    cases: Annotated[Path, typer.Option(help="the test file that it answers")],
    task: OptionalTask = None,
    columns: OwnColumns = None,
    labels: Annotated[
        list[Path] | None,
        typer.Option(help="the only labels there are; default: labels.json beside it; repeatable"),
    ] = None,
) -> None:
    """Print every fault of SUBMISSION with its place; exit with code 1 if there are any."""
    from panjue.eval.check import Notes
    from panjue.eval.check import check as find_faults

    submission, reader, answered = submission_of(submission, cases, task, columns)
    say_changes(answered)
    faults = 0
    notes = Notes()
    with reader.explaining():
        for fault in find_faults(reader, submission, cases, notes, labels or ()):
            print(printable(fault))
            faults += 1
        if left_out := answered.left_out() if answered else "":
            print(printable(f"{submission}: {left_out}"))
            faults += 1
    reader.skipped.show()
    for line in notes.lines(reader.task):
        print(printable(line))
    if not faults:
        print(f"{submission}: clean")
        return
    print(f"{submission}: {faults} fault{'s' * (faults > 1)}")
    raise typer.Exit(1)
