"""Fit the text classifier that lies beside an adapter: one logistic regression per label."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from heapq import nsmallest
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack
from sklearn.linear_model import SGDClassifier

from panjue.eval.classifier import (
    MAX_SIZE,
    Classifier,
    FieldWeights,
    Hashes,
    Probabilities,
    View,
    facts_of,
    read_classifier,
    size_chances,
    view_scores,
    views,
)
from panjue.eval.opinions import Advisor, case_key, opinion_text
from panjue.eval.second_stage import Items
from panjue.finetune.calibrate import calibrated_apart, fit_calibration
from panjue.finetune.second_stage import FOLDS, fit_second_stage
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_lines, replace_folder
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task

OPINIONS_FILE = "opinions.jsonl"
"""File beside a classifier, with its opinions on the cases that it was fitted on."""

MAX_EXAMPLES = 12_000
"""Of `train`, and again of `mix`: bounds time and memory; an item takes some 50 kB."""

MAX_COLUMNS = 60_000
"""N-grams of each view, those of the most texts."""

MIN_TEXTS = 2
"""Texts in which an n-gram has to occur."""

MIN_ITEMS = 4
"""Items that need to have a label; a rarer one gets its frequency, whatever the text."""

SET_STRENGTH = 10.0
CLASS_STRENGTH = 1.0
"""Inverse strength of the L2 penalty (scikit-learn's C), chosen on a fifth of the real cases."""

MIN_UPDATES = 60_000
"""Rows seen by each regression at least; the passes over the rows follow from it."""

MIN_WEIGHT = 0.1
"""Smaller weights are left out of the file."""

MIN_CASES = 300
"""Cases that the second stage needs."""

Case = tuple[Example, Sequence[Mapping[str, Any]]]
"""An example, and the items of its answer."""


@dataclass(frozen=True)
class Fitted:
    """A classifier, and what it thinks of the cases that it was fitted on."""

    classifier: Classifier
    cases: Sequence[Example]  # those cases
    sizes: NDArray[np.int64]  # items of each, [cases]
    crossed: Mapping[str, NDArray[Any]]
    """Field -> probabilities by parts that had not seen the case, [items, labels]."""

    def probabilities(self) -> Iterator[tuple[Example, list[dict[str, Probabilities]]]]:
        """Yield every case with the cross-fitted probabilities of its items."""
        start = 0
        for example, size in zip(self.cases, self.sizes, strict=True):
            items = range(start, start + size)
            yield example, [self.classifier.item_probabilities(self.crossed, i) for i in items]
            start += size


def fit(
    task: Task, train: Iterable[Example], mix: Iterable[Example], known: Labels, seed: int
) -> Fitted:
    """Return the classifier of the fields that `task` decides, fitted on examples with answers.

    Each case is scored by regressions that have not seen it (cross-fitted). On these scores those
    of `train` are calibrated (Platt scaling for label sets, a temperature for classes; Guo et al.,
    ICML 2017) and, if the task reads evidence, the second stage is fitted. Of more than
    `MAX_EXAMPLES` those of the lowest text hashes are taken. Labels that are not `known`, of
    mixed-in cases, are no answers.
    """
    decides = task.answer
    own_cases = _cases(task, _sample(train), known)
    cases = own_cases + _cases(task, _sample(mix), known)
    if not cases:
        raise UserError("train: no example is left to train on, or none has labels")
    sizes = np.array([len(items) for _, items in cases])
    every_item = [item for _, items in cases for item in items]
    used, rows = fit_views(cases)
    # By hash: a case that `mix` has too is in the same fold.
    fold_of_case = [int(text_hash(example), 16) % FOLDS for example, _ in cases]
    fold = np.repeat(fold_of_case, sizes)
    is_own = np.arange(len(fold)) < sizes[: len(own_cases)].sum()

    fields: dict[str, FieldWeights] = {}
    scores: dict[str, NDArray[Any]] = {}
    gold: dict[str, NDArray[np.bool_]] = {}
    for name in decides.fields:
        is_set = name in decides.sets
        labels = tuple(sorted(decides.counts(name, known.counts)))
        gold[name] = has_labels(every_item, name, labels, is_set)
        fitting = _Fitting(rows, gold[name], is_set, seed)
        scores[name], weights, bias = fitting.cross_fitted(fold)
        teaches = is_own & fitting.taken
        summed = scores[name].sum(0)
        scale, shift = fit_calibration(summed[teaches], gold[name][teaches], is_set)
        fields[name] = FieldWeights(labels, weights, bias, scale, shift, is_set)

    second = None
    crossed: dict[str, NDArray[Any]] = {}
    if decides.evidence and len(cases) >= MIN_CASES:
        facts = []
        for example, items in cases:
            facts += facts_of(example, len(items), decides)
        of_cases = Items(sizes, scores, np.array(facts, float))
        second, crossed = fit_second_stage(of_cases, gold, decides.sets, fold)
    for name, field in fields.items():
        if name not in crossed:
            crossed[name] = calibrated_apart(field, scores[name].sum(0), gold[name], is_own, fold)
    for name in decides.sets:
        # Without its unknown labels a set would count as a smaller one.
        named = set(fields[name].labels)
        is_known = np.array([named.issuperset(item[name]) for item in every_item])
        set_sizes = size_weights(crossed[name][is_known], gold[name][is_known])
        fields[name] = replace(fields[name], sizes=set_sizes)
    classifier = Classifier(decides, used, fields, second)
    return Fitted(classifier, [example for example, _ in cases], sizes, crossed)


def fit_views(cases: Sequence[Case]) -> tuple[tuple[View, View], tuple[csr_array, csr_array]]:
    """Return the two views of the items, of the whole case and of each alone, and their rows."""
    whole = []
    own = []
    for example, items in cases:
        for of_case, of_item in views(example, len(items)):
            whole.append(of_case)
            own.append(of_item)
    whole_view = fit_view(whole)
    own_view = fit_view(own)
    return (whole_view, own_view), (whole_view.rows(whole), own_view.rows(own))


def has_labels(
    items: Sequence[Mapping[str, Any]], name: str, labels: Sequence[str], is_set: bool
) -> NDArray[np.bool_]:
    """Return which items have which of the labels in field `name`, [items, labels]."""
    rows = []
    for item in items:
        value = set(item[name]) if is_set else {item[name]}
        rows.append([label in value for label in labels])
    return np.array(rows)


def save_fitted(fitted: Fitted, task: Task, labels: Labels, folder: Path) -> None:
    """Write a classifier and its cross-fitted opinions; `folder` appears when it is complete."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fitted.classifier.save(temporary / CLASSIFIER)
    advisor = Advisor(task, labels, fitted.classifier)
    with (temporary / OPINIONS_FILE).open("w", encoding="utf-8") as out:
        for example, items in fitted.probabilities():
            text = opinion_text(example, advisor.with_answers(items), task.answer)
            out.write(dump({"key": case_key(example), "opinions": text}) + "\n")
    replace_folder(temporary, folder)


def training_advisor(folder: Path, task: Task, labels: Labels) -> Advisor:
    """Return the advisor of a training: it knows the cross-fitted opinions that `folder` has."""
    known = {row["key"]: row["opinions"] for _, row in read_lines(folder / OPINIONS_FILE)}
    return Advisor(task, labels, read_classifier(folder / CLASSIFIER, task), known)


def size_weights(probabilities: NDArray[Any], gold: NDArray[np.bool_]) -> tuple[float, ...]:
    """Return `FieldWeights.sizes` for probabilities of independent labels, [items, labels]."""
    chances = []
    for row in probabilities:
        possible = row[row > 0]
        chances.append(size_chances(possible.tolist()))
    expected = np.maximum(np.mean(chances, axis=0), 1e-9)
    sizes = np.minimum(gold.astype(bool).sum(1), MAX_SIZE)
    found = np.bincount(sizes, minlength=MAX_SIZE + 1) / len(gold)
    return tuple((found / expected).tolist())


def _cases(task: Task, examples: Iterable[Example], known: Labels) -> list[Case]:
    cases = []
    for example in examples:
        assert example.answer is not None, "training examples have answers"
        items = task.answer.items_of(example.answer)
        lists = [item[name] for item in items for name in task.answer.sets]
        if not all(lists) and task.ask.decode(task.ask.target(example), example, known).repairs:
            continue  # an empty label list that the training of the model refuses too
        cases.append((example, items))
    return cases


def _sample(examples: Iterable[Example]) -> list[Example]:
    """Return at most `MAX_EXAMPLES` examples, in their order; of a text all of them or none."""

    def hash_of(numbered: tuple[int, Example]) -> str:
        return text_hash(numbered[1])

    chosen = nsmallest(MAX_EXAMPLES + 1, enumerate(examples), key=hash_of)
    if len(chosen) > MAX_EXAMPLES:
        first_out = hash_of(chosen[-1])
        chosen = [numbered for numbered in chosen if hash_of(numbered) != first_out]
    chosen.sort(key=itemgetter(0))
    return [example for _, example in chosen]


def fit_view(texts: Sequence[Hashes]) -> View:
    """Return the n-grams of the most texts, with their inverse document frequencies."""
    once_a_text = np.concatenate([np.unique(text) for text in texts])
    distinct, counts = np.unique(once_a_text, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:MAX_COLUMNS]
    frequent = most[counts[most] >= MIN_TEXTS]
    kept = np.sort(frequent)
    inverse_frequencies = (1 + len(texts)) / (1 + counts[kept])
    idf = np.log(inverse_frequencies) + 1
    return View(distinct[kept], idf.astype(np.float32))


@dataclass(frozen=True)
class _Fitting:
    """The regressions of one field: rows by both views, and gold, [items, labels]."""

    rows: tuple[csr_array, csr_array]
    gold: NDArray[np.bool_]
    is_set: bool
    seed: int

    @property
    def taken(self) -> NDArray[np.bool_]:
        """The items that teach: those with a known class, and all for label sets."""
        return np.asarray(self.gold.any(axis=1) | self.is_set)

    def cross_fitted(
        self, fold: NDArray[np.int64]
    ) -> tuple[NDArray[Any], csr_array, NDArray[np.float32]]:
        """Return scores by regressions that did not see the fold, and the mean of the regressions.

        The scores are [views, items, labels]. The mean is what is used later: one regression of all
        items would be surer of itself than those on whose scores the second stage is fitted.
        """
        scores = np.zeros((2, *self.gold.shape), np.float32)
        every_weights = []
        every_bias = []
        for k in range(FOLDS):
            aside = fold == k
            weights, bias = self.regressions(self.taken & ~aside)
            columns_of_first = self.rows[0].shape[1]
            of_views = [csr_array(part) for part in np.split(weights, [columns_of_first])]
            rows_aside = [rows[aside] for rows in self.rows]
            scores[:, aside] = view_scores(rows_aside, of_views, bias)
            every_weights.append(weights)
            every_bias.append(bias)
        mean = np.asarray(sum(every_weights) / np.float32(FOLDS))
        mean[np.abs(mean) < MIN_WEIGHT] = 0
        bias = np.asarray(sum(every_bias) / np.float32(FOLDS))
        return scores, csr_array(mean), bias

    def regressions(self, of: NDArray[np.bool_]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the weights, [columns, labels], and the biases of one regression per label."""
        rows = csr_array(hstack([part[of] for part in self.rows], format="csr"))
        strength = SET_STRENGTH if self.is_set else CLASS_STRENGTH
        count = max(1, rows.shape[0])
        model = partial(
            SGDClassifier,
            loss="log_loss",
            alpha=1 / (strength * count),
            max_iter=max(6, -(-MIN_UPDATES // count)),
            tol=None,
            random_state=self.seed,
        )

        def regression(has_label: NDArray[np.bool_]) -> tuple[NDArray[Any], float]:
            having = int(has_label.sum())
            lacking = len(has_label) - having
            if having < MIN_ITEMS or lacking == 0:
                odds = (having + 0.5) / (lacking + 0.5)
                return np.zeros(rows.shape[1], np.float32), float(np.log(odds))
            fitted = model().fit(rows, has_label)
            [weights] = fitted.coef_
            [bias] = fitted.intercept_
            return weights.astype(np.float32), float(bias)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            fitted = list(threads.map(regression, self.gold[of].T))
        weights = np.zeros((rows.shape[1], len(fitted)), np.float32)
        biases = np.zeros(len(fitted), np.float32)
        for column, (of_label, bias) in enumerate(fitted):
            weights[:, column] = of_label
            biases[column] = bias
        return weights, biases
