"""Score a submission against gold: the task's metrics with intervals, groups and baselines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from panjue.eval import calibration
from panjue.eval.baselines import Baselines
from panjue.eval.calibration import Calibration, Certainty
from panjue.eval.decoding import decoding_of, never_asked
from panjue.eval.values import (
    UNWEIGHTED,
    MetricValues,
    Summary,
    score_rows,
    summaries_by_group,
    summarize,
    without_nan,
)
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256
from panjue.prompts.plumbing.run import Answers, find_answers
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, no_labels

MAX_SHOWN_NOTES = 5
"""Notes on gold that are printed; the JSON has all."""

MAX_GROUP_COLUMNS = 8
"""A table of more groups has one row per group."""


@dataclass(frozen=True)
class ScoreResult:
    """Everything that `panjue score` prints."""

    values: MetricValues  # of each example
    total: Summary  # the metrics over all examples
    groups: dict[str, dict[str, Summary]]
    """Attribute -> its value -> the metrics over those examples."""
    baselines: dict[str, dict[str, float] | None]
    """Baseline, trivial or human -> its metrics; None if they are unknown."""
    unreadable_rate: float | None
    missing: int
    extra_rows: int
    doubled: int
    unknown_labels: int | None
    faulty: int = 0  # rows in which `panjue check` finds a fault that the contest may refuse
    calibration: dict[str, Calibration] | None = None
    compared_by: str | None = None  # how texts were compared, if the metrics compare texts
    notes: list[str] = field(default_factory=list)  # `id: note` on gold examples
    never_asked: Sequence[str] = ()
    """`id: reason` of the examples that the model was never asked about."""
    in_sample: str | None = None  # how the answers come from these very cases, if they do
    unknown_baselines: Mapping[str, str] = field(default_factory=dict)
    """Baseline without a score -> why it has none."""
    answered_by: str = ""  # a line on who answered, the model or the text classifier, and why
    by_classifier: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return one dict with the metrics and all other numbers at the top level."""
        numbers: dict[str, Any] = {
            **self.total.mean,
            "examples": self.total.examples,
            "unweighted": self.total.unweighted,
            "interval": self.total.interval,
            "groups": {name: _group_numbers(groups) for name, groups in self.groups.items()},
            "baselines": self.baselines,
            "unreadable_rate": self.unreadable_rate,
            "missing": self.missing,
            "extra_rows": self.extra_rows,
            "doubled": self.doubled,
            "faulty": self.faulty,
            "answered_by": self.answered_by,
            "unknown_gold_labels": self.unknown_labels,
            "calibration": None,
        }
        if self.calibration is not None:
            numbers["calibration"] = {name: asdict(of) for name, of in self.calibration.items()}
        for name in ("compared_by", "notes", "never_asked", "in_sample"):
            if value := getattr(self, name):
                numbers[name] = value
        result: dict[str, Any] = without_nan(numbers)
        return result


def _group_numbers(groups: Mapping[str, Summary]) -> dict[str, dict[str, Any]]:
    return {name: {"examples": of.examples, **of.mean} for name, of in groups.items()}


