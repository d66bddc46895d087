"""Compare two submissions on the same gold: the differences with intervals, and where they are."""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from panjue.eval.answers import AnsweredFile
from panjue.eval.fields import items_of
from panjue.eval.values import MetricValues, percentiles, pooled, resampled, score_rows
from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Numbers, Row

RESAMPLES = 10_000

TIE = 1e-9
"""Differences up to this are rounding, no change."""

MAX_SHOWN_VALUES = 10
"""Values of an attribute that are printed: those with the largest changes."""


@dataclass(frozen=True)
class Difference:
    """The values of one metric for two submissions, and their difference.

    Attributes:
        mean: Second minus first.
        low, high: 95% percentile interval of the paired bootstrap over examples.
    """

    first: float
    second: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Part:
    """The change of the headline metric on some of the examples.

    Attributes:
        won, lost: Examples on which the second is better, or worse, than the first.
        mean: Second minus first, the unweighted mean over these examples.
    """

    examples: int
    won: int
    lost: int
    mean: float


@dataclass(frozen=True)
class Comparison:
    """Everything that `panjue compare` prints.

    Attributes:
        metric: The task's headline metric; by it examples are won or lost.
        all: The change of the headline over all examples.
        where: Attribute -> its value -> the change on its examples; the most changed first.
        compared_by: How texts were compared, if the metrics compare texts.
    """

    metric: str
    differences: dict[str, Difference]
    all: Part
    where: dict[str, dict[str, Part]]
    compared_by: str | None = None


def check_runs(first: AnsweredFile, second: AnsweredFile, *, same_file: bool = True) -> None:
    """Refuse answers of two tasks, and with `same_file` answers to two test files."""
    pair = f"{first.folder} and {second.folder}"
    one, other = first.record, second.record
    if one.task != other.task:
        raise UserError(f"{pair}: are runs of two tasks, {one.task} and {other.task}")
    if same_file and one.test_sha256 != other.test_sha256:
        raise UserError(
            f"{pair}: answered two test files, {one.test} and {other.test}; "
            "give --gold FILE if one gold file fits both"
        )


def compare_runs(reader: Reader, gold: Path, first: Path, second: Path) -> Comparison:
    """Compare two submissions: metrics, examples won and lost, and where."""
    task, submission = reader.task, reader.task.data.submission
    rows = [submission.index(submission.find(path)) for path in (first, second)]
    for one, other, path in ((rows[0], rows[1], second), (rows[1], rows[0], first)):
        if missing := sorted(one.ids() - other.ids()):
            raise UserError(
                f"{path}: has no row for id {missing[0]} ({len(missing)} in all); "
                "no fair comparison"
            )
    values = [MetricValues(task), MetricValues(task)]
    for _ in score_rows(reader, gold, rows[0], values[0]):
        pass
    members: dict[str, dict[str, array[int]]] = defaultdict(lambda: defaultdict(lambda: array("q")))
    for number, scored in enumerate(score_rows(reader, gold, rows[1], values[1])):
        for attribute, value in _attributes(task, scored.example, scored.gold):
            members[attribute][value].append(number)
    # A corpus metric of one example is computed as if the corpus had only this example.
    headlines = [pooled(task, of.values, np.ones(len(of)))[:, -1] for of in values]
    changes = headlines[1] - headlines[0]
    return Comparison(
        metric=task.score.names[-1],
        differences=_differences(*values),
        all=_part(changes),
        where={attribute: _parts(changes, of) for attribute, of in members.items()},
        compared_by=task.score.compared_by,
    )


def _attributes(task: Task, example: Example, gold: Row) -> Iterator[tuple[str, str]]:
    """Yield (attribute, value) once each: groups, gold classes, gold values of class fields."""
    class_fields = task.answer.classes if task.answer.items else ()
    reserved = {"class", *class_fields}
    pairs = [
        (f"group {name}" if name in reserved else name, value)
        for name, value in example.groups.items()
    ]
    if task.score.classes:
        pairs += [("class", str(name)) for name in task.score.classes(gold)]
    if class_fields:
        fields = (field for _, fields in items_of(task, gold, None) for field in fields)
        pairs += [(f.name, value) for f in fields if f.name in class_fields for value in f.gold]
    yield from dict.fromkeys(pairs)


