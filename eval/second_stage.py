"""The text classifier's second stage: boosted trees over the scores of the whole case.

A label set has one row for each item and candidate label, with the label's scores for this item and
for the others of the case; the trees correct the calibrated score. A class, which comes after the
sets, has one row for each item: the classes that training gave to items of such sets, and what the
task reads as evidence. finetune/second_stage.py fits both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

if TYPE_CHECKING:
    import lightgbm

Array = NDArray[Any]

CANDIDATES = 8
"""Labels of an item that are looked at: those of the highest scores. The others get no chance."""


@dataclass(frozen=True)
class Items:
    """The items of cases, those of one case side by side."""

    sizes: Array  # items of each case, [cases]
    scores: Mapping[str, Array]
    """Field -> first-stage scores by the whole text and by the own clauses, [2, items, labels]."""
    facts: Array  # what the text says of each item, [items, any]

    @property
    def counts(self) -> Array:
        """Return how many items the case of each item has, [items]."""
        return np.repeat(self.sizes, self.sizes)

    def over_case(self, how: np.ufunc, values: Array) -> Array:
        """Return the sum or maximum of values over the items of each item's case."""
        starts = np.cumsum(self.sizes) - self.sizes
        return np.repeat(how.reduceat(values, starts), self.sizes, axis=0)


PLACES = ("number", "of", "place", "length", "own length", "named", "first named")
"""Facts that say where an item stands; of these alone the label sets know."""


@dataclass(frozen=True)
class Candidates:
    """The labels that items may have, each in a row."""

    item: Array  # the item of each row, [rows]
    label: Array  # its label, [rows]
    columns: Mapping[str, Array]  # name of a feature -> its values, [rows]

    @property
    def rows(self) -> Array:
        """Return the features, [rows, features]."""
        return np.column_stack([*self.columns.values()])

    def logits(self, start: Sequence[float]) -> Array:
        """Return the calibrated scores of the first stage, [rows]; `start` is scale and shift."""
        scale, shift = start
        result: Array = self.columns["score"].astype(float) * scale + shift
        return result


def candidates(items: Items, name: str) -> Candidates:
    """Return the labels of the highest scores of each item in field `name`, with their features.

    The order of the columns is that in which the trees were trained.
    """
    whole, own = items.scores[name]
    score = whole + own
    case_size = items.counts[:, None]
    case_mean = items.over_case(np.add, score) / case_size
    case_mean_of_own = items.over_case(np.add, own) / case_size
    case_best = items.over_case(np.maximum, score)
    # The position in a sorted order: the order of the order.
    case_rank = np.argsort(np.argsort(-case_mean, axis=1, kind="stable"), axis=1)

    order = np.argsort(-score, axis=1, kind="stable")[:, :CANDIDATES]
    best_three = np.take_along_axis(score, order, 1)[:, :3]
    item = np.repeat(np.arange(len(order)), order.shape[1])
    label = order.ravel()
    columns = {
        "label": label,
        "score": score[item, label],
        "score by the text": whole[item, label],
        "score by the own clauses": own[item, label],
        "above the case's mean of own clauses": (own - case_mean_of_own)[item, label],
        "rank in the item": np.tile(np.arange(order.shape[1]), len(order)),
        "behind the item's best": best_three[item, 0] - score[item, label],
    }
    for place, scores in enumerate(best_three.T, start=1):
        columns[f"score {place} of the item"] = scores[item]
    columns["mean of the case"] = case_mean[item, label]
    columns["best of the case"] = case_best[item, label]
    columns["behind the case's best"] = case_best.max(1)[item] - case_best[item, label]
    columns["rank in the case"] = case_rank[item, label]
    columns["labels to expect"] = expit(score).sum(1)[item]
    for column, fact in enumerate(PLACES):
        columns[fact] = items.facts[item, column]
    return Candidates(item, label, columns)


@dataclass(frozen=True)
class FieldTrees:
    """The second stage of one field."""

    trees: "lightgbm.Booster"
    start: Sequence[float] = ()
    """Of a label set: scale and shift of its scores; the trees correct this logit."""
    finish: Sequence[float] = ()  # of a label set: scale and shift of the corrected logit
    classes: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Of a class: label set -> the classes of items with each label, [labels, classes]."""

    @property
    def is_set(self) -> bool:
        return bool(self.start)

    def dump(self) -> dict[str, Any]:
        """Return it for JSON, the trees in LightGBM's own text."""
        return {**vars(self), "trees": self.trees.model_to_string()}


def load_trees(known: Mapping[str, Any]) -> FieldTrees:
    """Return what `FieldTrees.dump` returned."""
    import lightgbm  # takes a second, which scoring without a classifier does not need

    trees = lightgbm.Booster(model_str=known["trees"])
    return FieldTrees(**{**known, "trees": trees})


def corrected_probabilities(stage: Mapping[str, FieldTrees], items: Items) -> dict[str, Array]:
    """Return field -> probabilities of the fields that have a second stage, [items, labels]."""
    result: dict[str, Array] = {}
    for name, of_field in stage.items():
        if of_field.is_set:
            found = candidates(items, name)
            logits = corrected(of_field.trees, found.rows, found.logits(of_field.start))
            scale, shift = of_field.finish
            result[name] = np.zeros(items.scores[name].shape[1:])
            result[name][found.item, found.label] = expit(logits * scale + shift)
        else:
            rows = class_rows(items, name, result, of_field.classes)
            result[name] = np.asarray(of_field.trees.predict(rows, num_threads=1))
    return result


def corrected(trees: "lightgbm.Booster", rows: Array, logits: Array) -> Array:
    """Return the logits of candidates, corrected by the trees."""
    result: Array = logits + trees.predict(rows, raw_score=True, num_threads=1)
    return result


def class_rows(
    items: Items,
    name: str,
    believed: Mapping[str, Array],
    tables: Mapping[str, Any],
) -> Array:
    """Return the features for the class in field `name`, [items, features].

    `believed` has each label set's probabilities, [items, labels]; `tables` the classes of items
    with each of its labels, [labels, classes].
    """
    parts = [items.scores[name].sum(0)]
    for other, table in tables.items():
        chances = believed[other]
        in_all = chances.sum(1, keepdims=True)
        parts.append(chances @ table / np.maximum(in_all, 1e-9))
    return np.hstack([*parts, items.facts])
