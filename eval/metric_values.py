"""Scoring: from gold and answers to metric values in arrays, and to metrics with intervals.

Every command that scores adds examples to a `MetricValues` and calls `summarize`. Of each example,
a metric that is a mean has one value, and a `CorpusMetric`, a function of sums, has several counts.
Examples of weight 0 do not count. If all weights are 0, all examples count as with weight 1.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import numpy as np
from numpy.typing import NDArray

from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.plumbing.decode import visible
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.progress import counted
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import CorpusMetric, Numbers, Row

RESAMPLES = 1000

Members = NDArray[np.int64]
"""Numbers of the examples of a group, in ascending order."""


class MetricValues:
    """The metric values, weight and groups of every example, in arrays, as there may be a million.

    The first example added has number 0.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.missing = 0  # number of examples without a row, which are scored as unanswered
        self._weights = array("d")
        self._values = array("d")  # those of the first example, then those of the next
        # Attribute -> group -> numbers of its examples: `{"court": {"甲": [0, 2], "乙": [1]}}`.
        self.groups: dict[str, dict[str, array[int]]] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, example: Example, values: Numbers) -> None:
        """Add an example with its metric values; its number is the next one."""
        for attribute, name in example.groups.items():
            groups = self.groups.setdefault(attribute, {})
            groups.setdefault(name, array("q")).append(len(self))
        self._weights.append(self.task.score.weight(example))
        self._values.frombytes(values.tobytes())

    @property
    def weights(self) -> Numbers:
        """Return the weights, [examples]. No example can be added while the array is in use."""
        return np.frombuffer(self._weights)

    @property
    def values(self) -> Numbers:
        """Return the metric values, [examples, values]. While in use, no example can be added."""
        return np.frombuffer(self._values).reshape(len(self), -1)

    def members(self, attribute: str) -> dict[str, Members]:
        """Return group -> its examples, by name; those without a group are in `UNKNOWN`."""
        members = {name: np.array(rows) for name, rows in self.groups[attribute].items()}
        is_known = np.zeros(len(self), dtype=bool)
        for name, rows in members.items():
            is_known[rows] = name != UNKNOWN
        if not is_known.all():
            members[UNKNOWN] = np.flatnonzero(~is_known)
        return dict(sorted(members.items()))


def submission_rows(task: Task, path: Path) -> Rows:
    """Return id -> row of a submission, or of the submission in a folder."""
    submission = task.data.submission
    return submission.index(submission.find(path))


def scored(reader: Reader, gold: Path, rows: Rows) -> MetricValues:
    """Return the metric values of all rows of a submission."""
    values = MetricValues(reader.task)
    for _ in score_rows(reader, gold, rows, values):
        pass
    return values


def score_rows(
    reader: Reader, gold: Path, rows: Rows, values: MetricValues
) -> Iterator[tuple[Example, Row, Row | None]]:
    """Add all examples of a gold file to `values`; yield each with its gold row and its row."""
    examples = reader.read(gold)
    beginning = list(islice(examples, COMPARED))
    if message := other_cases(reader, gold, rows, beginning):
        raise UserError(message)
    for example in counted(chain(beginning, examples), len(rows)):  # shows how many are scored
        if example.answer is None:
            raise UserError(
                f"{gold}: id {example.id} has no gold answer; give the labelled file "
                "(with `compare`: --gold FILE), or see the answers with `panjue report`"
            )
        gold_row = reader.task.gold(example)
        row = rows.get(example.id)
        place = f"{rows.path}: id {example.id}"
        values.add(example, metric_values(reader.task, gold_row, row, place))
        values.missing += row is None
        yield example, gold_row, row


def metric_values(task: Task, gold: Row, row: Row | None, place: str) -> Numbers:
    """Return the metric values of one submission row; None is the row of an unanswered example.

    `gold` comes from `Task.gold`.
    """
    values: list[float] = []
    try:
        for metric in task.score.metrics:
            if isinstance(metric, CorpusMetric):
                values += metric.counts(gold, row)
            else:
                values.append(metric(gold, row))
    except (UserError, KeyError, TypeError, AttributeError):
        raise UserError(f"{place} is not in the hand-in format; see `panjue check`") from None
    return np.array(values, dtype=np.float64)


