"""The text classifier's second stage: boosted trees over the scores of the whole case.

An item is the part of an answer about one person. For a label set, there is one row for each item
and candidate label. It has the scores of the label for this item and for the other items of the
case, and the trees correct the calibrated score. A class is predicted after the label sets, with
one row for each item. It has the classes that items with such sets had in training, and the
evidence that the task reads. The second stage is fitted on cross-fitted scores: those of a case
come from a first stage that was fitted without its fold.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from scipy.special import expit

from panjue.finetune.classifier.calibration import FOLDS, TINY, calibrated, platt
from panjue.finetune.classifier.features import PLACES, Array
from panjue.prompts.plumbing.progress import Meter, meter

if TYPE_CHECKING:
    import lightgbm

CANDIDATES = 8
"""Number of labels with the highest scores that the trees look at. Others get probability 0."""


@dataclass(frozen=True)
class Items:
    """The items of cases; items of one case follow each other."""

    sizes: Array  # items of each case, [cases]
    scores: Mapping[str, Array]
    """Field -> first-stage scores by whole text and by own clauses, [2, items, labels]."""
    facts: Array  # what the text says of each item, [items, any]

    @property
    def weights(self) -> Array:
        """Return the weight of each item, [items]; the metric of judgments gives a case log2(n)."""
        n = np.repeat(self.sizes, self.sizes)  # how many items the case of each item has
        return np.where(n > 1, np.log2(n) / n, SINGLE_WEIGHT)  # log2(1) would be 0

    def of_cases(self, how: np.ufunc, values: Array) -> Array:
        """Return the sum or maximum of values over the items of each case, [cases, any]."""
        starts = np.cumsum(self.sizes) - self.sizes
        result: Array = how.reduceat(values, starts)
        return result


@dataclass(frozen=True)
class Candidates:
    """The candidate labels of all items, one row for each."""

    item: Array  # the item of each row, [rows]
    label: Array  # its label, [rows]
    columns: Mapping[str, Array]  # name of a feature -> its values, [rows]

    @property
    def rows(self) -> Array:
        """Return the features, [rows, features]."""
        return np.column_stack([*self.columns.values()])

    def logits(self, scaling: Sequence[float]) -> Array:
        """Return the scores of the first stage times a scale, plus a shift, [rows]."""
        scale, shift = scaling
        result: Array = self.columns["score"].astype(float) * scale + shift
        return result


def candidates(items: Items, name: str) -> Candidates:
    """Return the labels with the highest scores of each item in field `name`, with their features.

    The trees depend on the order of the columns.
    """
    whole, own = items.scores[name]  # both [items, labels]
    score = whole + own
    case_size = items.sizes[:, None]  # [cases, 1]
    case_mean = items.of_cases(np.add, score) / case_size  # [cases, labels]
    case_mean_of_own = items.of_cases(np.add, own) / case_size  # [cases, labels]
    case_best = items.of_cases(np.maximum, score)  # [cases, labels]
    by_case_mean = np.argsort(-case_mean, axis=1, kind="stable")  # labels of each case, best first
    case_rank = np.argsort(by_case_mean, axis=1)  # place of each label there, [cases, labels]

    order = np.argsort(-score, axis=1, kind="stable")[:, :CANDIDATES]  # [items, candidates]
    best_three = np.take_along_axis(score, order, 1)[:, :3]  # [items, 3]
    case_of_item = np.repeat(np.arange(len(items.sizes)), items.sizes)  # [items]
    item = np.repeat(np.arange(len(order)), order.shape[1])  # [rows], as all below
    case = case_of_item[item]
    label = order.ravel()
    score_of_row = score[item, label]
    own_of_row = own[item, label]
    columns = {
        "label": label,
        "score": score_of_row,
        "score by the text": whole[item, label],
        "score by the own clauses": own_of_row,
        "above the case's mean of own clauses": own_of_row - case_mean_of_own[case, label],
        "rank in the item": np.tile(np.arange(order.shape[1]), len(order)),
        "behind the item's best": best_three[item, 0] - score_of_row,
    }
    for place, scores in enumerate(best_three.T, start=1):
        columns[f"score {place} of the item"] = scores[item]
    columns |= {
        "mean of the case": case_mean[case, label],
        "best of the case": case_best[case, label],
        "behind the case's best": case_best.max(1)[case] - case_best[case, label],
        "rank in the case": case_rank[case, label],
        "labels to expect": expit(score).sum(1)[item],
    }
    columns |= zip(PLACES, items.facts[item, : len(PLACES)].T, strict=True)
    return Candidates(item, label, columns)


@dataclass(frozen=True)
class FieldTrees:
    """The second stage of one field.

    A score of a label set is multiplied by a scale and a shift is added; the trees add their
    correction; then another scale and shift calibrate the corrected logit.
    """

    trees: "lightgbm.Booster"
    scaling: Sequence[float] = ()  # the first scale and shift; empty for a class
    finish: Sequence[float] = ()  # the last scale and shift; empty for a class
    classes: Mapping[str, Array] = field(default_factory=dict)
    """For a class: label set -> shares of classes of items with each label, [labels, classes]."""

    @property
    def is_set(self) -> bool:
        """Say whether the field is a label set; trees of a class use scores without scaling."""
        return bool(self.scaling)

    def dump(self) -> dict[str, Any]:
        """Return the stage as JSON values.

        "start" is `scaling`, the scale and shift before the trees; files of trained classifiers
        have this key. "finish" has the scale and shift after the trees.
        """
        return {
            "trees": self.trees.model_to_string(),
            "start": self.scaling,
            "finish": self.finish,
            "classes": {name: table.tolist() for name, table in self.classes.items()},
        }


def load_trees(dumped: Mapping[str, Any]) -> FieldTrees:
    """Return the trees from what `FieldTrees.dump` returned."""
    import lightgbm  # a second; scoring without a classifier does not need it

    trees = lightgbm.Booster(model_str=dumped["trees"])
    classes = {name: np.array(table) for name, table in dumped["classes"].items()}
    return FieldTrees(trees, dumped["start"], dumped["finish"], classes)


def corrected_probabilities(stage: Mapping[str, FieldTrees], items: Items) -> dict[str, Array]:
    """Return field -> probabilities, [items, labels], for the fields that have a second stage.

    Labels of a set that are no candidates get probability 0, all others more.

    For example, let theft and fraud have the scores 3 and 0. By `scaling` (0.5, -1), their logits
    are 0.5 and -1. The trees add 0.5 and 0, which gives 1 and -1. By `finish` (1, 0), the
    probabilities are 0.73 and 0.27.
    """
    result: dict[str, Array] = {}
    for name, of_field in stage.items():
        if of_field.is_set:
            found = candidates(items, name)
            added = of_field.trees.predict(found.rows, raw_score=True, num_threads=1)
            logits = found.logits(of_field.scaling) + added
            _, *shape = items.scores[name].shape  # the first axis is that of the two views
            result[name] = np.zeros(shape)
            result[name][found.item, found.label] = calibrated(logits, *of_field.finish)
        else:  # a class, which the stage has after the label sets
            rows = class_rows(items, name, result, of_field.classes)
            result[name] = np.maximum(of_field.trees.predict(rows, num_threads=1), TINY)
    return result


def class_rows(
    items: Items, name: str, of_sets: Mapping[str, Array], tables: Mapping[str, Array]
) -> Array:
    """Return the features for the class in field `name`, [items, features].

    `of_sets` has the probabilities of each label set, [items, labels]. `tables` has the shares of
    classes of items with each label, [labels, classes]. For example, of items with theft, 0.9 have
    the first class, and of those with fraud 0.2. If theft has probability 0.73 and fraud 0.27, the
    first class is to be expected with (0.73 * 0.9 + 0.27 * 0.2) / (0.73 + 0.27) = 0.71.
    """
    parts = [items.scores[name].sum(axis=0)]  # of both views, [items, classes]
    for other, table in tables.items():
        chances = of_sets[other]  # [items, labels]
        in_all = chances.sum(1, keepdims=True)
        parts.append(chances @ table / np.maximum(in_all, 1e-9))  # [items, classes]
    return np.hstack([*parts, items.facts])


SINGLE_WEIGHT = 0.4
"""Weight of an item that is alone in its case. The metric ignores it, but training can use it."""

SMOOTHING = 3.0
"""Number of items with the overall distribution of classes that are added to each label's items."""

