"""The table of run folders: which training each has, and its scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from panjue.finetune.trained import Trained, open_trained
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines, sha256
from panjue.prompts.plumbing.intervals import with_interval
from panjue.prompts.plumbing.ours import record_keys
from panjue.prompts.plumbing.records import (
    CHOSEN,
    MANIFEST,
    Choice,
    RunRecord,
    StoredScores,
    TrainingSummary,
    if_any,
)
from panjue.prompts.plumbing.run import (
    ANSWERS,
    REPLACED,
    RESULTS,
    answer_folders,
    held_out_losses,
    refuse_unadopted,
    unadopted,
    weights_folder,
)
from panjue.prompts.task import load_task
from panjue.serve.answers import Answers, read_answers


@dataclass(frozen=True)
class ListedRun:
    """A row of the table: a finished training."""

    name: str
    record: RunRecord
    summary: TrainingSummary
    loss: float | None
    """Loss on held-out cases of the adapter that answers."""
    scores: Sequence[tuple[str, str]]
    """Name of a folder of answers -> the headline metric with its interval."""
    date: str


@dataclass(frozen=True)
class Listing:
    """The finished trainings in a folder, and a line on each unfinished or broken one."""

    runs: Sequence[ListedRun]
    problems: Sequence[str]


def list_runs(folder: Path) -> Listing:
    """Return the runs in a folder, or the folder itself if it is a run."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; `panjue sft` makes runs/NAME")
    refuse_unadopted(folder)
    folders = [folder] if is_run(folder) else sorted(filter(is_run, folder.iterdir()))
    if not folders:
        raise UserError(f"{folder}: has no run folders; `panjue sft` makes runs/NAME")
    runs = []
    problems = []
    for place in folders:
        name = place.resolve().name if place == folder else place.name
        try:
            if problem := fault(place):
                problems.append(f"{name}: {problem}")
            else:
                runs.append(listed(place, name, problems))
        except UserError as error:
            problems.append(f"{name}: broken: {error}")
    return Listing(runs, problems)


def is_run(folder: Path) -> bool:
    """Say whether a folder has files that a training writes, and is no vote.

    The adapter of another trainer counts, too, so that the list names it.
    """
    if "test_sha256" in record_keys(folder / MANIFEST) or not folder.is_dir():
        return False
    return any((folder / name).exists() for name in REPLACED) or bool(unadopted(folder))


def fault(folder: Path) -> str:
    """Return why a run folder has no complete training; empty if it has one."""
    if problem := unadopted(folder):
        return problem
    result = weights_folder(folder, if_any(Choice, folder / CHOSEN))
    if result is None and (folder / MANIFEST).exists():
        RunRecord.read(folder)
        log = folder / "log.jsonl"
        steps = [entry["step"] for _, entry in read_lines(log)] if log.exists() else []
        reached = f"at step {steps[-1]}" if steps else "before its first logged step"
        return f"unfinished, {reached}; the command that began it resumes"
    if result is None:
        return f"broken: has neither {MANIFEST} nor a trained model"
    if not any(result.glob("*.safetensors")):
        return f"broken: {result.name}/ has no weights"
    if RunRecord.read(result).labels_sha256 not in (None, sha256(result / "labels.json")):
        return f"broken: {result.name}/labels.json was changed"
    return ""


def listed(folder: Path, name: str, problems: list[str]) -> ListedRun:
    """Return the row of a complete training; add problems of its answers to the problems."""
    trained = open_trained(folder)
    record = trained.record
    summary = TrainingSummary.read(folder) or TrainingSummary()
    task = load_task(record.task)
    scores = []
    for place in answer_folders(folder):
        try:
            answers = read_answers(place, trained)
            if answers.changed:
                raise UserError(answers.changed)
            found = StoredScores.read(place, task.data.submission.name)
            of_test = f"{place.name}{of_other_step(answers, trained, summary)}"
            scores.append((of_test, headline_of(found, task.score.headline)))
        except UserError as error:
            problems.append(f"{name}/{ANSWERS}/{place.name}: {error}")
    step = trained.step(summary)
    loss = held_out_losses(folder).get(step) if step else None
    written = date.fromtimestamp((trained.folder / MANIFEST).stat().st_mtime)  # until version 0.4
    day = summary.finished or written.isoformat()
    return ListedRun(name, record, summary, loss, scores, day)


def of_other_step(answers: Answers, trained: Trained, summary: TrainingSummary) -> str:
    """Return the step whose adapter answered, if the table shows another step."""
    other = answers.trained
    if other is None or other.sha256 == trained.sha256:
        return ""
    return f" (step {other.step(summary)})"


def headline_of(scores: StoredScores | None, metric: str) -> str:
    """Return the headline metric of scored answers with its 95% interval."""
    mean = scores.mean(metric) if scores else None
    if scores is None or mean is None:
        return "not scored"
    return with_interval(mean, scores.ends(metric), ".3f", "-")


COLUMNS = ("run", "base", "method", "examples", "steps", "loss", "score (95%)", "date")

WIDE = 200
"""Width of the table if it is not printed to a terminal, in characters."""


def show_listing(listing: Listing) -> None:
    """Print the table, with one line for each test file below its run; then print the problems."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDE
    of_names = ("run", "base")
    columns = [Column(name, no_wrap=name not in of_names, overflow="fold") for name in COLUMNS]
    table = Table(*columns, box=None, padding=(0, 1, 0, 0))
    for run in listing.runs:
        table.add_row(*map(escape, cells(run)))
        for test, score in run.scores:
            table.add_row(escape(f"  {test}"), *[""] * 5, score)
    if listing.runs:
        console.print(table)
    for problem in listing.problems:
        console.print(problem)


def cells(run: ListedRun) -> Iterator[str]:
    """Yield the cells of a training."""
    summary = run.summary
    base = Path(run.record.base)
    start = run.record.from_run
    yield f"{run.name} (from {Path(start).name})" if start else run.name
    yield base.parent.name if base.name in RESULTS else base.name
    yield f"{run.record.method} (adopted)" if run.record.adopted else run.record.method
    yield str(run.record.examples or "")
    yield str(summary.steps or "")
    yield "" if run.loss is None else f"{run.loss:.4f}"
    yield ""
    yield run.date
