"""What a metric is, and those that several tasks have.

A metric is a pure function from one example's (gold row, predicted row) of a submission to a
number, whose mean over examples, weighted by the task, is the score; or it is a `CorpusMetric`. A
predicted row is None where the submission has no row for the example.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.prompts.plumbing.files import dump

Numbers = NDArray[np.float64]
Row = Mapping[str, Any]
"""One row of a submission, or what such a row is scored against."""


@dataclass(frozen=True)
class CorpusMetric:
    """A metric of all examples together, from counts of each that add up: macro F1, say.

    Attributes:
        name: What it is called.
        width: How many counts there are.
        counts: Gold row, submission row or None -> the counts of one example.
        value: Their sums, [..., width] -> the metric, [...].
    """

    name: str
    width: int
    counts: Callable[[Row, Row | None], Sequence[float]]
    value: Callable[[Numbers], Numbers]


Metric = Callable[[Row, Row | None], float] | CorpusMetric


def name_of(metric: Metric) -> str:
    """Return what a metric is called."""
    return metric.name if isinstance(metric, CorpusMetric) else metric.__name__


def exact_match(gold: Row, predicted: Row | None) -> float:
    """Return 1 where every field but the id is predicted as gold has it, else 0."""
    keys = gold.keys() - {"id"}
    return float(predicted is not None and all(predicted.get(key) == gold[key] for key in keys))


def overlap_f1(wanted: Sequence[str], given: Sequence[str]) -> float:
    """F1 of two multisets, in any order; if either is empty, 1 where both are."""
    if not wanted or not given:
        return float(wanted == given)
    both = (Counter(wanted) & Counter(given)).total()
    return 2 * both / (len(wanted) + len(given))


@dataclass(frozen=True)
class Field:
    """One field of an answer, gold and told, as texts in order; and whether it is right."""

    name: str
    gold: Sequence[str]
    told: Sequence[str]
    right: bool


Item = tuple[str, list[Field]]
"""Who or what is answered, nothing where it is the whole example; and its fields."""

Shown = Callable[[Row, Row | None], Iterator[Item]]


def same(name: str, gold: Any, told: Any) -> Field:
    """Return a field that is right where both have the same values, in whatever order."""
    gold, told = list(gold), list(told)
    return Field(name, gold, told, set(gold) == set(told))


def texts(value: Any) -> list[str]:
    """Return a value as texts: those of a list, the one that it is, none of nothing."""
    listed = value if isinstance(value, list | tuple) else [] if value in (None, "") else [value]
    return [one if isinstance(one, str) else dump(one) for one in listed]