ROUNDS = 100

COMMON: dict[str, Any] = {
    "verbose": -1,
    "seed": 0,
    "deterministic": True,
    "force_row_wise": True,
    "max_bin": 63,
    "learning_rate": 0.1,
    "lambda_l2": 10,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "num_threads": 1,  # folds are fitted side by side; threads of one tree wait for each other
}

SET_TREES = {**COMMON, "objective": "binary", "num_leaves": 15, "min_data_in_leaf": 50}

CLASS_TREES = {
    **COMMON,
    "objective": "multiclass",
    "num_leaves": 12,
    "min_data_in_leaf": 30,
    "extra_trees": True,  # random thresholds: less variance
    "learning_rate": 0.05,
}


def fit_second_stage(
    items: Items, gold: Mapping[str, Array], sets: Sequence[str], fold: Array, console: Console
) -> tuple[dict[str, FieldTrees], dict[str, Array]]:
    """Return the second stage, and the cross-fitted probabilities of its fields, [items, labels].

    A field with only one class has no second stage, as there is nothing to decide. The scores of
    `items` are cross-fitted. `gold` has [items, labels] for each field, those in `sets` first; in
    other fields an item has one label. All items of a case are in one `fold`, [items].
    """
    fields: dict[str, FieldTrees] = {}
    crossed: dict[str, Array] = {}
    names = [name for name, truth in gold.items() if name in sets or truth.shape[1] > 1]
    with meter(console, (FOLDS + 1) * len(names)) as shown:
        for name in names:
            if name in sets:
                found = _fit_set(items, name, gold[name], fold, shown)
            else:  # a class, decided with the probabilities of the sets
                found = _fit_class(items, name, gold, crossed, fold, shown)
            fields[name], crossed[name] = found
    return fields, crossed


