"""Fit the text classifier that lies beside an adapter: one logistic regression per label."""

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain
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
    Hashes,
    LabelField,
    Probabilities,
    View,
    facts,
    read_classifier,
    size_chances,
    view_scores,
    views,
)
from panjue.eval.opinions import Advisor, case_key, opinion_text
from panjue.eval.second_stage import Array, FieldTrees, Items
from panjue.finetune.calibrate import FirstStage, calibrated_apart, fit_calibration
from panjue.finetune.second_stage import FOLDS, fit_second_stage
from panjue.prompts.example import AnswerFields, Example
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
MIN_PASSES = 6
"""Rows seen by each regression, and passes over the rows, at least."""

MIN_WEIGHT = 0.1
"""Smaller weights are left out of the file."""

MIN_CASES = 300
"""Cases that the second stage needs."""


@dataclass(frozen=True)
class TrainingItems:
    """The items of the answers to all cases, those of one case side by side."""

    cases: Sequence[Example]
    sizes: NDArray[np.int64]  # items of each case, [cases]
    answers: Sequence[Mapping[str, Any]]  # [items]
    fold: NDArray[np.int64]  # [items]
    is_own: NDArray[np.bool_]  # whether it is of `train`, not mixed in, [items]


@dataclass(frozen=True)
class Fitted:
    """A classifier, and what it thinks of the cases that it was fitted on."""

    classifier: Classifier
    items: TrainingItems
    crossed: Mapping[str, Array]
    """Field -> probabilities by parts that had not seen the case, [items, labels]."""

    def probabilities(self) -> Iterator[tuple[Example, list[dict[str, Probabilities]]]]:
        """Yield every case with the cross-fitted probabilities of its items."""
        start = 0
        for example, size in zip(self.items.cases, self.items.sizes, strict=True):
            items = range(start, start + size)
            yield example, [self.classifier.item_probabilities(self.crossed, i) for i in items]
            start += size


def fit(
    task: Task, train: Iterable[Example], mix: Iterable[Example], known: Labels, seed: int
) -> Fitted:
    """Return the classifier of the fields that `task` decides, fitted on examples with answers.

    Each case is scored by regressions that have not seen it (cross-fitted). On these scores those
    of `train` are calibrated (Platt scaling for label sets, a temperature for classes; Guo et al.,
    ICML 2017) and, if the task reads evidence, the second stage is fitted. Labels that are not
    `known`, of mixed-in cases, are no answers.
    """
    decides = task.answer
    items = training_items(task, train, mix, known)
    views_of_items, rows = fit_views(items)
    stages: dict[str, FirstStage] = {}
    for name in decides.fields:
        stages[name] = fit_first_stage(name, task, items, rows, known, seed)
    second, crossed = fit_corrections(decides, items, stages)
    fields: dict[str, LabelField] = {}
    for name, stage in stages.items():
        if name not in crossed:
            crossed[name] = calibrated_apart(stage, items.fold)
        fields[name] = stage.field
        if stage.field.is_set:
            values = [item[name] for item in items.answers]
            sizes = size_weights(stage.field.labels, values, crossed[name])
            fields[name] = replace(stage.field, sizes=sizes)
    weights = []
    for view in range(len(views_of_items)):
        of_fields = [stage.weights[view] for stage in stages.values()]
        weights.append(csr_array(hstack(of_fields, format="csr")))
    bias = np.concatenate([stage.bias for stage in stages.values()])
    classifier = Classifier(decides, views_of_items, weights, bias, fields, second)
    return Fitted(classifier, items, crossed)


def training_items(
    task: Task, train: Iterable[Example], mix: Iterable[Example], known: Labels
) -> TrainingItems:
    """Collect the items to fit on; cases of `mix` teach too, but nothing is calibrated on them."""
    own = _usable(task, _sample(train), known)
    cases = own + _usable(task, _sample(mix), known)
    if not cases:
        raise UserError("train: no example is left to train on, or none has labels")
    answers = [task.answer.items_of(example.answer or {}) for example in cases]
    sizes = np.array([len(items) for items in answers])
    # By hash: a case that `mix` has too is in the same fold.
    fold_of_case = [int(text_hash(example), 16) % FOLDS for example in cases]
    is_own = np.arange(len(cases)) < len(own)
    return TrainingItems(
        cases=cases,
        sizes=sizes,
        answers=list(chain.from_iterable(answers)),
        fold=np.repeat(fold_of_case, sizes),
        is_own=np.repeat(is_own, sizes),
    )


def fit_views(items: TrainingItems) -> tuple[list[View], list[csr_array]]:
    """Return the two views of the items, of the whole case and of each alone, and their rows."""
    whole: list[Hashes] = []
    own: list[Hashes] = []
    for example, size in zip(items.cases, items.sizes.tolist(), strict=True):
        of_case, of_items = views(example, size)
        whole += [of_case] * size
        own += of_items
    both = [fit_view(whole), fit_view(own)]
    return both, [both[0].rows(whole), both[1].rows(own)]


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
    return Advisor(task, labels, read_classifier(folder / CLASSIFIER, task.answer), known)