def pooled(task: Task, sums: Numbers, weight: Numbers) -> Numbers:
    """Return the metrics, [..., metrics], from summed values, [..., values], and weights, [...]."""
    metrics = []
    start = 0
    for metric in task.score.metrics:
        if isinstance(metric, CorpusMetric):
            metrics.append(metric.value(sums[..., start : start + metric.width]))
            start += metric.width
        else:
            metrics.append(sums[..., start] / weight)
            start += 1
    return np.stack(metrics, axis=-1)


@dataclass(frozen=True)
class Summary:
    """Every metric over `examples` examples, with its 95% interval."""

    examples: int
    mean: dict[str, float]
    interval: dict[str, tuple[float, float]]
    """NaN if there is no interval: only one example counts, or no draw has a value."""
    counted: int  # examples that count: those with a weight, or all if all weights are 0
    unweighted: bool = False  # all weights are 0, so the means are unweighted


def counted_size(examples: int, counted: int) -> str:
    """Return a number of examples, with how many of them count if not all do: `9 (7 counted)`."""
    return str(examples) if counted == examples else f"{examples} ({counted} counted)"


def summarize(
    values: MetricValues, members: Members | None = None, *, resamples: int = RESAMPLES
) -> Summary:
    """Return the metrics with 95% percentile bootstrap intervals over examples (seed 0).

    If all weights are 0 (cases of one defendant in the official metric), the means are unweighted,
    and the summary says so. `members` selects the examples.
    """
    weights = values.weights
    numbers = values.values
    if members is not None:
        weights = weights[members]
        numbers = numbers[members]
    mean = weighted_metrics(values.task, weights, numbers)
    ends = np.full((2, len(mean)), np.nan)
    if resamples:
        ends = percentiles(resampled(values.task, weights, numbers, resamples))
    names = values.task.score.names
    intervals = map(tuple, ends.T.tolist())
    return Summary(
        examples=len(weights),
        mean=dict(zip(names, mean.tolist(), strict=True)),
        interval=dict(zip(names, intervals, strict=True)),
        counted=int(np.count_nonzero(or_ones(weights))),
        unweighted=not weights.any(),
    )


def summaries_by_group(
    values: MetricValues, attribute: str, *, resamples: int = RESAMPLES
) -> dict[str, Summary]:
    """Return the metrics of every group of an attribute; the group of the rest is `UNKNOWN`.

    A group whose weights are all 0 gets unweighted means. Its `counted` is 0 if another group has a
    weight, since then its examples do not count in the file.
    """
    has_weights = values.weights.any()
    summaries = {}
    for name, rows in values.members(attribute).items():
        summary = summarize(values, rows, resamples=resamples)
        if summary.unweighted and has_weights:
            summary = replace(summary, counted=0)
        summaries[name] = summary
    return summaries


def or_ones(weights: Numbers) -> Numbers:
    """Return the weights; ones if all are 0."""
    return weights if weights.any() else np.ones_like(weights)


def weighted_metrics(task: Task, weights: Numbers, values: Numbers) -> Numbers:
    """Return the metrics, [metrics], from the values of examples, [examples, values]."""
    weights = or_ones(weights)
    return pooled(task, weights @ values, weights.sum())


