"""Fit the second stage of the text classifier on scores of cases that the first had not seen."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import lightgbm
import numpy as np
from scipy.special import expit

from panjue.eval.scaling import platt
from panjue.eval.second_stage import Array, FieldTrees, Items, candidates, class_rows, corrected

T = TypeVar("T")

FOLDS = 4

SINGLE_WEIGHT = 0.4
"""Weight of an item alone in its case. The metric gives it none, but it teaches."""

SMOOTHING = 3.0
"""Items of the common distribution of classes that are added to those of each label."""

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


def weights_of(sizes: Array) -> Array:
    """Return the weight of each item in the metric: a case counts by log2 of its items."""
    n = np.repeat(sizes, sizes)
    return np.where(n > 1, np.log2(n) / n, SINGLE_WEIGHT)


def fit_second_stage(
    items: Items, gold: Mapping[str, Array], sets: Sequence[str], fold: Array
) -> tuple[dict[str, FieldTrees], dict[str, Array]]:
    """Return the second stage, and the cross-fitted probabilities of its fields, [items, labels].

    A field of one class has no second stage: nothing is left to decide.

    Args:
        items: Cases, with scores by first stages that had not seen them (cross-fitted).
        gold: Field -> [items, labels], those in `sets` first; the others have one label an item.
        sets: The fields that are label sets.
        fold: The fold of each item, the same for all items of a case, [items].
    """
    fields: dict[str, FieldTrees] = {}
    believed: dict[str, Array] = {}
    for name, truth in gold.items():
        if name in sets:
            fields[name], believed[name] = _fit_set(items, name, truth, fold)
        elif truth.shape[1] > 1:  # a class, decided with the probabilities of the sets
            fields[name], believed[name] = _fit_class(items, name, gold, believed, fold)
    return fields, believed


def _fit_set(items: Items, name: str, truth: Array, fold: Array) -> tuple[FieldTrees, Array]:
    """Return the second stage of a label set, and its cross-fitted probabilities."""
    found = candidates(items, name)
    rows = found.rows
    score = found.columns["score"].astype(float)
    gold = truth[found.item, found.label]
    weight = weights_of(items.sizes)[found.item]
    fold_of_row = fold[found.item]

    def train(without: int) -> tuple[lightgbm.Booster, tuple[float, float]]:
        """Return the trees, and the scale and shift of the scores that they correct."""
        used = fold_of_row != without
        start = platt(score[used], gold[used], weight[used])
        first = found.logits(start)[used]
        data = lightgbm.Dataset(rows[used], gold[used], weight=weight[used], init_score=first)
        data.set_categorical_feature([0])  # the label
        return lightgbm.train(SET_TREES, data, ROUNDS), start

    *parts, (trees, start) = _without_each_fold(train)
    logits = np.zeros(len(rows))
    for number, (trees_of_part, start_of_part) in enumerate(parts):
        aside = fold_of_row == number
        first = found.logits(start_of_part)[aside]
        logits[aside] = corrected(trees_of_part, rows[aside], first)
    several = items.counts[found.item] > 1  # those that the metric weighs
    of_metric = weight * several if several.any() else weight
    chances = np.zeros(len(rows))
    for number in range(FOLDS):
        aside = fold_of_row == number
        scale, shift = platt(logits[~aside], gold[~aside], of_metric[~aside])
        chances[aside] = expit(logits[aside] * scale + shift)
    believed = np.zeros(truth.shape)
    believed[found.item, found.label] = chances
    return FieldTrees(trees, start, platt(logits, gold, of_metric)), believed


def _fit_class(
    items: Items, name: str, gold: Mapping[str, Array], believed: Mapping[str, Array], fold: Array
) -> tuple[FieldTrees, Array]:
    """Return the second stage of a class, and its cross-fitted probabilities."""
    # An item whose class is not known teaches nothing.
    weight = weights_of(items.sizes) * gold[name].any(axis=1)
    classes = gold[name] * weight[:, None]
    prior = classes.sum(0) / classes.sum()

    def tables(used: Array) -> dict[str, Array]:
        """Return label set -> how the classes of items with each label are distributed."""
        result = {}
        for other in believed:
            joint = gold[other][used].T.astype(float) @ classes[used] + SMOOTHING * prior
            result[other] = joint / joint.sum(1, keepdims=True)
        return result

    # No item is in its own tables.
    rows_by_fold = [class_rows(items, name, believed, tables(fold != k)) for k in range(FOLDS)]
    rows = np.stack(rows_by_fold)[fold, np.arange(len(fold))]
    labels = gold[name].argmax(1)

    def train(without: int) -> lightgbm.Booster:
        used = fold != without
        data = lightgbm.Dataset(rows[used], labels[used], weight=weight[used])
        settings = {**CLASS_TREES, "num_class": classes.shape[1]}
        return lightgbm.train(settings, data, 2 * ROUNDS)

    *parts, trees = _without_each_fold(train)
    chances = np.zeros(classes.shape)
    for number, part in enumerate(parts):
        aside = fold == number
        chances[aside] = part.predict(rows[aside], num_threads=1)
    of_all = {other: table.tolist() for other, table in tables(fold >= 0).items()}
    return FieldTrees(trees, classes=of_all), chances


def _without_each_fold(train: Callable[[int], T]) -> list[T]:
    """Return what `train` makes without fold 0, 1 and so on, and last with all folds."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(train, range(FOLDS + 1)))
