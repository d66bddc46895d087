"""What metrics are made of, per example, and the metrics over examples with intervals."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import numpy as np
from numpy.typing import NDArray

from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import CorpusMetric, Numbers, Row

RESAMPLES = 1000


@dataclass
class ScoreTable:
    """One row per example: what its metrics are made of, and the weight, in flat number arrays."""

    task: Task
    weights: list[float] = field(default_factory=list)
    values: list[Numbers] = field(default_factory=list)
    groups: dict[str, list[str]] = field(default_factory=dict)

    def add(self, example: Example, weight: float, values: Numbers) -> None:
        """Append one example."""
        self.weights.append(weight)
        self.values.append(values)
        before = len(self.weights) - 1
        for attribute in {**self.groups, **example.groups}:
            groups = self.groups.setdefault(attribute, [UNKNOWN] * before)
            groups.append(example.groups.get(attribute, UNKNOWN))


@dataclass(frozen=True)
class Summary:
    """Every metric over `examples` examples, with its 95% interval.

    Attributes:
        unweighted: The examples' weights add up to nothing, so means are the plain ones.
    """

    examples: int
    mean: dict[str, float]
    interval: dict[str, tuple[float, float]]
    unweighted: bool = False


def metric_values(task: Task, gold: Row, row: Row | None, place: str) -> Numbers:
    """Return what one submission row gives to the task's metrics; None is an unanswered example.

    `gold` is what the row is scored against, as `Task.gold` makes it. One number for a metric that
    is a mean over examples, its counts for a pooled one.

    Raises:
        UserError: The row is not in the hand-in format; names `place`.
    """
    found: list[float] = []
    try:
        for one in task.score.metrics:
            found += one.counts(gold, row) if isinstance(one, CorpusMetric) else [one(gold, row)]
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{place} is not in the hand-in format; see `panjue check`") from None
    return np.array(found, dtype=np.float64)


def pooled(task: Task, sums: Numbers, weight: Numbers) -> Numbers:
    """Return the metrics, [..., metrics], of summed values, [..., values], and weights, [...]."""
    found, start = [], 0
    for one in task.score.metrics:
        if isinstance(one, CorpusMetric):
            found.append(one.value(sums[..., start : start + one.width]))
            start += one.width
        else:
            found.append(sums[..., start] / weight)
            start += 1
    return np.stack(found, axis=-1)


def summarize(
    columns: ScoreTable, resamples: int = RESAMPLES, mask: NDArray[np.bool_] | None = None
) -> Summary:
    """Return the metrics with 95% percentile bootstrap intervals over examples (seed 0).

    Where all weights are 0 (cases of one defendant in the official metric) means are the plain
    ones, and the summary says so.
    """
    weights, values = np.array(columns.weights), np.array(columns.values)
    if mask is not None:
        weights, values = weights[mask], values[mask]
    unweighted = not weights.any()
    if unweighted:
        weights = np.ones_like(weights)
    mean = pooled(columns.task, weights @ values, weights.sum())
    low = high = mean
    if resamples:
        means = resampled(columns.task, weights, values, resamples)
        low, high = percentiles(means)
    names = columns.task.score.names
    return Summary(
        len(weights),
        dict(zip(names, mean.tolist(), strict=True)),
        {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)},
        unweighted,
    )


def percentiles(drawn: Numbers) -> Numbers:
    """Return the ends of the 95% interval, [2, metrics], of [draws, metrics].

    Draws in which there was nothing to score do not count.
    """
    with catch_warnings():
        filterwarnings("ignore", "All-NaN slice")
        return np.asarray(np.nanpercentile(drawn, [2.5, 97.5], axis=0))


def plain(value: Any) -> Any:
    """Return numbers as JSON has them: one that there is not is null."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def check_answered(gold: Path, examples: int, submission: Path, rows: int, answered: int) -> None:
    """Refuse files that have nothing to do with each other, which would score 0.

    Raises:
        UserError: There is no example, or no row of the submission is of one.
    """
    if not examples:
        raise UserError(f"{gold}: has no examples")
    if rows and not answered:
        raise UserError(f"{submission}: no row has an id of {gold}; are these the right files?")


def gold_rows(reader: Reader, gold: Path) -> Iterator[tuple[Example, Row]]:
    """Yield the examples of a labelled file with what their submission rows are scored against.

    Raises:
        UserError: One has no answer.
    """
    for example in reader.read(gold):
        if example.answer is None:
            raise UserError(
                f"{gold}: id {example.id} has no gold answer; give the labelled file "
                "(of report and compare: --gold FILE)"
            )
        yield example, reader.task.gold(example)


def resampled(task: Task, weights: Numbers, values: Numbers, resamples: int) -> Numbers:
    """Return the metrics of `resamples` bootstrap draws of examples (seed 0)."""
    draw = np.random.default_rng(0)
    n = len(weights)
    sums, totals = np.empty((resamples, values.shape[1])), np.empty(resamples)
    for i in range(resamples):
        times = np.bincount(draw.integers(n, size=n), minlength=n)
        drawn = times * weights if (times * weights).any() else times
        sums[i], totals[i] = drawn @ values, drawn.sum()
    return pooled(task, sums, totals)