def resampled(task: Task, weights: Numbers, values: Numbers, resamples: int) -> Numbers:
    """Return the metrics of bootstrap draws (seed 0), [draws, metrics].

    Examples with weight 0 are not drawn: they would only make the draws smaller. If only one
    example counts, all metrics are NaN: every draw would be that example, and the interval a point.
    """
    generator = np.random.default_rng(0)
    weights = or_ones(weights)
    is_counted = weights > 0
    weights = weights[is_counted]
    values = values[is_counted]
    n = len(weights)
    if n == 1:
        return np.full((resamples, len(task.score.metrics)), np.nan)
    sums = np.empty((resamples, values.shape[1]))
    totals = np.empty(resamples)
    for i in range(resamples):
        counts = np.bincount(generator.integers(n, size=n), minlength=n)
        drawn = counts * weights
        sums[i] = drawn @ values
        totals[i] = drawn.sum()
    return pooled(task, sums, totals)


def percentiles(draws: Numbers) -> Numbers:
    """Return the ends of the 95% interval, [2, metrics], from [draws, metrics], without NaN."""
    with catch_warnings():
        filterwarnings("ignore", "All-NaN slice")
        return np.asarray(np.nanpercentile(draws, [2.5, 97.5], axis=0))


def without_nan(value: Any) -> Any:
    """Return a value for JSON, in which None replaces NaN at any depth."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, float) and np.isnan(value):
        return None
    return value


COMPARED = 100
"""Number of first examples of a file whose names are compared before scoring."""


def other_cases(reader: Reader, cases: Path, rows: Rows, beginning: Sequence[Example]) -> str:
    """Return a message if a submission with these rows answers other cases; else an empty text.

    They are others if their ids are all off by one, if no id is common, or if more than half of
    those compared have no name in common with their rows: files of other cases may have the same
    ids and some of the same names (张某). `beginning` has the first examples of `cases`.
    """
    if not beginning:
        raise UserError(f"{cases}: has no examples")
    if message := _numbered_from_another_start(reader, cases, rows, beginning[0]):
        return message
    compared = 0
    foreign = []  # one text for each case that has other names in the submission
    examples: Iterable[Example] = beginning
    if not any(rows.get(example.id) for example in beginning):
        examples = reader.read(cases)  # the first case with a row may come later in the file
    for example in examples:
        row = rows.get(example.id)
        if row is None:
            continue
        compared += 1
        names = item_names(reader.task, row)
        if names and example.names and set(names).isdisjoint(example.names):
            both = f"{'、'.join(example.names)} there and {'、'.join(names)} here"
            foreign.append(f"id {example.id} has {both}")
        if compared == COMPARED:
            break
    if len(foreign) > compared / 2:
        return (
            f"{rows.path}: names other defendants than {cases} in {len(foreign)} of {compared} "
            f"cases; {foreign[0]}; are these the right files?"
        )
    if len(rows) and not compared:
        return (
            f"{rows.path}: none of its {len(rows)} rows has an id of {cases}; "
            "are these the right files?"
        )
    return ""


def _numbered_from_another_start(reader: Reader, cases: Path, rows: Rows, first: Example) -> str:
    """Return a message if all ids of a submission are those of the cases plus or minus 1.

    For example, cases numbered from 0 were answered by line, from 1; or the reverse. `first` is the
    first case.
    """
    if not isinstance(first.id, int):
        return ""
    if rows.get(first.id) is None:
        step = 1  # the cases begin at 0, the rows perhaps at 1
    elif rows.get(first.id - 1) is not None:
        step = -1  # the rows begin before the cases
    else:  # the usual case: the first id alone shows that the numbers are alike
        return ""
    numbers = [example.id for example in reader.read(cases) if isinstance(example.id, int)]
    key_of = reader.task.data.submission.same  # from an id to the key that joins rows and cases
    if {key_of(number + step) for number in numbers} != rows.ids():
        return ""
    low = min(numbers)
    high = max(numbers)
    return (
        f"{rows.path}: has the ids {low + step} to {high + step}, and {cases} has {low} to {high}: "
        "number both alike"
    )


def item_names(task: Task, row: Row) -> list[str]:
    """Return the names in a submission row, as in `Example.names`; none in rows of another form."""
    with suppress(KeyError, TypeError):
        return [visible(str(item["name"])) for item in task.answer.items_of(row)]
    return []
