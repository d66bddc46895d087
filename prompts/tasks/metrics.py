"""The definition of a metric, and metrics that several tasks share.

A metric is a `CorpusMetric`, or a pure function from (gold row, predicted row) of one example to a
number. The score is the mean of this number over the examples, weighted by the task. The predicted
row is None if the submission has no row for the example.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.prompts.plumbing.decode import visible
from panjue.prompts.plumbing.files import dump

Numbers = NDArray[np.float64]
Row = Mapping[str, Any]
"""One row of a submission, or a gold row."""


@dataclass(frozen=True)
class CorpusMetric:
    """A metric of all examples together, computed from sums of counts, e.g. macro F1."""

    name: str
    width: int
    """Number of counts for each example."""
    counts: Callable[[Row, Row | None], Sequence[float]]
    value: Callable[[Numbers], Numbers]
    """From sums of counts, [..., width], to the metric, [...]."""


Metric = Callable[[Row, Row | None], float] | CorpusMetric


def name_of(metric: Metric) -> str:
    return metric.name if isinstance(metric, CorpusMetric) else metric.__name__


def overlap_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """F1 of two multisets; 1 if both are empty, 0 if only one is."""
    if not gold or not predicted:
        return float(gold == predicted)
    overlap = (Counter(gold) & Counter(predicted)).total()
    return 2 * overlap / (len(gold) + len(predicted))


def numbered(names: Iterable[Any]) -> list[tuple[str, int]]:
    """Return each name with the number of equal names before it: 李某, 李某 -> 0 and 1.

    Persons of the same name are told apart only by their position. Names may be equal despite
    invisible characters and other Unicode normalization.
    """
    counts: dict[str, int] = {}
    keys = []
    for name in names:
        plain = unicodedata.normalize("NFC", visible(str(name)))
        before = counts.get(plain, 0)
        keys.append((plain, before))
        counts[plain] = before + 1
    return keys


def by_name(items: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Return (name, number of equal names before it) -> item, in order."""
    return dict(zip(numbered(item.get("name") for item in items), items, strict=True))


@dataclass(frozen=True)
class Field:
    """One field of an answer: gold and predicted texts in order, and whether they match."""

    name: str
    gold: Sequence[str]
    predicted: Sequence[str]
    correct: bool


Item = tuple[str, list[Field]]
"""Name of an item of the answer (empty for the whole example), and its fields."""


def field_of(name: str, gold: Iterable[str], predicted: Iterable[str]) -> Field:
    """Return a field that is right if both sides have the same set of values."""
    golds = list(gold)
    predictions = list(predicted)
    return Field(name, golds, predictions, set(golds) == set(predictions))


def texts(value: Any) -> list[str]:
    """Return a value as a list of texts, which is empty for None and ""."""
    if value in (None, ""):
        return []
    items = value if isinstance(value, list | tuple) else [value]
    return [item if isinstance(item, str) else dump(item) for item in items]
