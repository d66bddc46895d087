"""A submission against gold: the task's metrics, how sure they are, what is trivial to reach."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from panjue.eval import calibration
from panjue.eval.calibration import Calibration, Certainty
from panjue.eval.means import Columns, Summary, gold_rows, metric_values, summarize
from panjue.prompts.errors import UserError
from panjue.prompts.files import Rows, read_json, sha256
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.task import Task


@dataclass(frozen=True)
class Scores:
    """Everything that `panjue score` prints."""

    total: Summary
    groups: dict[str, dict[str, Summary]]
    commonest: dict[str, float] | None
    unreadable_rate: float | None
    missing: int
    foreign: int
    doubled: int
    unknown_labels: int | None
    calibration: dict[str, Calibration] | None = None
    aside: dict[float, Summary] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the metrics at the top level and the rest beside them."""
        return {
            **self.total.mean,
            "examples": self.total.examples,
            "unweighted": self.total.unweighted,
            "interval": self.total.interval,
            "groups": {
                attribute: {name: {"examples": s.examples, **s.mean} for name, s in groups.items()}
                for attribute, groups in self.groups.items()
            },
            "commonest": self.commonest,
            "unreadable_rate": self.unreadable_rate,
            "missing": self.missing,
            "foreign": self.foreign,
            "doubled": self.doubled,
            "unknown_gold_labels": self.unknown_labels,
            "calibration": self.calibration
            and {name: found.to_json() for name, found in self.calibration.items()},
            "least_certain_set_aside": self.aside
            and {str(share): {"examples": s.examples, **s.mean} for share, s in self.aside.items()},
        }


def score(task: Task, gold: Path, submission: Path) -> Scores:
    """Score `submission` by the task's own metrics.

    The run folder that the submission was decoded in gives what always answering its training's
    commonest labels would score, how many replies were unreadable, and how far its confidences may
    be trusted. Examples without a row score as unanswered. Streams: per example
    only its numbers stay in memory.

    Raises:
        UserError: A file is missing or broken, or a gold example has no answer.
    """
    rows = Rows(submission)
    run = submission.parent
    decoding = _decoding(submission)
    labels = load_labels(run / "labels.json") if (run / "labels.json").exists() else None
    scored, peer = Columns(task.metrics), Columns(task.metrics)
    sure = run / "confidence.jsonl"
    certainty = Certainty(task, sure) if task.decides and decoding and sure.exists() else None
    missing = 0
    for example, right in gold_rows(task, gold):
        row = rows.get(example.id)
        missing += row is None
        weight = task.weight(example)
        values = metric_values(task, right, row, f"{submission}: id {example.id}")
        scored.add(example, weight, values)
        if certainty:
            certainty.add(example, right, row)
        if labels:
            commonest = task.submission(example, task.decode("", example, labels).answer)
            peer.add(example, weight, metric_values(task, right, commonest, "commonest"))
    if not scored.weights:
        raise UserError(f"{gold}: has no examples")
    return Scores(
        total=summarize(scored),
        groups={attribute: _by_group(scored, attribute) for attribute in scored.groups},
        commonest=summarize(peer, resamples=0).mean if labels else None,
        unreadable_rate=decoding["unreadable"] / max(1, decoding["examples"]) if decoding else None,
        missing=missing,
        foreign=len(rows) - len(scored.weights) + missing,
        doubled=len(rows.doubled),
        unknown_labels=_unknown(task, gold, labels) if labels else None,
        calibration=certainty.fields() if certainty else None,
        aside=certainty.aside(scored) if certainty else None,
    )


def _decoding(submission: Path) -> dict[str, Any] | None:
    """Return the run's decode.json if it is about this very submission."""
    path = submission.parent / "decode.json"
    report: dict[str, Any] = read_json(path) if path.exists() else {}
    return report if report.get("submission_sha256") == sha256(submission) else None


def _unknown(task: Task, gold: Path, labels: Labels) -> int:
    """Count the gold labels that training never saw; they are scored as missed."""
    counts = task.labels(task.read(gold)).counts
    return sum(
        n
        for kind in counts
        for label, n in counts[kind].items()
        if label not in labels.counts.get(kind, ())
    )


def _by_group(columns: Columns, attribute: str) -> dict[str, Summary]:
    groups = np.array(columns.groups[attribute])
    return {
        str(name): summarize(columns, resamples=0, mask=groups == name)
        for name in np.unique(groups)
    }


def show(scores: Scores, console: Console) -> None:
    """Print the tables."""
    table = Table("metric", "score", "95% interval", "commonest labels")
    for name, value in scores.total.mean.items():
        low, high = scores.total.interval[name]
        peer = f"{scores.commonest[name]:.4f}" if scores.commonest else "-"
        last = name == list(scores.total.mean)[-1]
        table.add_row(
            name, f"{value:.4f}", f"{low:.4f} - {high:.4f}", peer, style="bold" if last else None
        )
    console.print(table)
    for attribute, groups in scores.groups.items():
        console.print(_group_table(attribute, groups))
    if scores.calibration and scores.aside:
        calibration.show(scores.calibration, scores.aside, console)
    for line in _remarks(scores):
        console.print(line, highlight=False, markup=False)


def _group_table(attribute: str, groups: Mapping[str, Summary]) -> Table:
    """Return metrics by rows and groups, with their numbers of examples, by columns."""
    table = Table(f"by {attribute}", *groups)
    table.add_row("examples", *(str(summary.examples) for summary in groups.values()))
    for name in next(iter(groups.values())).mean:
        table.add_row(name, *(f"{summary.mean[name]:.4f}" for summary in groups.values()))
    return table


def _remarks(scores: Scores) -> Iterator[str]:
    yield f"{scores.total.examples} examples; {scores.missing} without a row, scored as unanswered"
    if scores.foreign or scores.doubled:
        yield (
            f"{scores.foreign} rows are of no example and {scores.doubled} stand twice: "
            "they count for nothing; see `panjue check`"
        )
    if scores.total.unweighted:
        yield "every example has weight 0 (log2 of one defendant): these are unweighted means"
    if scores.unreadable_rate is None:
        yield "unreadable replies: unknown, no decode.json beside the submission is about it"
    else:
        yield f"unreadable replies: {scores.unreadable_rate:.2%}"
    if scores.commonest is None:
        yield "commonest labels: unknown, there is no labels.json beside the submission"
    else:
        yield f"gold labels that training never saw: {scores.unknown_labels}, scored as missed"
