"""Macro F1 of one class, or a set of classes, per example."""

from collections.abc import Sequence

import numpy as np

from panjue.eval.means import Numbers, Pooled
from panjue.prompts.task import Row


def macro_f1(classes: int, names: Sequence[str] = ()) -> Pooled:
    """Return macro F1 over the classes 0 to `classes` - 1 that are gold or predicted somewhere.

    Where rows have `names` instead, a class is its place there. As scikit-learn's
    `f1_score(average="macro", zero_division=0)` has it for one class per example. An empty set of
    classes is a class of its own, as in FairLex. An example without a row misses its gold classes
    and predicts none.
    """
    width = classes + 1

    def counts(gold: Row, predicted: Row | None) -> Sequence[float]:
        wanted = _marked(gold, classes, names)
        given = np.zeros(width) if predicted is None else _marked(predicted, classes, names)
        found: list[float] = np.concatenate([wanted * given, wanted, given]).tolist()
        return found

    def value(sums: Numbers) -> Numbers:
        f1 = f1_by_class(sums)
        present = ~np.isnan(f1)
        scores: Numbers = np.where(present, f1, 0).sum(-1) / np.maximum(present.sum(-1), 1)
        return scores

    return Pooled(3 * width, counts, value)


def f1_by_class(sums: Numbers) -> Numbers:
    """Return F1, [..., classes + 1], from summed counts; NaN for a class that never occurs."""
    right, wanted, given = np.split(sums, 3, axis=-1)
    with np.errstate(invalid="ignore"):
        found: Numbers = 2 * right / (wanted + given)
    return found


def accuracy(gold: Row, predicted: Row | None) -> float:
    """Return 1 where exactly the gold classes are predicted."""
    return float(predicted is not None and classes_of(predicted) == classes_of(gold))


def classes_of(row: Row) -> set[int | str]:
    """Return the classes of a row: its `label`, or its `labels`.

    Raises:
        TypeError: They are neither numbers nor names.
    """
    found = row["labels"] if "labels" in row else [row["label"]]
    if not isinstance(found, list) or not all(type(one) in (int, str) for one in found):
        raise TypeError
    return set(found)


def _marked(row: Row, classes: int, names: Sequence[str]) -> Numbers:
    """Return 1 for every class of a row, [classes + 1]; the last one is of an empty set."""
    marks = np.zeros(classes + 1)
    known: Sequence[int | str] = names or range(classes)
    found = classes_of(row)
    if not found <= set(known):
        raise TypeError
    marks[[known.index(one) for one in found] or classes] = 1
    return marks
