"""Fit the text classifier that lies beside an adapter: one logistic regression per label."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from heapq import nsmallest
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array
from sklearn.linear_model import SGDClassifier

from panjue.eval.classifier import Classifier, FieldWeights, Hashes, View, views
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task

MAX_EXAMPLES = 12_000
"""Of `train`, and again of `mix`: bounds time and memory; an item takes some 50 kB."""

MAX_COLUMNS = 60_000
"""N-grams of each view, those of the most texts."""

MIN_TEXTS = 2
"""Texts in which an n-gram has to occur."""

MIN_ITEMS = 4
"""Items that need to have a label; a rarer one gets its frequency, whatever the text."""

SET_STRENGTH, CLASS_STRENGTH = 10.0, 1.0
"""Inverse strength of the L2 penalty (scikit-learn's C), chosen on a fifth of the real cases."""

MIN_UPDATES = 60_000
"""Rows seen by each regression at least; the passes over the rows follow from it."""

MIN_WEIGHT = 0.1
"""Smaller weights are left out of the file."""

CALIBRATION_TENTH = 5
"""The tenth of the texts, by hash, on which scores become probabilities."""

MIN_CALIBRATION = 50
"""Items that this tenth needs; with fewer, the regressions' own probabilities stay."""


def fit(
    task: Task, train: Iterable[Example], mix: Iterable[Example], known: Labels, seed: int
) -> Classifier:
    """Return the classifier of the fields that `task` decides, fitted on examples with answers.

    The scores are calibrated on a tenth of `train`, with weights that were fitted on all other
    examples (Platt scaling for label sets, a temperature for classes; Guo et al., ICML 2017). Then
    the weights are fitted on all. Of more than `MAX_EXAMPLES` those of the lowest text hashes are
    taken. Labels that are not `known`, of mixed-in cases, are no answers.
    """
    decides = task.answer
    assert decides.fields, "only fields that are decided have a classifier"
    texts: list[tuple[Hashes, ...]] = []
    gold: list[dict[str, Any]] = []
    keys: list[str] = []
    aside: set[str] = set()
    own = 0
    parts = (zip(_sample(train), repeat(False)), zip(_sample(mix), repeat(True)))
    for example, is_mixed in chain(*parts):
        assert example.answer is not None, "training examples have answers"
        items, key = decides.items_of(example.answer), text_hash(example)
        is_empty = any(not item[name] for item in items for name in decides.sets)
        if is_empty and task.ask.decode(task.ask.target(example), example, known).repairs:
            continue  # an empty label list that the training of the model refuses too
        texts += views(example, len(items))
        gold += [{name: item[name] for name in decides.fields} for item in items]
        keys += [key] * len(items)
        if not is_mixed:
            own += len(items)
            aside |= {key} if int(key, 16) % 10 == CALIBRATION_TENTH else set()
    used = tuple(fit_view(part) for part in zip(*texts, strict=True))
    rows = Classifier(decides, used, {}).rows(texts)
    is_aside = np.array([key in aside for key in keys])  # mixed-in copies too
    calibrates = is_aside & (np.arange(len(keys)) < own)
    fields = {}
    for name in decides.fields:
        values = [set(i[name]) if name in decides.sets else {i[name]} for i in gold]
        labels = tuple(sorted(decides.counts(name, known.counts)))
        is_set = name in decides.sets
        fields[name] = _field(values, labels, rows, (is_aside, calibrates), is_set, seed)
    return Classifier(decides, used, fields)


def _sample(examples: Iterable[Example]) -> list[Example]:
    """Return at most `MAX_EXAMPLES` examples, in their order."""
    chosen = nsmallest(MAX_EXAMPLES, enumerate(examples), key=lambda pair: text_hash(pair[1]))
    return [example for _, example in sorted(chosen, key=lambda pair: pair[0])]


def fit_view(texts: Sequence[Hashes]) -> View:
    """Return the n-grams of the most texts, with their inverse document frequencies."""
    distinct, counts = np.unique(np.concatenate([np.unique(t) for t in texts]), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_COLUMNS]
    kept = np.sort(order[counts[order] >= MIN_TEXTS])
    idf = np.log((1 + len(texts)) / (1 + counts[kept])) + 1
    return View(distinct[kept], idf.astype(np.float32))


def _field(
    values: Sequence[set[str]],
    labels: tuple[str, ...],
    rows: csr_array,
    masks: tuple[NDArray[np.bool_], NDArray[np.bool_]],
    is_set: bool,
    seed: int,
) -> FieldWeights:
    """Return the fitted field; `masks` say which items are set aside, and which calibrate."""
    gold = np.array([[label in value for label in labels] for value in values])
    taken = np.ones(len(values), bool) if is_set else gold.any(axis=1)
    aside, calibrates = (mask & taken for mask in masks)
    scale, shift = 1.0, 0.0
    if calibrates.sum() >= MIN_CALIBRATION and not masks[0].all():
        before = taken & ~aside
        weights, bias = _regressions(rows[before], gold[before], is_set, seed)
        scale, shift = _calibration(rows[calibrates] @ weights + bias, gold[calibrates], is_set)
    weights, bias = _regressions(rows[taken], gold[taken], is_set, seed)
    weights[np.abs(weights) < MIN_WEIGHT] = 0
    stored = csr_array(weights.astype(np.float32))
    may_be_empty = not all(values)
    return FieldWeights(labels, stored, bias.astype(np.float32), scale, shift, is_set, may_be_empty)


def _regressions(
    rows: csr_array, gold: NDArray[np.bool_], is_set: bool, seed: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the weights, [columns, labels], and the biases of one regression per label."""
    strength = SET_STRENGTH if is_set else CLASS_STRENGTH
    model = partial(
        SGDClassifier,
        loss="log_loss",
        alpha=1 / (strength * len(gold)),
        max_iter=max(6, -(-MIN_UPDATES // len(gold))),
        tol=None,
        random_state=seed,
    )

    def regression(has_label: NDArray[np.bool_]) -> tuple[NDArray[Any], float]:
        count = int(has_label.sum())
        if count < MIN_ITEMS or count == len(has_label):
            odds = (count + 0.5) / (len(has_label) - count + 0.5)
            return np.zeros(rows.shape[1], np.float32), float(np.log(odds))
        fitted = model().fit(rows, has_label)
        return fitted.coef_[0].astype(np.float32), float(fitted.intercept_[0])

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        fitted = list(threads.map(regression, gold.T))
    weights = np.zeros((rows.shape[1], len(fitted)), np.float32)
    for column, (of_label, _) in enumerate(fitted):
        weights[:, column] = of_label
    return weights, np.array([bias for _, bias in fitted])


def _calibration(
    scores: NDArray[Any], gold: NDArray[np.bool_], is_set: bool
) -> tuple[float, float]:
    """Return the scale, which is positive, and shift of the scores with the lowest log loss."""

    def loss(of: NDArray[Any]) -> float:
        logits = scores * np.exp(of[0]) + (of[1] if is_set else 0)
        if is_set:
            return float(np.mean(np.logaddexp(0, np.where(gold, -logits, logits))))
        return float(np.mean(np.logaddexp.reduce(logits, axis=1) - logits[gold]))

    log_scale, shift = minimize(loss, np.zeros(2), method="Nelder-Mead").x
    return float(np.exp(log_scale)), float(shift) if is_set else 0.0
