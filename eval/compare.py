"""Two submissions on the same gold: the difference, and how sure it is."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from panjue.eval.means import Columns, gold_rows, metric_values, pooled, resampled
from panjue.prompts.errors import UserError
from panjue.prompts.files import Rows
from panjue.prompts.task import Task

RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """One metric of two submissions.

    Attributes:
        mean: First less second.
        low, high: 95% percentile interval of the paired bootstrap over examples.
        better: Share of the resamples in which the first is better.
    """

    mean: float
    low: float
    high: float
    better: float


def compare(task: Task, gold: Path, first: Path, second: Path) -> dict[str, Difference]:
    """Return metric -> difference between `first` and `second`, by a paired bootstrap (seed 0).

    Both submissions are resampled with the same examples, so that what they share cancels out.

    Raises:
        UserError: A file is missing or broken, a gold example has no answer, or `second` answers
            none of an example that `first` answers: a part of a file is no peer.
    """
    rows = [task.handin.index(task.handin.find(path)) for path in (first, second)]
    if lost := sorted(rows[0].ids() - rows[1].ids()):
        raise UserError(f"{second}: has no row for id {lost[0]} ({len(lost)} in all); no fair peer")
    columns = [_columns(task, gold, of_one) for of_one in rows]
    weights = np.array(columns[0].weights)
    if not weights.any():
        weights = np.ones_like(weights)
    values = [np.array(of_one.values) for of_one in columns]
    # Both with the same seed, so draw for draw on the same examples.
    drawn = [resampled(task, weights, of_one, RESAMPLES) for of_one in values]
    gain = drawn[0] - drawn[1]
    low, high = np.percentile(gain, [2.5, 97.5], axis=0)
    whole = [pooled(task, weights @ of_one, weights.sum()) for of_one in values]
    mean, better = whole[0] - whole[1], (gain > 0).mean(axis=0)
    numbers = zip(mean.tolist(), low.tolist(), high.tolist(), better.tolist(), strict=True)
    return {name: Difference(*row) for name, row in zip(task.scores, numbers, strict=True)}


def _columns(task: Task, gold: Path, rows: Rows) -> Columns:
    columns = Columns(task)
    for example, right in gold_rows(task, gold):
        place = f"{rows.path}: id {example.id}"
        values = metric_values(task, right, rows.get(example.id), place)
        columns.add(example, task.weight(example), values)
    if not columns.weights:
        raise UserError(f"{gold}: has no examples")
    return columns


def show(
    differences: dict[str, Difference], against: Path, console: Console, title: str | None = None
) -> None:
    """Print the table."""
    table = Table(f"less {against}", "difference", "95% interval", "better in", title=title)
    for name, d in differences.items():
        interval = f"{d.low:+.4f} - {d.high:+.4f}"
        table.add_row(name, f"{d.mean:+.4f}", interval, f"{d.better:.1%} of resamples")
    console.print(table)
