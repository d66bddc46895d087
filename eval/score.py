"""A submission against gold: the task's metrics, how sure they are, what is trivial to reach."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from panjue.eval import calibration
from panjue.eval.calibration import Calibration, Certainty
from panjue.eval.means import (
    ScoreTable,
    Summary,
    check_answered,
    gold_rows,
    metric_values,
    plain,
    summarize,
)
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, no_labels

NAMED = 5
"""Notes on gold that are shown; the JSON has all."""

MANY = 8
"""Groups above which a table has them as rows."""


@dataclass(frozen=True)
class Scores:
    """Everything that `panjue score` prints.

    Attributes:
        total: The metrics over all examples.
        groups: Attribute -> its value -> the metrics over those examples.
        baselines: What is trivially reached, or by people -> its metrics; the task's fallback is
            None where its labels are not known.
        reported: Single numbers of groups and baselines that the task wants at hand.
        compared_by: What texts were compared by, where the metrics compare any.
        faulty: Rows in which `panjue check` finds something that the contest may refuse.
        notes: `id: what` somebody should know of gold examples.
    """

    total: Summary
    groups: dict[str, dict[str, Summary]]
    baselines: dict[str, dict[str, float] | None]
    reported: dict[str, float | None]
    unreadable_rate: float | None
    missing: int
    extra_rows: int
    doubled: int
    unknown_labels: int | None
    faulty: int = 0
    calibration: dict[str, Calibration] | None = None
    abstention: dict[float, Summary] | None = None
    compared_by: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the metrics at the top level and the rest beside them."""
        found: dict[str, Any] = plain(self._numbers())
        return found

    def _numbers(self) -> dict[str, Any]:
        return {
            **self.total.mean,
            **self.reported,
            "examples": self.total.examples,
            "unweighted": self.total.unweighted,
            "interval": self.total.interval,
            "groups": {
                attribute: {name: {"examples": s.examples, **s.mean} for name, s in groups.items()}
                for attribute, groups in self.groups.items()
            },
            "baselines": self.baselines,
            "unreadable_rate": self.unreadable_rate,
            "missing": self.missing,
            "extra_rows": self.extra_rows,
            "doubled": self.doubled,
            "faulty": self.faulty,
            "unknown_gold_labels": self.unknown_labels,
            **({"compared_by": self.compared_by} if self.compared_by else {}),
            **({"notes": self.notes} if self.notes else {}),
            "calibration": self.calibration
            and {name: found.to_json() for name, found in self.calibration.items()},
            "abstention": self.abstention
            and {
                str(share): {"examples": s.examples, **s.mean}
                for share, s in self.abstention.items()
            },
        }


def score(reader: Reader, gold: Path, submission: Path) -> Scores:
    """Score `submission` by the task's own metrics.

    The run folder that the submission was decoded in gives what the task's fallback would score
    (always the training's commonest labels, say), how many replies were unreadable, and how far its
    confidences may be trusted. Examples without a row score as unanswered. Streams: per example
    only its numbers stay in memory.

    Raises:
        UserError: A file is missing or broken, or a gold example has no answer.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    rows, run = task.data.submission.index(submission), submission.parent
    decoding = decoding_of(submission)
    labels = _labels(task, run)
    scored, baselines = ScoreTable(task), Baselines(task, labels)
    certainty = certainty_of(task, run) if decoding else None
    missing, faulty, notes = 0, 0, list[str]()
    for example, right in gold_rows(reader, gold):
        notes += [f"{example.id}: {note}" for note in example.notes]
        row = rows.get(example.id)
        missing += row is None
        faulty += row is not None and any(task.data.check(example, row, None))
        values = metric_values(task, right, row, f"{submission}: id {example.id}")
        scored.add(example, task.score.weight(example), values)
        baselines.add(example)
        if certainty:
            certainty.add(example, right, row)
    examples = len(scored.weights)
    check_answered(gold, examples, submission, len(rows), examples - missing)
    total = summarize(scored)
    groups = {attribute: _by_group(scored, attribute) for attribute in scored.groups}
    means = baselines.means()
    return Scores(
        total=total,
        groups=groups,
        baselines=means,
        reported=_reported(task, groups, means),
        unreadable_rate=decoding["unreadable"] / max(1, decoding.get("calls", decoding["examples"]))
        if decoding
        else None,
        missing=missing,
        extra_rows=len(rows) - examples + missing,
        doubled=len(rows.doubled),
        faulty=faulty,
        unknown_labels=_unknown(reader, gold, labels) if labels and task.answer.fields else None,
        calibration=certainty.fields() if certainty else None,
        abstention=certainty.abstention(scored) if certainty else None,
        compared_by=task.score.compared_by,
        notes=notes,
    )


class Baselines:
    """What a score is printed beside: the task's fallback, and its own baselines."""

    def __init__(self, task: Task, labels: Labels | None) -> None:
        """Without `labels` the fallback is not known."""
        self._task, self._labels = task, labels
        self._columns: dict[str, ScoreTable] = defaultdict(lambda: ScoreTable(task))

    def add(self, example: Example) -> None:
        """Let every baseline answer one example; of several answers of one counts their mean."""
        task, ways = self._task, defaultdict(list)
        if self._labels:
            answer = task.ask.decode("", example, self._labels).answer
            row = task.data.write(example, answer)
            ways[task.score.fallback].append(
                metric_values(task, task.gold(example), row, task.score.fallback)
            )
        for name, right, row_of_it in task.score.baselines(example):
            ways[name].append(metric_values(task, right, row_of_it, name))
        for name, values in ways.items():
            self._columns[name].add(example, task.score.weight(example), np.mean(values, axis=0))

    def means(self) -> dict[str, dict[str, float] | None]:
        """Return every baseline's metrics, over the examples that it answers."""
        unknown = {} if self._labels else {self._task.score.fallback: None}
        means = {name: summarize(one, resamples=0).mean for name, one in self._columns.items()}
        return {**unknown, **means}


