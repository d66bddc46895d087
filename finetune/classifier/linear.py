"""The text classifier's first stage: one logistic regression per label, on sparse n-grams.

An item is the part of an answer about one person, or the whole answer. Its n-grams are those of two
views: the whole text of its case, and its own clauses, which name the person. To cross-fit is to
compute something for the cases of each fold from all other folds. The regressions see the cases of
two files, `train` and `mix`. Calibration and label frequencies use only those of `train`.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack, vstack

from panjue.finetune.classifier.calibration import FOLDS, fit_calibration
from panjue.finetune.classifier.features import Array, View, marked, views
from panjue.finetune.classifier.grams import Hashes
from panjue.finetune.classifier.label_sets import LabelField, label_frequencies
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.progress import Meter
from panjue.prompts.task import Task

MAX_COLUMNS = 60_000
"""Number of n-grams of each view; those that occur in the most texts are kept."""

MIN_TEXTS = 2
"""Least number of texts in which an n-gram occurs."""

MIN_ITEMS = 4
"""Least number of items with a label. A rarer label gets its frequency, whatever the text is."""

SET_STRENGTH = 10.0
CLASS_STRENGTH = 1.0
"""Inverse strength of the L2 penalty (scikit-learn's C), chosen on a fifth of the real cases."""

MIN_UPDATES = 60_000
MIN_PASSES = 6
"""Least number of rows that a regression sees, and of passes over the rows."""

UNUSUAL = 0.05
"""Share of the training's cases that count as unusual, as their texts have fewest known n-grams."""

CASES_AT_ONCE = 256
"""Number of cases whose n-grams are made together; more would not be faster."""

MIN_WEIGHT = 0.1
"""Smaller weights are not stored."""


@dataclass(frozen=True)
class FirstStage:
    """The regressions of one field."""

    field: LabelField
    gold: NDArray[np.bool_]  # [items, labels]
    calibrates: NDArray[np.bool_]  # which items the calibration is fitted on, [items]
    scores: NDArray[np.float32]  # cross-fitted, [views, items, labels]
    weights: Sequence[csr_array]
    """Mean weights of the regressions of all folds for each view, [columns, labels]. One regression
    on all items would be surer than those on whose scores the second stage is fitted."""
    bias: NDArray[np.float32]  # [labels]


@dataclass(frozen=True)
class TrainingItems:
    """The items of all cases; items of one case follow each other."""

    cases: Sequence[Example]
    sizes: NDArray[np.int64]  # items of each case, [cases]
    answers: Sequence[Mapping[str, Any]]  # [items]
    fold: NDArray[np.int64]  # [items]
    is_own: NDArray[np.bool_]  # whether its case is of `train`, not mixed in, [items]


def fit_views(items: TrainingItems) -> tuple[list[View], list[csr_array], Array]:
    """Return both views with their chosen n-grams, the vectors of all items, and known shares.

    There are vectors for each view, [items, columns]. A known share is the share of n-grams of an
    item's whole text that enough texts of other cases have, [items].
    """
    of_cases: list[Hashes] = []
    own: list[Hashes] = []
    for start in range(0, len(items.cases), CASES_AT_ONCE):
        part = slice(start, start + CASES_AT_ONCE)
        sizes = items.sizes[part].tolist()
        more_of_cases, more_own = views(list(map(marked, items.cases[part], sizes)))
        of_cases += more_of_cases
        own += more_own
    case_of_item = np.repeat(np.arange(len(items.cases)), items.sizes)  # [items]
    whole = [of_cases[case] for case in case_of_item]
    both = [fit_view(whole), fit_view(own)]
    rows = [csr_array(_rows(both[0], of_cases)[case_of_item]), _rows(both[1], own)]
    return both, rows, shares_known_elsewhere(whole, rows[0], items)


def _rows(view: View, texts: Sequence[Hashes]) -> csr_array:
    """Return the vectors of texts, made in parts to need little memory."""
    parts = []
    for start in range(0, len(texts), CASES_AT_ONCE):
        part, _ = view.rows_and_shares(texts[start : start + CASES_AT_ONCE])
        parts.append(part)
    return csr_array(vstack(parts, format="csr"))


def shares_known_elsewhere(
    texts: Sequence[Hashes], rows: csr_array, items: TrainingItems
) -> NDArray[np.float64]:
    """Return how much of each item's text training would know without its case, [items].

    This is the share of n-grams that occur in enough texts of other cases. So it can be compared
    with the share in a new case, which is not in training. `texts` has the n-grams of each item's
    whole case, which all items of a case share, and `rows` the vectors, [items, columns].
    """
    texts_with = np.bincount(rows.indices, minlength=rows.shape[1])  # [columns]
    row_of = np.repeat(np.arange(len(texts)), np.diff(rows.indptr))  # [stored n-grams of all rows]
    # The text of a case counts once for each of its items, so all of these are subtracted.
    of_same_case = np.repeat(items.sizes, items.sizes)[row_of]  # items of its case, [stored]
    is_known = texts_with[rows.indices] - of_same_case >= MIN_TEXTS  # [stored]
    known = np.bincount(row_of, is_known, minlength=len(texts))  # [items]
    distinct = [max(1, len(np.unique(text))) for text in texts]
    result: NDArray[np.float64] = known / distinct
    return result


def fit_view(texts: Sequence[Hashes]) -> View:
    """Return the n-grams that occur in the most texts, with their inverse document frequencies.

    At most `MAX_COLUMNS` are kept, and none that occurs in fewer than `MIN_TEXTS` texts.
    """
    once_a_text = np.concatenate([np.unique(text) for text in texts])  # [n-grams of all texts]
    distinct, counts = np.unique(once_a_text, return_counts=True)  # both [distinct n-grams]
    most = np.argsort(-counts, kind="stable")[:MAX_COLUMNS]
    frequent = most[counts[most] >= MIN_TEXTS]
    kept = np.sort(frequent)
    inverse_frequencies = (1 + len(texts)) / (1 + counts[kept])
    idf = np.log(inverse_frequencies) + 1  # [columns]
    return View(distinct[kept], idf.astype(np.float32))


def fit_first_stage(
    name: str,
    task: Task,
    items: TrainingItems,
    rows: Sequence[csr_array],
    known_labels: Labels,
    regress: Callable[[csr_array, Array, float], tuple[Array, Array]],
) -> FirstStage:
    """Fit the regressions of one field without each fold in turn, and score this fold by them.

    `rows` are the vectors of both views, and `known_labels` are those that an answer may have.
    `regress` is `regressions` of rows, gold labels and strength.
    """
    labels = sorted(task.answer.counts(name, known_labels.counts))
    is_set = name in task.answer.sets
    strength = SET_STRENGTH if is_set else CLASS_STRENGTH
    values = [set(item[name]) if is_set else {item[name]} for item in items.answers]
    gold = np.array([[label in value for label in labels] for value in values])  # [items, labels]
    teaches = gold.any(axis=1) | is_set  # an item of an unknown class teaches nothing
    scores = np.zeros((2, *gold.shape), np.float32)  # [views, items, labels]
    weights_by_fold = []
    bias_by_fold = []
    for number in range(FOLDS):
        aside = items.fold == number  # [items]
        used = teaches & ~aside
        rows_used = hstack([part[used] for part in rows], format="csr")
        weights, bias = regress(csr_array(rows_used), gold[used], strength)
        of_whole, of_own = by_view(weights, rows)
        # The score of an item is the sum of both views, so only one of them has the bias.
        scores[0, aside] = (rows[0][aside] @ of_whole).toarray() + bias
        scores[1, aside] = (rows[1][aside] @ of_own).toarray()
        weights_by_fold.append(weights)
        bias_by_fold.append(bias)
    mean = np.asarray(sum(weights_by_fold) / np.float32(FOLDS))  # [columns of both views, labels]
    mean[np.abs(mean) < MIN_WEIGHT] = 0
    calibrates = items.is_own & teaches  # without items from `mix`
    score = scores.sum(axis=0)  # of both views, [items, labels]
    scale, shift = fit_calibration(score[calibrates], gold[calibrates], is_set)
    frequencies = label_frequencies(gold[calibrates], is_set)
    return FirstStage(
        field=LabelField(labels, is_set, scale, shift, frequencies=frequencies),
        gold=gold,
        calibrates=calibrates,
        scores=scores,
        weights=by_view(mean, rows),
        bias=np.asarray(sum(bias_by_fold) / np.float32(FOLDS)),
    )


def cross_calibrated(stage: FirstStage, fold: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the probabilities of cross-fitted scores, with a cross-fitted calibration.

    If texts are easy to tell apart, the calibration depends on a few cases. Fitted on such a case,
    it would give away the answer to this case.
    """
    scores = stage.scores.sum(axis=0)  # of both views, [items, labels]
    result = np.zeros(scores.shape)
    for k in range(FOLDS):
        in_fold = fold == k
        used = stage.calibrates & ~in_fold
        scale, shift = fit_calibration(scores[used], stage.gold[used], stage.field.is_set)
        calibrated = replace(stage.field, scale=scale, shift=shift)
        result[in_fold] = calibrated.probabilities(scores[in_fold])
    return result


def moved_to_frequencies(
    stage: FirstStage, probabilities: Array, known: Array, fold: NDArray[np.int64]
) -> Array:
    """Return probabilities, [items, labels], moved towards cross-fitted label frequencies.

    `known`, [items], says from 0 to 1 how far the text of an item is known. The less it is known,
    the more its probabilities move. The frequencies are counted on those items of other folds that
    a calibration is fitted on (`stage.calibrates`).
    """
    result = np.zeros(probabilities.shape)
    for k in range(FOLDS):
        in_fold = fold == k
        gold = stage.gold[stage.calibrates & ~in_fold]
        frequencies = label_frequencies(gold, stage.field.is_set)
        of_others = replace(stage.field, frequencies=frequencies)
        result[in_fold] = of_others.as_far_as_known(probabilities[in_fold], known[in_fold])
    return result


def by_view(weights: Array, rows: Sequence[csr_array]) -> list[csr_array]:
    """Split weights for rows of both views into the weights of each view."""
    columns_of_first = rows[0].shape[1]
    return [csr_array(part) for part in np.split(weights, [columns_of_first])]


def regressions(
    rows: csr_array, gold: NDArray[np.bool_], strength: float, seed: int, shown: Meter
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the weights, [columns, labels], and the biases of one regression per label.

    `gold` says which items have which labels, [items, labels].
    """
    from sklearn.linear_model import SGDClassifier  # a second; answering does not need it

    def regression(has_label: NDArray[np.bool_]) -> tuple[NDArray[Any], float]:
        count = len(has_label)
        having = int(has_label.sum())
        lacking = count - having
        if having < MIN_ITEMS or lacking == 0:
            odds = (having + 0.5) / (lacking + 0.5)
            return np.zeros(rows.shape[1]), float(np.log(odds))
        model = SGDClassifier(
            loss="log_loss",
            alpha=1 / (strength * count),
            max_iter=max(MIN_PASSES, math.ceil(MIN_UPDATES / count)),
            tol=None,
            random_state=seed,
        )
        model.fit(rows, has_label)
        return model.coef_[0], float(model.intercept_[0])

    labels = gold.shape[1]
    weights = np.zeros((rows.shape[1], labels), np.float32)
    biases = np.zeros(labels, np.float32)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for column, (of_label, bias) in enumerate(threads.map(regression, gold.T)):
            weights[:, column] = of_label
            biases[column] = bias
            shown.step("linear models")
    return weights, biases