def _fit_set(
    items: Items, name: str, truth: Array, fold: Array, shown: Meter
) -> tuple[FieldTrees, Array]:
    """Return the second stage of a label set, and its cross-fitted probabilities, [items, labels].

    The last calibration is fitted on logits by trees that were fitted without the row.
    """
    import lightgbm

    found = candidates(items, name)
    rows = found.rows  # [rows, features]
    score = found.columns["score"].astype(float)  # [rows], as all below
    gold = truth[found.item, found.label]
    weight = items.weights[found.item]
    fold_of_row = fold[found.item]

    def train(without: int) -> FieldTrees:
        used = fold_of_row != without
        scaling = platt(score[used], gold[used], weight[used])
        first = found.logits(scaling)[used]
        data = lightgbm.Dataset(rows[used], gold[used], weight=weight[used], init_score=first)
        data.set_categorical_feature([0])  # the label
        return FieldTrees(lightgbm.train(SET_TREES, data, ROUNDS), scaling)

    *parts, whole = _without_each_fold(train, shown)
    logits = np.zeros(len(rows))
    for number, part in enumerate(parts):
        aside = fold_of_row == number
        added = part.trees.predict(rows[aside], raw_score=True, num_threads=1)
        logits[aside] = found.logits(part.scaling)[aside] + added
    # Unlike the trees, the last calibration ignores an item that is alone in its case, as does the
    # metric: it gives a case of n items the weight log2(n), and log2(1) is 0.
    is_counted = np.repeat(items.sizes > 1, items.sizes)[found.item]
    counted = weight * is_counted if is_counted.any() else weight
    crossed = np.zeros(truth.shape)
    crossed[found.item, found.label] = _cross_calibrated(logits, gold, counted, fold_of_row)
    return replace(whole, finish=platt(logits, gold, counted)), crossed


def _cross_calibrated(logits: Array, gold: Array, weight: Array, fold: Array) -> Array:
    """Return the probabilities of logits, each calibrated without its own fold; all are [rows]."""
    chances = np.zeros(len(logits))
    for number in range(FOLDS):
        aside = fold == number
        fitted = platt(logits[~aside], gold[~aside], weight[~aside])
        chances[aside] = calibrated(logits[aside], *fitted)
    return chances


def _fit_class(
    items: Items,
    name: str,
    gold: Mapping[str, Array],
    of_sets: Mapping[str, Array],
    fold: Array,
    shown: Meter,
) -> tuple[FieldTrees, Array]:
    """Return the second stage of a class, and its cross-fitted probabilities, [items, classes].

    `of_sets` has those of the label sets, [items, labels]. `fold` is the fold of each item.
    """
    import lightgbm

    # An item of unknown class teaches nothing.
    weight = items.weights * gold[name].any(axis=1)  # [items]
    classes = gold[name] * weight[:, None]  # [items, classes]
    prior = classes.sum(0) / classes.sum()  # [classes]

    def tables(used: Array) -> dict[str, Array]:
        """Return label set -> how the used items with each label are divided among the classes.

        For example, the row of theft is about [0.9, 0.1] if 90% of its items have the first class.
        """
        result = {}
        for other in of_sets:
            joint = gold[other][used].T.astype(float) @ classes[used]  # [labels, classes]
            joint += SMOOTHING * prior
            result[other] = joint / joint.sum(1, keepdims=True)
        return result

    # Features of all items, with tables made without each fold. Each item takes those that were
    # made without its own fold.
    rows_by_fold = [class_rows(items, name, of_sets, tables(fold != k)) for k in range(FOLDS)]
    rows = np.stack(rows_by_fold)[fold, np.arange(len(fold))]  # [items, features]
    labels = gold[name].argmax(1)  # [items]

    def train(without: int) -> FieldTrees:
        used = fold != without
        data = lightgbm.Dataset(rows[used], labels[used], weight=weight[used])
        settings = {**CLASS_TREES, "num_class": classes.shape[1]}
        # Twice the rounds, since the learning rate is half of that for sets.
        return FieldTrees(lightgbm.train(settings, data, 2 * ROUNDS))

    *parts, whole = _without_each_fold(train, shown)
    crossed = np.zeros(classes.shape)
    for number, part in enumerate(parts):
        aside = fold == number
        probabilities = part.trees.predict(rows[aside], num_threads=1)
        crossed[aside] = np.maximum(probabilities, TINY)  # none is 0
    return replace(whole, classes=tables(fold >= 0)), crossed  # tables of the items of all folds


def _without_each_fold(train: Callable[[int], FieldTrees], shown: Meter) -> list[FieldTrees]:
    """Return the results of `train` without fold 0, without fold 1 and so on, then with all."""
    trained = []
    folds = range(FOLDS + 1)  # no item is in the last one, so nothing is left out
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for result in threads.map(train, folds):
            trained.append(result)
            shown.step("small trees")
    return trained
