"""Metric values per example, and the metrics over all examples with intervals."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import numpy as np
from numpy.typing import NDArray

from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import CorpusMetric, Numbers, Row

RESAMPLES = 1000


@dataclass
class ScoreTable:
    """One row per example: its metric values, weight and groups, in flat lists."""

    task: Task
    weights: list[float] = field(default_factory=list)
    values: list[Numbers] = field(default_factory=list)
    groups: dict[str, list[str]] = field(default_factory=dict)

    def add(self, example_groups: Mapping[str, str], weight: float, values: Numbers) -> None:
        """Append one example, by its groups."""
        self.weights.append(weight)
        self.values.append(values)
        before = len(self.weights) - 1
        for attribute in {**self.groups, **example_groups}:
            if attribute not in self.groups:
                self.groups[attribute] = [UNKNOWN] * before
            self.groups[attribute].append(example_groups.get(attribute, UNKNOWN))


@dataclass(frozen=True)
class Summary:
    """Every metric over `examples` examples, with its 95% interval.

    Attributes:
        unweighted: All weights are 0, so the means are unweighted.
    """

    examples: int
    mean: dict[str, float]
    interval: dict[str, tuple[float, float]]
    unweighted: bool = False


def metric_values(task: Task, gold: Row, row: Row | None, place: str) -> Numbers:
    """Return the metric values of one submission row; a row of None is an unanswered example.

    A metric that is a mean over examples has one value; a `CorpusMetric` has its counts. `gold`
    comes from `Task.gold`.

    Raises:
        UserError: The row is not in the hand-in format; names `place`.
    """
    values: list[float] = []
    try:
        for metric in task.score.metrics:
            if isinstance(metric, CorpusMetric):
                values += metric.counts(gold, row)
            else:
                values.append(metric(gold, row))
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{place} is not in the hand-in format; see `panjue check`") from None
    return np.array(values, dtype=np.float64)


def pooled(task: Task, sums: Numbers, weight: Numbers) -> Numbers:
    """Return the metrics, [..., metrics], of summed values, [..., values], and weights, [...]."""
    metrics, start = [], 0
    for metric in task.score.metrics:
        if isinstance(metric, CorpusMetric):
            metrics.append(metric.value(sums[..., start : start + metric.width]))
            start += metric.width
        else:
            metrics.append(sums[..., start] / weight)
            start += 1
    return np.stack(metrics, axis=-1)


def summarize(
    table: ScoreTable, resamples: int = RESAMPLES, mask: NDArray[np.bool_] | None = None
) -> Summary:
    """Return the metrics with 95% percentile bootstrap intervals over examples (seed 0).

    If all weights are 0 (cases of one defendant in the official metric), the means are unweighted
    and the summary says so.
    """
    weights, values = np.array(table.weights), np.array(table.values)
    if mask is not None:
        weights, values = weights[mask], values[mask]
    unweighted = not weights.any()
    if unweighted:
        weights = np.ones_like(weights)
    mean = pooled(table.task, weights @ values, weights.sum())
    low = high = mean
    if resamples:
        low, high = percentiles(resampled(table.task, weights, values, resamples))
    names = table.task.score.names
    return Summary(
        len(weights),
        dict(zip(names, mean.tolist(), strict=True)),
        {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)},
        unweighted,
    )


def percentiles(draws: Numbers) -> Numbers:
    """Return the ends of the 95% interval, [2, metrics], of bootstrap draws, [draws, metrics].

    Draws with nothing to score (NaN) do not count.
    """
    with catch_warnings():
        filterwarnings("ignore", "All-NaN slice")
        return np.asarray(np.nanpercentile(draws, [2.5, 97.5], axis=0))


def without_nan(value: Any) -> Any:
    """Return a value for JSON: NaN becomes None, at any depth."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and np.isnan(value) else value


COMPARED = 100
"""Examples whose names are compared before a submission is scored."""


def check_answered(reader: Reader, gold: Path, rows: Rows) -> None:
    """Refuse a submission of other cases, which would score 0.

    Files of other cases may have the same ids, and some of the names (张某). The gold file is read
    up to `COMPARED` examples that the submission answers.

    Raises:
        UserError: There is no example; no row has the id of an example; or most of the rows with
            such an id name other defendants.
    """
    example, named, seen, foreign = None, "", 0, 0
    for example, gold_row in gold_rows(reader, gold):
        row = rows.get(example.id)
        if row is None:
            continue
        wanted, found = _names(reader.task, gold_row), _names(reader.task, row)
        seen += 1
        if wanted and found and not wanted.keys() & found.keys():
            foreign += 1
            both = f"{'、'.join(wanted)} there and {'、'.join(found)} here"
            named = named or f"id {example.id} has {both}"
        if seen == COMPARED:
            break
    if example is None:
        raise UserError(f"{gold}: has no examples")
    if foreign > seen / 2:
        raise UserError(
            f"{rows.path}: names other defendants than {gold} in {foreign} of {seen} cases; "
            f"{named}; are these the right files?"
        )
    if len(rows) and not seen:
        raise UserError(f"{rows.path}: no row has an id of {gold}; are these the right files?")


def _names(task: Task, row: Row | None) -> dict[str, None]:
    """Return the names in a row whose items have names, in order; none in a row of another form."""
    with suppress(KeyError, TypeError):
        if row is not None and task.answer.fields:
            return {str(item["name"]): None for item in task.answer.items_of(row)}
    return {}


def gold_rows(reader: Reader, gold: Path) -> Iterator[tuple[Example, Row]]:
    """Yield the examples of a labelled file with their gold rows.

    Raises:
        UserError: An example has no answer.
    """
    for example in reader.read(gold):
        yield example, gold_row(reader.task, gold, example)


def gold_row(task: Task, gold: Path, example: Example) -> Row:
    """Return the gold answer of an example of the file `gold` as a row of a submission.

    Raises:
        UserError: It has none.
    """
    if example.answer is None:
        raise UserError(
            f"{gold}: id {example.id} has no gold answer; give the labelled file "
            "(with `report` and `compare`: --gold FILE)"
        )
    return task.gold(example)


def resampled(task: Task, weights: Numbers, values: Numbers, resamples: int) -> Numbers:
    """Return the metrics of `resamples` bootstrap draws of examples (seed 0)."""
    generator = np.random.default_rng(0)
    n = len(weights)
    sums, totals = np.empty((resamples, values.shape[1])), np.empty(resamples)
    for i in range(resamples):
        counts = np.bincount(generator.integers(n, size=n), minlength=n)
        drawn = counts * weights if (counts * weights).any() else counts
        sums[i], totals[i] = drawn @ values, drawn.sum()
    return pooled(task, sums, totals)
