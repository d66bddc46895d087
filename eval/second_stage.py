"""The text classifier's second stage: boosted trees over the scores of the whole case.

A label set has one row for each item and candidate label, with the label's scores for this item and
for the others of the case; the trees correct the calibrated score. A class, which comes after the
sets, has one row for each item: the classes that training gave to items of such sets, and what the
task reads as evidence. finetune/second_stage.py fits both.
"""

import json
from collections.abc import Callable, Mapping, Sequence
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
    """The items of cases, those of one case side by side.

    Attributes:
        sizes: Items of each case, [cases].
        scores: Field -> first-stage scores by the whole text and by the own clauses, [2, items,
            labels].
        facts: What the text says of each item, [items, any].
    """

    sizes: Array
    scores: Mapping[str, Array]
    facts: Array

    @property
    def counts(self) -> Array:
        """Return how many items the case of each item has, [items]."""
        return np.repeat(self.sizes, self.sizes)

    def over_case(self, how: np.ufunc, values: Array) -> Array:
        """Return the sum or maximum of values over the items of each item's case."""
        starts = np.cumsum(self.sizes) - self.sizes
        return np.repeat(how.reduceat(values, starts), self.sizes, axis=0)


def facts(
    text: str,
    clauses: Sequence[str],
    marks: Sequence[str],
    evidence: Callable[[str], Sequence[float]],
) -> list[list[float]]:
    """Return for each item where it stands in the case, and evidence for all and for itself.

    Args:
        text: The text, with a character of `marks` in place of each item's name.
        clauses: Each item's own clauses.
        marks: One character for each item.
        evidence: Text -> numbers, always as many.
    """
    n, length, whole = len(clauses), max(1, len(text)), evidence(text)
    return [
        [
            *(i, n, i / max(1, n - 1), length, len(own)),
            *(text.count(mark), text.find(mark) / length),
            *whole,
            *evidence(own),
        ]
        for i, (own, mark) in enumerate(zip(clauses, marks, strict=True))
    ]


PLACES = 7
"""Facts that say where an item stands; of these alone the label sets know."""


def candidates(items: Items, name: str) -> tuple[Array, Array, Array]:
    """Return the features of the candidate labels, [rows, features], and their items and labels.

    The second feature is the score of the first stage.
    """
    whole, own = items.scores[name]
    score, n = whole + own, items.counts[:, None]
    mean, own_mean = (items.over_case(np.add, part) / n for part in (score, own))
    top = items.over_case(np.maximum, score)
    order = np.argsort(-score, axis=1, kind="stable")[:, :CANDIDATES]
    item, label = np.repeat(np.arange(len(order)), order.shape[1]), order.ravel()
    best = np.take_along_axis(score, order, 1)[:, :3]
    rank = np.argsort(np.argsort(-mean, axis=1, kind="stable"), axis=1)
    columns = [label, *(part[item, label] for part in (score, whole, own, own - own_mean))]
    columns += [np.tile(np.arange(order.shape[1]), len(order))]
    columns += [best[item, 0] - score[item, label], *best[item].T]
    columns += [part[item, label] for part in (mean, top, top.max(1)[:, None] - top, rank)]
    columns += [expit(score).sum(1)[item], *items.facts[item, :PLACES].T]
    return np.column_stack(columns), item, label


@dataclass(frozen=True)
class FieldTrees:
    """The second stage of one field.

    Attributes:
        trees: LightGBM's model.
        start: Of a label set: scale and shift of its scores; the trees correct this logit.
        finish: Of a label set: scale and shift of the corrected logit.
        classes: Of a class: label set -> the classes of items with each label, [labels, classes].
    """

    trees: "lightgbm.Booster"
    start: Sequence[float] = ()
    finish: Sequence[float] = ()
    classes: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class SecondStage:
    """The second stage of the fields that have one, label sets first."""

    fields: Mapping[str, FieldTrees]

    def probabilities(self, items: Items) -> dict[str, Array]:
        """Return field -> probabilities, [items, labels]."""
        result: dict[str, Array] = {}
        for name, known in self.fields.items():
            if known.start:
                rows, item, label = candidates(items, name)
                logits = corrected(known.trees, rows, known.start)
                result[name] = np.zeros(items.scores[name].shape[1:])
                result[name][item, label] = expit(logits * known.finish[0] + known.finish[1])
            else:
                rows = class_rows(items, name, result, known.classes)
                result[name] = np.asarray(known.trees.predict(rows, num_threads=1))
        return result

    def dump(self) -> str:
        """Return it as JSON, the trees in LightGBM's own text."""
        known = {n: {**vars(f), "trees": f.trees.model_to_string()} for n, f in self.fields.items()}
        return json.dumps(known, default=np.ndarray.tolist)


def load_second_stage(text: str) -> SecondStage:
    """Return what `dump` wrote; KeyError, TypeError, ValueError: it is something else."""
    import lightgbm  # takes a second, which scoring without a classifier does not need

    fields = {}
    for name, known in json.loads(text).items():
        try:
            trees = lightgbm.Booster(model_str=known["trees"])
        except lightgbm.basic.LightGBMError as error:
            raise ValueError(str(error)) from None
        classes = {other: np.array(table) for other, table in known["classes"].items()}
        fields[name] = FieldTrees(trees, known["start"], known["finish"], classes)
    return SecondStage(fields)


def corrected(trees: "lightgbm.Booster", rows: Array, start: Sequence[float]) -> Array:
    """Return the logits of candidates: the calibrated scores, corrected by the trees."""
    corrections = np.asarray(trees.predict(rows, raw_score=True, num_threads=1))
    result: Array = rows[:, 1] * start[0] + start[1] + corrections
    return result


def class_rows(
    items: Items, name: str, believed: Mapping[str, Array], tables: Mapping[str, Array]
) -> Array:
    """Return the features for the class in field `name`, [items, features].

    `believed` has each label set's probabilities, [items, labels]; `tables` the classes of items
    with each of its labels, [labels, classes].
    """
    seen = [
        believed[of] @ table / np.maximum(believed[of].sum(1, keepdims=True), 1e-9)
        for of, table in tables.items()
    ]
    return np.hstack([items.scores[name].sum(0), *seen, items.facts])