def _labels(task: Task, run: Path) -> Labels | None:
    if task.ask.labels is no_labels:
        return Labels()
    return load_labels(run / "labels.json") if (run / "labels.json").exists() else None


def _reported(
    task: Task,
    groups: Mapping[str, Mapping[str, Summary]],
    baselines: Mapping[str, Mapping[str, float] | None],
) -> dict[str, float | None]:
    """Return what the task wants at hand by its name, None where the files have no such group."""
    known: dict[str, dict[str, Mapping[str, float]]] = {
        attribute: {name: summary.mean for name, summary in of.items()}
        for attribute, of in groups.items()
    }
    known["baselines"] = {name: mean for name, mean in baselines.items() if mean}
    return {
        name: known.get(of, {}).get(which, {}).get(metric)
        for name, (of, which, metric) in task.score.reported.items()
    }


def certainty_of(task: Task, run: Path) -> Certainty | None:
    """Return what takes up the confidences of a run folder, if it has any."""
    sure = run / "confidence.jsonl"
    return Certainty(task, sure) if task.answer.fields and sure.exists() else None


def decoding_of(submission: Path) -> dict[str, Any] | None:
    """Return the run's decode.json if it is about this very submission."""
    path = submission.parent / "decode.json"
    report: dict[str, Any] = read_json(path) if path.exists() else {}
    return report if report.get("submission_sha256") == sha256(submission) else None


def _unknown(reader: Reader, gold: Path, labels: Labels) -> int:
    """Count the gold labels that training never saw; they are scored as missed."""
    counts = reader.task.ask.labels(reader.read(gold)).counts
    return sum(
        n
        for kind in counts
        for label, n in counts[kind].items()
        if label not in labels.counts.get(kind, ())
    )


def _by_group(columns: ScoreTable, attribute: str) -> dict[str, Summary]:
    groups = np.array(columns.groups[attribute])
    return {
        str(name): summarize(columns, resamples=0, mask=groups == name)
        for name in np.unique(groups)
    }


def domain_means(first: Scores, second: Scores) -> dict[str, float]:
    """Return the plain mean of each metric over two domains, however many examples they have."""
    pairs = first.total.mean.items()
    return {name: (value + second.total.mean[name]) / 2 for name, value in pairs}


def show(scores: Scores, console: Console) -> None:
    """Print the tables."""
    by = escape(scores.compared_by) if scores.compared_by else None
    table = Table("metric", "score", "95% interval", *scores.baselines, title=by)
    for name, value in scores.total.mean.items():
        low, high = scores.total.interval[name]
        baselines = (
            f"{baseline[name]:.4f}" if baseline else "-" for baseline in scores.baselines.values()
        )
        last = name == list(scores.total.mean)[-1]
        style = "bold" if last else None
        table.add_row(name, f"{value:.4f}", f"{low:.4f} - {high:.4f}", *baselines, style=style)
    console.print(table)
    for attribute, groups in scores.groups.items():
        console.print(_group_table(attribute, groups, by))
    if scores.calibration and scores.abstention:
        calibration.show(scores.calibration, scores.abstention, console)
    for line in remarks(scores):
        console.print(line, highlight=False, markup=False)


def _group_table(attribute: str, groups: Mapping[str, Summary], title: str | None) -> Table:
    """Return metrics by rows and groups by columns, or the other way round where groups are many.

    With the groups stand their numbers of examples.
    """
    # Groups are called as files have them: `[/b] 某院` is a name, and no markup of rich's.
    numbers = {
        escape(name): [str(summary.examples), *(f"{value:.4f}" for value in summary.mean.values())]
        for name, summary in groups.items()
    }
    heads = ["examples", *next(iter(groups.values())).mean]
    if len(groups) > MANY:
        table = Table(escape(f"by {attribute}"), *heads, title=title)
        for name, row in numbers.items():
            table.add_row(name, *row)
        return table
    table = Table(escape(f"by {attribute}"), *numbers, title=title)
    for head, *row in zip(heads, *numbers.values(), strict=True):
        table.add_row(head, *row)
    return table


def remarks(scores: Scores) -> Iterator[str]:
    """Yield what a reader of the numbers must know."""
    yield f"{scores.total.examples} examples; {scores.missing} without a row, scored as unanswered"
    if scores.extra_rows or scores.doubled:
        yield (
            f"{scores.extra_rows} rows are of no example and {scores.doubled} stand twice: "
            "they count for nothing; see `panjue check`"
        )
    if scores.faulty:
        yield f"{scores.faulty} rows have faults that the contest may refuse; see `panjue check`"
    if scores.total.unweighted:
        yield "every example has weight 0 (log2 of one defendant): these are unweighted means"
    if scores.notes:
        yield f"notes on gold: {len(scores.notes)}, scored as far as they can be (--json has all)"
        yield from (f"  id {note}" for note in scores.notes[:NAMED])
    if scores.unreadable_rate is None:
        yield "unreadable replies: unknown, no decode.json beside the submission is about it"
    else:
        yield f"unreadable replies: {scores.unreadable_rate:.2%}"
    for name, baseline in scores.baselines.items():
        if baseline is None:
            yield f"{name}: unknown, there is no labels.json beside the submission"
    if scores.unknown_labels is not None:
        yield f"gold labels that training never saw: {scores.unknown_labels}, scored as missed"