def size_weights(
    labels: Iterable[str], values: Sequence[Sequence[str]], probabilities: Array
) -> tuple[float, ...]:
    """Return `LabelField.sizes` of a label set: of its values and probabilities for all items."""
    known = set(labels)
    sizes = []
    chances = []
    for value, row in zip(values, probabilities, strict=True):
        if known.issuperset(value):  # without its unknown labels a set would count as a smaller one
            sizes.append(min(len(set(value)), MAX_SIZE))
            chances.append(size_chances(row[row > 0].tolist()))
    expected = np.maximum(np.mean(chances, axis=0), 1e-9)
    frequencies = np.bincount(sizes, minlength=MAX_SIZE + 1) / len(sizes)
    return tuple((frequencies / expected).tolist())


def _usable(task: Task, examples: Iterable[Example], known: Labels) -> list[Example]:
    """Return the examples without those with an empty label list that training refuses too."""
    usable = []
    for example in examples:
        assert example.answer is not None, "training examples have answers"
        items = task.answer.items_of(example.answer)
        lists = [item[name] for item in items for name in task.answer.sets]
        if all(lists) or not task.ask.decode(task.ask.target(example), example, known).repairs:
            usable.append(example)
    return usable


def _sample(examples: Iterable[Example]) -> list[Example]:
    """Return at most `MAX_EXAMPLES` examples, those of the lowest text hashes, in their order."""
    lowest = nsmallest(MAX_EXAMPLES, enumerate(examples), key=lambda pair: text_hash(pair[1]))
    return [example for _, example in sorted(lowest, key=itemgetter(0))]


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


def fit_first_stage(
    name: str,
    task: Task,
    items: TrainingItems,
    rows: Sequence[csr_array],
    known: Labels,
    seed: int,
) -> FirstStage:
    """Fit the regressions of one field without each fold in turn, on the rows by both views."""
    labels = sorted(task.answer.counts(name, known.counts))
    is_set = name in task.answer.sets
    values = [set(item[name]) if is_set else {item[name]} for item in items.answers]
    gold = np.array([[label in value for label in labels] for value in values])
    teaches = gold.any(axis=1) | is_set  # a class that is not known says nothing
    strength = SET_STRENGTH if is_set else CLASS_STRENGTH
    scores = np.zeros((2, *gold.shape), np.float32)
    weights_by_fold = []
    bias_by_fold = []
    for number in range(FOLDS):
        aside = items.fold == number
        used = teaches & ~aside
        rows_used = hstack([part[used] for part in rows], format="csr")
        weights, bias = regressions(csr_array(rows_used), gold[used], strength, seed)
        rows_aside = [part[aside] for part in rows]
        scores[:, aside] = view_scores(rows_aside, by_view(weights, rows), bias)
        weights_by_fold.append(weights)
        bias_by_fold.append(bias)
    mean = np.asarray(sum(weights_by_fold) / np.float32(FOLDS))
    mean[np.abs(mean) < MIN_WEIGHT] = 0
    calibrates = items.is_own & teaches
    score = scores.sum(0)
    scale, shift = fit_calibration(score[calibrates], gold[calibrates], is_set)
    return FirstStage(
        field=LabelField(labels, is_set, scale, shift),
        gold=gold,
        calibrates=calibrates,
        scores=scores,
        weights=by_view(mean, rows),
        bias=np.asarray(sum(bias_by_fold) / np.float32(FOLDS)),
    )


def by_view(weights: NDArray[np.float32], rows: Sequence[csr_array]) -> list[csr_array]:
    """Return the weights for the rows of each view, of those for both side by side."""
    columns_of_first = rows[0].shape[1]
    return [csr_array(part) for part in np.split(weights, [columns_of_first])]


def regressions(
    rows: csr_array, gold: NDArray[np.bool_], strength: float, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the weights, [columns, labels], and the biases of one regression per label."""

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

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        fitted = list(threads.map(regression, gold.T))
    weights = np.zeros((rows.shape[1], len(fitted)), np.float32)
    biases = np.zeros(len(fitted), np.float32)
    for column, (of_label, bias) in enumerate(fitted):
        weights[:, column] = of_label
        biases[column] = bias
    return weights, biases


def fit_corrections(
    decides: AnswerFields, items: TrainingItems, stages: Mapping[str, FirstStage]
) -> tuple[dict[str, FieldTrees], dict[str, Array]]:
    """Return the second stage, and its cross-fitted probabilities; none of too few cases."""
    if not decides.evidence or len(items.cases) < MIN_CASES:
        return {}, {}
    about = []
    for example, size in zip(items.cases, items.sizes.tolist(), strict=True):
        about += facts(example, size, decides.evidence)
    scores = {name: stage.scores for name, stage in stages.items()}
    gold = {name: stage.gold for name, stage in stages.items()}
    scored_items = Items(items.sizes, scores, np.array(about, float))
    return fit_second_stage(scored_items, gold, decides.sets, items.fold)
