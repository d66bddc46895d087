"""The table of run folders: which training each has, and its scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from panjue.finetune.trained import open_trained
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
from panjue.serve.answers import read_answers


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
    """Say whether a folder has files that a training writes; their names are in `REPLACED`.

    The adapter of another trainer counts, too, so that the list names it.
    """
    has_answers = "test_sha256" in record_keys(folder / MANIFEST)  # those of a vote, for example
    if has_answers or not folder.is_dir():
        return False
    return any((folder / name).exists() for name in REPLACED) or bool(unadopted(folder))


def fault(folder: Path) -> str:
    """Return why a run folder has no complete training, e.g. "unfinished, at step 40"; or empty."""
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
    """Return the row of a complete training; append a line to `problems` for each broken answer."""
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
            other = answers.trained  # may be another step of the training than the row shows
            of_test = place.name
            if other and other.sha256 != trained.sha256:
                of_test += f" (step {other.step(summary)})"
            scores.append((of_test, headline_of(found, task.score.headline)))
        except UserError as error:
            problems.append(f"{name}/{ANSWERS}/{place.name}: {error}")
    step = trained.step(summary)
    loss = held_out_losses(folder).get(step) if step else None
    written = date.fromtimestamp((trained.folder / MANIFEST).stat().st_mtime)  # until version 0.4
    day = summary.finished or written.isoformat()
    return ListedRun(name, record, summary, loss, scores, day)


def headline_of(scores: StoredScores | None, metric: str) -> str:
    """Return the headline metric of answers with its 95% interval, or `not scored`."""
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
            table.add_row(escape(f"  {test}"), *[""] * 5, score)  # no base, method, …, loss
    if listing.runs:
        console.print(table)
    for problem in listing.problems:
        console.print(problem)


def cells(run: ListedRun) -> list[str]:
    """Return the cells of a training, in the order of `COLUMNS`."""
    record = run.record
    start = f" (from {Path(record.from_run).name})" if record.from_run else ""
    base = Path(record.base)
    if base.name in RESULTS:  # `runs/NAME/model`: the base is the result of a training
        base = base.parent
    method = f"{record.method} (adopted)" if record.adopted else record.method
    examples = str(record.examples or "")
    steps = str(run.summary.steps or "")
    loss = "" if run.loss is None else f"{run.loss:.4f}"
    score = ""  # scores have rows of their own
    return [f"{run.name}{start}", base.name, method, examples, steps, loss, score, run.date]
