"""Compare two submissions on the same gold: differences with intervals, examples won and lost."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from panjue.eval.answers import AnsweredFile
from panjue.eval.values import (
    UNWEIGHTED,
    MetricValues,
    percentiles,
    pooled,
    resampled,
    scored,
    submission_rows,
    weighted_mean,
)
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.tasks.metrics import Numbers

RESAMPLES = 10_000

TIE = 1e-9
"""Differences up to this are rounding, no change."""


@dataclass(frozen=True)
class Difference:
    """The values of one metric for two submissions, and their difference."""

    first: float
    second: float
    mean: float  # second minus first
    low: float  # the ends of its 95% interval, by the paired bootstrap over examples
    high: float


@dataclass(frozen=True)
class Comparison:
    """Everything that `panjue compare` prints."""

    metric: str  # the task's headline metric
    differences: dict[str, Difference]
    examples: int
    won: int  # examples with a weight on which the second has a higher headline metric
    lost: int  # those on which it has a lower one
    compared_by: str | None = None  # how texts were compared, if the metrics compare texts
    unweighted: bool = False  # no example has one, so the means are unweighted


def check_runs(first: AnsweredFile, second: AnsweredFile, *, same_file: bool = True) -> None:
    """Refuse answers of two tasks, and with `same_file` answers to two test files."""
    pair = f"{first.folder} and {second.folder}"
    one = first.record
    other = second.record
    if one.task != other.task:
        raise UserError(f"{pair}: are runs of two tasks, {one.task} and {other.task}")
    if same_file and one.test_sha256 != other.test_sha256:
        raise UserError(
            f"{pair}: answered two test files, {one.test} and {other.test}; "
            "give --gold FILE if one gold file fits both"
        )


def compare_runs(reader: Reader, gold: Path, first: Path, second: Path) -> Comparison:
    """Compare two submissions: metrics, and examples won and lost."""
    task = reader.task
    rows = submission_rows(task, first)
    other_rows = submission_rows(task, second)
    check_same_cases(rows, other_rows, second)
    check_same_cases(other_rows, rows, first)
    values = scored(reader, gold, rows)
    other_values = scored(reader, gold, other_rows)
    changes = headlines(other_values) - headlines(values)
    unweighted = not values.weights.any()
    counts = (values.weights > 0) | unweighted
    return Comparison(
        metric=task.score.names[-1],
        differences=paired_differences(values, other_values),
        examples=len(changes),
        won=int((changes[counts] > TIE).sum()),
        lost=int((changes[counts] < -TIE).sum()),
        compared_by=task.score.compared_by,
        unweighted=unweighted,
    )


def check_same_cases(rows: Rows, other: Rows, path: Path) -> None:
    """Refuse `other`, the rows of `path`, if one of these rows is not in it."""
    missing = sorted(rows.ids() - other.ids())
    if missing:
        raise UserError(
            f"{path}: has no row for id {missing[0]} ({len(missing)} in all); no fair comparison"
        )


def headlines(values: MetricValues) -> Numbers:
    """Return the headline metric of each example, as if there were no other, [examples]."""
    return pooled(values.task, values.values, np.ones(len(values)))[:, -1]


def paired_differences(first: MetricValues, second: MetricValues) -> dict[str, Difference]:
    """Return metric -> difference, by a paired bootstrap (seed 0).

    Both are resampled with the same examples, so that common variation cancels out.
    """
    task = first.task
    weights = first.weights
    means = weighted_mean(task, weights, first.values)
    other_means = weighted_mean(task, weights, second.values)
    draws = resampled(task, weights, first.values, RESAMPLES)
    other_draws = resampled(task, weights, second.values, RESAMPLES)
    low, high = percentiles(other_draws - draws)
    numbers = np.stack([means, other_means, other_means - means, low, high], axis=1).tolist()
    return {name: Difference(*row) for name, row in zip(task.score.names, numbers, strict=True)}


def show_runs(comparison: Comparison, paths: tuple[Path, Path], console: Console) -> None:
    """Print the tables of a comparison."""
    title = comparison.compared_by and escape(comparison.compared_by)
    table = Table("metric", "first", "second", "second - first", "95% interval", title=title)
    for name, d in comparison.differences.items():
        table.add_row(
            name,
            f"{d.first:.4f}",
            f"{d.second:.4f}",
            f"{d.mean:+.4f}",
            f"{d.low:+.4f} - {d.high:+.4f}",
            style="bold" if name == comparison.metric else None,
        )
    console.print(table)
    for line in verdict(comparison, *map(str, paths)):
        console.print(line, highlight=False, markup=False)


def verdict(comparison: Comparison, first: str, second: str) -> Iterator[str]:
    """Yield which of the runs `first` and `second` is better, and on how many examples."""
    metric = comparison.metric
    change = comparison.differences[metric]
    if abs(change.mean) <= TIE:
        yield f"{metric}: {first} and {second} have equal means"
    elif not math.isnan(change.mean):
        better, worse = (second, first) if change.mean > 0 else (first, second)
        clear = "" if change.low > 0 or change.high < 0 else ", but the 95% interval contains 0"
        yield f"{metric}: {better} is better than {worse} by {abs(change.mean):.4f}{clear}"
    if comparison.unweighted:
        yield UNWEIGHTED
    alike = comparison.examples - comparison.won - comparison.lost
    counts = f"{comparison.won} examples won, {comparison.lost} lost, {alike} alike"
    yield f"{second} against {first}: {counts}"
