"""Compare two submissions on the same gold: differences with intervals, and changed examples."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from panjue.eval.metric_values import (
    MetricValues,
    or_ones,
    percentiles,
    pooled,
    resampled,
    score_rows,
    scored,
    submission_rows,
    weighted_metrics,
)
from panjue.prompts.plumbing.errors import UserError, printable
from panjue.prompts.plumbing.intervals import interval_text
from panjue.prompts.reader import Reader
from panjue.prompts.tasks.metrics import Numbers
from panjue.serve.answers import Answered

PAIRED_RESAMPLES = 10_000

TIE = 1e-9
"""Differences of scores up to this are rounding and count as none."""


@dataclass(frozen=True)
class Difference:
    """The values of one metric for two submissions, and their difference."""

    first: float
    second: float
    mean: float  # second minus first
    low: float  # ends of its 95% interval, by the paired bootstrap over examples; NaN if none
    high: float


@dataclass(frozen=True)
class Comparison:
    """Everything that `panjue compare` prints."""

    differences: dict[str, Difference]
    examples: int
    counted: int  # examples with a weight, or all if all weights are 0
    won: list[int | str]
    """Ids of examples that count and on which the second has a higher headline metric; the largest
    changes come first."""
    lost: list[int | str]  # ids of those on which it has a lower one

    @property
    def alike(self) -> int:
        """Return the number of examples that count and that neither submission has won."""
        return self.counted - len(self.won) - len(self.lost)


def check_runs(first: Answered, second: Answered, *, same_file: bool = True) -> None:
    """Refuse answers of different tasks; with `same_file`, also answers to different test files."""
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
    """Compare two submissions, or those of two run folders, which must answer the same ids."""
    task = reader.task
    rows = submission_rows(task, first)
    other_rows = submission_rows(task, second)
    if unpaired := sorted(rows.ids() ^ other_rows.ids()):
        raise UserError(
            f"{second}: has rows of other ids than {first}: {len(unpaired)} are in only one, "
            f"id {unpaired[0]} for example; no fair comparison"
        )
    values = MetricValues(task)
    ids = [example.id for example, _, _ in score_rows(reader, gold, rows, values)]
    other_values = scored(reader, gold, other_rows)
    changes = headline_values(other_values) - headline_values(values)
    weights = or_ones(values.weights)
    changes[weights == 0] = 0  # these examples do not count
    best_first = np.argsort(-changes, kind="stable")
    worst_first = np.argsort(changes, kind="stable")
    return Comparison(
        differences=paired_differences(values, other_values),
        examples=len(values),
        counted=int(np.count_nonzero(weights)),
        won=[ids[place] for place in best_first if changes[place] > TIE],
        lost=[ids[place] for place in worst_first if changes[place] < -TIE],
    )


def headline_values(values: MetricValues) -> Numbers:
    """Return the headline metric of each example alone, [examples]."""
    # `pooled` takes sums over examples. Of one example they are its values, and its weight is 1.
    metrics = pooled(values.task, values.values, np.ones(len(values)))  # [examples, metrics]
    return metrics[:, -1]  # the headline metric is a task's last


def paired_differences(first: MetricValues, second: MetricValues) -> dict[str, Difference]:
    """Return metric -> difference, by a paired bootstrap: both use the same draws (seed 0)."""
    task = first.task
    weights = first.weights
    means = weighted_metrics(task, weights, first.values)
    other_means = weighted_metrics(task, weights, second.values)
    draws = resampled(task, weights, first.values, PAIRED_RESAMPLES)
    other_draws = resampled(task, weights, second.values, PAIRED_RESAMPLES)
    low, high = percentiles(other_draws - draws)
    differences = {}
    for number, name in enumerate(task.score.names):
        differences[name] = Difference(
            first=float(means[number]),
            second=float(other_means[number]),
            mean=float(other_means[number] - means[number]),
            low=float(low[number]),
            high=float(high[number]),
        )
    return differences


def names_of(first: Answered, second: Answered) -> tuple[str, str]:
    """Return the names of two folders of answers, or their paths if the names are equal."""
    if first.name != second.name:
        return first.name, second.name
    return str(first.folder), str(second.folder)


def show_runs(comparison: Comparison, first: str, second: str, console: Console) -> None:
    """Print the table of a comparison, and the examples on which the run `second` is better."""
    names = [Column(Text(name), overflow="fold") for name in (first, second)]
    interval = Column("95% interval", no_wrap=True)
    table = Table(Column("metric", no_wrap=True), *names, "second - first", interval)
    headline = list(comparison.differences)[-1]
    for name, of in comparison.differences.items():
        table.add_row(
            name,
            f"{of.first:.4f}",
            f"{of.second:.4f}",
            f"{of.mean:+.4f}",
            interval_text((of.low, of.high), "+.4f"),
            style="bold" if name == headline else None,
        )
    console.print(table)
    for line in won_and_lost(comparison, first, second):
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def won_and_lost(comparison: Comparison, first: str, second: str) -> Iterator[str]:
    """Yield how many examples were won and lost, and which."""
    won = len(comparison.won)
    lost = len(comparison.lost)
    counts = f"{won} examples won, {lost} lost, {comparison.alike} alike"
    if uncounted := comparison.examples - comparison.counted:
        counts += f"; {uncounted} have weight 0 and count for nothing"
    yield f"{second} against {first}: {counts}"
    for what, ids in (("won", comparison.won), ("lost", comparison.lost)):
        if ids:
            yield f"{what}, the largest change first: {', '.join(map(str, ids))}"