def _part(changes: Numbers) -> Part:
    won, lost = int((changes > TIE).sum()), int((changes < -TIE).sum())
    return Part(len(changes), won, lost, float(changes.mean()))


def _parts(changes: Numbers, members: "dict[str, array[int]]") -> dict[str, Part]:
    """Return the change on the examples of every value, the most changed first."""
    parts = {value: _part(changes[np.asarray(numbers)]) for value, numbers in members.items()}
    return dict(sorted(parts.items(), key=lambda item: -abs(item[1].mean) * item[1].examples))


def _differences(first: MetricValues, second: MetricValues) -> dict[str, Difference]:
    """Return metric -> difference, by a paired bootstrap (seed 0).

    Both are resampled with the same examples, so that common variation cancels out.
    """
    task, weights, both = first.task, first.weights, (first.values, second.values)
    if not weights.any():
        weights = np.ones_like(weights)
    draws = [resampled(task, weights, values, RESAMPLES) for values in both]
    means = [pooled(task, weights @ values, weights.sum()) for values in both]
    columns = (*means, means[1] - means[0], *percentiles(draws[1] - draws[0]))
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    return {name: Difference(*row) for name, row in zip(task.score.names, numbers, strict=True)}


def short_names(first: Path, second: Path) -> tuple[str, str]:
    """Return the shortest tails of two paths that differ; of equal paths, the last part."""
    parts, others = first.absolute().parts, second.absolute().parts
    size = 1
    while parts != others and parts[-size:] == others[-size:]:
        size += 1
    return str(Path(*parts[-size:])), str(Path(*others[-size:]))


def show_runs(comparison: Comparison, paths: tuple[Path, Path], console: Console) -> None:
    """Print the tables of a comparison."""
    first, second = short_names(*paths)
    difference = f"{second} minus {first}"
    title = comparison.compared_by and escape(comparison.compared_by)
    headings = (escape(name) for name in (first, second, difference))
    table = Table("metric", *headings, "95% interval", title=title)
    for name, d in comparison.differences.items():
        style = "bold" if name == comparison.metric else None
        values = (f"{d.first:.4f}", f"{d.second:.4f}")
        interval = f"{d.low:+.4f} - {d.high:+.4f}"
        table.add_row(name, *values, f"{d.mean:+.4f}", interval, style=style)
    console.print(table)
    for line in verdict(comparison, first, second):
        console.print(line, highlight=False, markup=False)
    for attribute, parts in comparison.where.items():
        changed = {value: part for value, part in parts.items() if part.won or part.lost}
        if changed:
            table = _attribute_table(attribute, changed, comparison.metric, difference)
            console.print(table)


def verdict(comparison: Comparison, first: str, second: str) -> Iterator[str]:
    """Yield which of the runs `first` and `second` is better, and on how many examples."""
    metric, change = comparison.metric, comparison.differences[comparison.metric]
    if abs(change.mean) <= TIE:
        yield f"{metric}: {first} and {second} are equal"
    elif not math.isnan(change.mean):
        better, worse = (second, first) if change.mean > 0 else (first, second)
        clear = "" if change.low > 0 or change.high < 0 else ", but the 95% interval contains 0"
        yield f"{metric}: {better} is better than {worse} by {abs(change.mean):.4f}{clear}"
    everything = comparison.all
    alike = everything.examples - everything.won - everything.lost
    yield (
        f"{second} against {first}: {everything.won} examples won, {everything.lost} lost, "
        f"{alike} alike"
    )


def _attribute_table(attribute: str, parts: dict[str, Part], metric: str, difference: str) -> Table:
    is_cut = len(parts) > MAX_SHOWN_VALUES
    more = f", {MAX_SHOWN_VALUES} of {len(parts)} that changed" if is_cut else ""
    title = escape(f"{metric} by {attribute}{more}")
    mean = escape(f"mean of {difference}")
    table = Table(escape(attribute), "examples", "won", "lost", mean, title=title)
    for value, part in list(parts.items())[:MAX_SHOWN_VALUES]:
        numbers = (str(part.examples), str(part.won), str(part.lost), f"{part.mean:+.4f}")
        table.add_row(escape(value), *numbers)
    return table
