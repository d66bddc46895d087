"""Two submissions on the same gold: the difference, and how sure it is."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from panjue.eval.answers import Run
from panjue.eval.fields import items_of
from panjue.eval.means import (
    ScoreTable,
    check_answered,
    gold_rows,
    metric_values,
    percentiles,
    plain,
    pooled,
    resampled,
    summarize,
)
from panjue.prompts.example import Decide, Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Numbers, Row

RESAMPLES = 10_000

TIE = 1e-9
"""Differences up to this are the order of additions, no change."""

SHOWN = 10
"""Values of an attribute that are shown: those with most of the change."""


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


@dataclass(frozen=True)
class Part:
    """Some of the examples: how the headline metric changed there.

    Attributes:
        won, lost: Examples on which the second is better, or worse, than the first.
        mean: Second less first, over all of these examples alike.
    """

    examples: int
    won: int
    lost: int
    mean: float


@dataclass(frozen=True)
class Comparison:
    """Everything that `panjue compare` prints.

    Attributes:
        metric: The task's headline metric, by which examples are won and lost.
        first, second: Metric -> its value.
        differences: Metric -> second less first.
        all: The headline over all examples, each counting alike.
        where: Attribute -> its value -> the examples that have it; the most changed first.
        compared_by: What texts were compared by, where the metrics compare any.
    """

    metric: str
    first: dict[str, float]
    second: dict[str, float]
    differences: dict[str, Difference]
    all: Part
    where: dict[str, dict[str, Part]]
    compared_by: str | None = None

    @property
    def is_worse(self) -> bool:
        """Say whether the second has the lower headline, or none."""
        return not self.differences[self.metric].mean >= -TIE

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        found: dict[str, Any] = plain(asdict(self))
        return found


def check_runs(first: Run, second: Run, *, same_file: bool = True) -> None:
    """Refuse runs that were asked different things, unless both are compared with other gold.

    Raises:
        UserError: Names both and what differs.
    """
    pair = f"{first.folder} and {second.folder}"
    if first.provenance["task"] != second.provenance["task"]:
        told = f"{first.provenance['task']} and {second.provenance['task']}"
        raise UserError(f"{pair}: are runs of two tasks, {told}")
    if same_file and first.provenance["test_sha256"] != second.provenance["test_sha256"]:
        told = f"{first.provenance['test']} and {second.provenance['test']}"
        raise UserError(
            f"{pair}: answered two test files, {told}; say --gold FILE if it is of both"
        )


def compare_runs(reader: Reader, gold: Path, first: Path, second: Path) -> Comparison:
    """Compare two submissions: metrics, examples won and lost, and where.

    Raises:
        UserError: As for `compare`; or one answers examples that the other does not.
    """
    task = reader.task
    rows = _indexes(task, first, second)
    _check_covers(rows[1], rows[0], first)
    columns = [_columns(reader, gold, of_one) for of_one in rows]
    # Of a metric that is of all examples together, an example's value is that of it alone.
    alone = [pooled(task, np.array(c.values), np.ones(len(c.values)))[:, -1] for c in columns]
    changes = alone[1] - alone[0]
    found: dict[str, dict[str, list[int]]] = {}
    for place, (example, right) in enumerate(gold_rows(reader, gold)):
        for attribute, value in _attributes(task, example, right):
            found.setdefault(attribute, {}).setdefault(value, []).append(place)
    where = {
        attribute: {value: _part(changes[places]) for value, places in values.items()}
        for attribute, values in found.items()
    }
    return Comparison(
        metric=task.score.names[-1],
        first=summarize(columns[0], resamples=0).mean,
        second=summarize(columns[1], resamples=0).mean,
        differences=_differences(task, columns[1], columns[0]),
        all=_part(changes),
        where={attribute: _most_changed(parts) for attribute, parts in where.items()},
        compared_by=task.score.compared_by,
    )


def _attributes(task: Task, example: Example, right: Row) -> Iterator[tuple[str, str]]:
    """Yield what an example is reported by: its groups, its classes, what is decided by class."""
    classes = task.answer.classes if isinstance(task.answer, Decide) else ()
    reported = {"class", *classes}
    found: dict[tuple[str, str], None] = {
        (f"group {name}" if name in reported else name, value): None
        for name, value in example.groups.items()
    }
    if task.score.classes:
        found |= {("class", str(name)): None for name in task.score.classes(right)}
    if classes:
        for one in (one for _, fields in items_of(task, right, None) for one in fields):
            if one.name in classes:
                found |= {(one.name, value): None for value in one.gold}
    yield from found


def _part(changes: Numbers) -> Part:
    won, lost = int((changes > TIE).sum()), int((changes < -TIE).sum())
    return Part(len(changes), won, lost, float(changes.mean()))


def _most_changed(parts: dict[str, Part]) -> dict[str, Part]:
    order = sorted(parts, key=lambda name: -abs(parts[name].mean) * parts[name].examples)
    return {name: parts[name] for name in order}


def compare(reader: Reader, gold: Path, first: Path, second: Path) -> dict[str, Difference]:
    """Return metric -> difference between `first` and `second`, by a paired bootstrap (seed 0).

    Both submissions are resampled with the same examples, so that what they share cancels out.

    Raises:
        UserError: A file is missing or broken, a gold example has no answer, or `second` answers
            none of an example that `first` answers: a part of a file is no baseline.
    """
    columns = [_columns(reader, gold, of_one) for of_one in _indexes(reader.task, first, second)]
    return _differences(reader.task, columns[0], columns[1])


def _indexes(task: Task, first: Path, second: Path) -> list[Rows]:
    rows = [task.data.submission.index(task.data.submission.find(path)) for path in (first, second)]
    _check_covers(rows[0], rows[1], second)
    return rows


def _check_covers(rows: Rows, others: Rows, path: Path) -> None:
    if lost := sorted(rows.ids() - others.ids()):
        raise UserError(
            f"{path}: has no row for id {lost[0]} ({len(lost)} in all); no fair comparison"
        )


def _differences(task: Task, first: ScoreTable, second: ScoreTable) -> dict[str, Difference]:
    columns = (first, second)
    weights = np.array(first.weights)
    if not weights.any():
        weights = np.ones_like(weights)
    values = [np.array(of_one.values) for of_one in columns]
    # Both with the same seed, so draw for draw on the same examples.
    drawn = [resampled(task, weights, of_one, RESAMPLES) for of_one in values]
    gain = drawn[0] - drawn[1]
    low, high = percentiles(gain)
    whole = [pooled(task, weights @ of_one, weights.sum()) for of_one in values]
    mean, better = whole[0] - whole[1], (gain > 0).mean(axis=0)
    numbers = zip(mean.tolist(), low.tolist(), high.tolist(), better.tolist(), strict=True)
    return {name: Difference(*row) for name, row in zip(task.score.names, numbers, strict=True)}


def _columns(reader: Reader, gold: Path, rows: Rows) -> ScoreTable:
    task = reader.task
    columns, answered = ScoreTable(task), 0
    for example, right in gold_rows(reader, gold):
        row = rows.get(example.id)
        values = metric_values(task, right, row, f"{rows.path}: id {example.id}")
        columns.add(example, task.score.weight(example), values)
        answered += row is not None
    check_answered(gold, len(columns.weights), rows.path, len(rows), answered)
    return columns


def show(
    differences: dict[str, Difference], against: Path, console: Console, title: str | None = None
) -> None:
    """Print the table."""
    title = escape(title) if title else None
    table = Table(escape(f"less {against}"), "difference", "95% interval", "better in", title=title)
    for name, d in differences.items():
        interval = f"{d.low:+.4f} - {d.high:+.4f}"
        table.add_row(name, f"{d.mean:+.4f}", interval, f"{d.better:.1%} of resamples")
    console.print(table)


def show_runs(found: Comparison, paths: tuple[Path, Path], console: Console) -> None:
    """Print the tables of a comparison."""
    for name, path in zip(("first", "second"), paths, strict=True):
        console.print(f"{name}: {path}", highlight=False, markup=False)
    title = found.compared_by and escape(found.compared_by)
    table = Table("metric", "first", "second", "difference", "95% interval", title=title)
    for name, d in found.differences.items():
        style = "bold" if name == found.metric else None
        each = (f"{found.first[name]:.4f}", f"{found.second[name]:.4f}")
        interval = f"{d.low:+.4f} - {d.high:+.4f}"
        table.add_row(name, *each, f"{d.mean:+.4f}", interval, style=style)
    console.print(table)
    console.print(
        f"{found.metric}: {found.all.won} examples won, {found.all.lost} lost, "
        f"{found.all.examples - found.all.won - found.all.lost} alike",
        highlight=False,
    )
    for attribute, parts in found.where.items():
        changed = {value: part for value, part in parts.items() if part.won or part.lost}
        if changed:
            console.print(_where(attribute, changed, found))


def _where(attribute: str, parts: dict[str, Part], found: Comparison) -> Table:
    more = f", {SHOWN} of {len(parts)} that changed" if len(parts) > SHOWN else ""
    title = escape(f"{found.metric} by {attribute}{more}")
    table = Table(escape(attribute), "examples", "won", "lost", "mean difference", title=title)
    for value, part in list(parts.items())[:SHOWN]:
        numbers = (str(part.examples), str(part.won), str(part.lost), f"{part.mean:+.4f}")
        table.add_row(escape(value), *numbers)
    return table