def score(reader: Reader, gold: Path, submission: Path) -> ScoreResult:
    """Score `submission` by the task's own metrics.

    If the submission lies in its run folder, the score has more: baselines, the rate of unreadable
    replies, and the calibration of the confidences. Examples without a row are scored as
    unanswered. The files are streamed: only the numbers of each example stay in memory.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    rows = task.data.submission.index(submission)
    run = submission.parent
    decoding = decoding_of(submission)
    labels = _labels(task, run)
    values = MetricValues(task)
    baselines = Baselines(task, labels, run, gold)
    confidences = run / "confidence.jsonl"
    certainty = None
    if decoding and confidences.exists():
        if decoding.get("confidence_sha256") not in (None, sha256(confidences)):
            raise UserError(f"{run}: is being decoded by another process; score it again")
        certainty = Certainty(task, confidences)
    faulty = 0
    unknown = 0
    notes: list[str] = []
    answers = find_answers(run) if decoding else None
    for example, gold_row, row in score_rows(reader, gold, rows, values):
        baselines.add(example, gold_row)
        if certainty:
            certainty.add(example, gold_row, row)
        faulty += row is not None and any(task.data.check(example, row, None))
        notes += [f"{example.id}: {note}" for note in example.notes]
        unknown += _unknown_labels(task, example, labels)
    groups = {}
    for attribute in values.attributes:
        groups[attribute] = summaries_by_group(values, attribute, resamples=0)
    return ScoreResult(
        values=values,
        total=summarize(values),
        groups=groups,
        baselines=baselines.means(),
        unreadable_rate=decoding["unreadable"] / max(1, decoding["calls"]) if decoding else None,
        missing=values.missing,
        extra_rows=len(rows) - len(values) + values.missing,
        doubled=len(rows.duplicates),
        faulty=faulty,
        unknown_labels=unknown if labels and task.answer.fields else None,
        calibration=certainty.fields() if certainty else None,
        compared_by=task.score.compared_by,
        notes=notes,
        never_asked=decoding.get("refusals", ()) if decoding else (),
        in_sample=in_sample(answers) if answers else None,
        unknown_baselines=baselines.unknown,
        answered_by=decoding.get("answered_by", "") if decoding else "",
        by_classifier=answers is not None and answers.record.answered_by == "classifier",
    )


def _unknown_labels(task: Task, example: Example, labels: Labels | None) -> int:
    """Count the gold labels that training never saw; they are scored as missed."""
    if not labels or not task.answer.fields:
        return 0
    unknown = 0
    for field_name, counts in task.ask.labels([example]).counts.items():
        known = labels.counts.get(field_name, ())
        unknown += sum(n for label, n in counts.items() if label not in known)
    return unknown


def in_sample(answers: Answers) -> str | None:
    """Say how the model or the choice of who answers was fitted to the answered cases."""
    record, training = answers.record, answers.training
    if training is None:
        return None
    if record.test_sha256 == training.dev_sha256 or record.held_out:
        return "training and the choice between model and text classifier looked at these cases"
    if record.test_sha256 in (training.train_sha256, training.mix_sha256):
        return "these cases were trained on"
    return None


def _labels(task: Task, run: Path) -> Labels | None:
    if task.ask.labels is no_labels:
        return Labels()
    return load_labels(run / "labels.json") if (run / "labels.json").exists() else None


def show(scores: ScoreResult, console: Console) -> None:
    """Print the tables."""
    title = escape(scores.compared_by) if scores.compared_by else None
    # In 80 columns the headings of baselines wrap, and no name or number is cut.
    whole = (Column(name, no_wrap=True) for name in ("metric", "score", "95% interval"))
    table = Table(*whole, *scores.baselines, title=title)
    for name, value in scores.total.mean.items():
        low, high = scores.total.interval[name]
        baselines = (f"{mean[name]:.4f}" if mean else "-" for mean in scores.baselines.values())
        style = "bold" if name == list(scores.total.mean)[-1] else None
        table.add_row(name, f"{value:.4f}", f"{low:.4f} - {high:.4f}", *baselines, style=style)
    console.print(table)
    for attribute, groups in scores.groups.items():
        console.print(_group_table(attribute, groups, title))
    if scores.calibration:
        calibration.show(scores.calibration, console)
    for line in remarks(scores):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _group_table(attribute: str, groups: Mapping[str, Summary], title: str | None) -> Table:
    """Return a table with a column for each group, or with a row for each of many."""
    headings = ["examples", *next(iter(groups.values())).mean]
    rows = {}
    for name, summary in groups.items():
        means = [f"{value:.4f}" for value in summary.mean.values()]
        # Group names come from files: `[/b] 某院` is a name, not rich markup.
        rows[escape(name)] = [str(summary.examples), *means]
    if len(groups) > MAX_GROUP_COLUMNS:
        table = Table(escape(f"by {attribute}"), *headings, title=title)
        for name, row in rows.items():
            table.add_row(name, *row)
        return table
    table = Table(escape(f"by {attribute}"), *rows, title=title)
    for cells in zip(headings, *rows.values(), strict=True):
        table.add_row(*cells)
    return table


def _unweighted_groups(groups: Mapping[str, Mapping[str, Summary]]) -> Iterator[str]:
    for attribute, summaries in groups.items():
        names = [name for name, summary in summaries.items() if summary.unweighted]
        if names:
            yield f"by {attribute}, unweighted means as all weights are 0: {', '.join(names)}"


def _unreadable(scores: ScoreResult) -> Iterator[str]:
    """Yield the rate of unreadable replies, unless the classifier answered."""
    if scores.by_classifier:
        return
    if scores.unreadable_rate is None:
        yield "unreadable replies: unknown, there is no decode.json of this submission"
    else:
        yield f"unreadable replies: {scores.unreadable_rate:.2%}"


def remarks(scores: ScoreResult) -> Iterator[str]:
    """Yield the lines that are printed below the tables."""
    yield f"{scores.total.examples} examples; {scores.missing} without a row, scored as unanswered"
    if scores.extra_rows or scores.doubled:
        yield (
            f"{scores.extra_rows} rows belong to no example and {scores.doubled} are duplicates: "
            "they are ignored; see `panjue check`"
        )
    if scores.faulty:
        yield f"{scores.faulty} rows have faults that the contest may refuse; see `panjue check`"
    if scores.total.unweighted:
        yield UNWEIGHTED
    else:
        yield from _unweighted_groups(scores.groups)
    if scores.never_asked:
        yield never_asked(scores.never_asked)
    if scores.notes:
        yield f"notes on gold: {len(scores.notes)}, scored as far as they can be (--json has all)"
        yield from (f"  id {note}" for note in scores.notes[:MAX_SHOWN_NOTES])
    yield from _unreadable(scores)
    if scores.in_sample:
        yield f"{scores.in_sample}; expect lower scores on other cases"
    headline, value = list(scores.total.mean.items())[-1]
    for name, baseline in scores.baselines.items():
        if baseline is None:
            yield f"{name}: unknown, {scores.unknown_baselines[name]}"
        elif value < baseline[headline]:
            yield f"{headline} is below the baseline '{name}': {baseline[headline]:.4f}"
    if scores.unknown_labels is not None:
        yield f"gold labels that training never saw: {scores.unknown_labels}, scored as missed"
    if scores.answered_by:
        yield scores.answered_by
