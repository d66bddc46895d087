"""Fit the text classifier that lies beside an adapter, and its opinions on its own cases.

Prompts of training show opinions. If they came from a classifier that has seen the answer of the
case, they would be too good. So they are cross-fitted: the cases are divided into folds, and the
opinion on a case comes from a classifier that was fitted without its fold.

The first stage is one regression per label, on n-grams. Trees, the second stage, correct its
scores. The cases come from two files: `train`, and `mix` with further cases, if any. How far a text
is known, from 0 to 1, depends on the share of its n-grams that other training cases have.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from heapq import nsmallest
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy.sparse import csr_array, hstack

from panjue.finetune.classifier.calibration import FOLDS
from panjue.finetune.classifier.classifier import Classifier, read_classifier
from panjue.finetune.classifier.features import Array, facts, how_known, marked
from panjue.finetune.classifier.label_sets import LabelField, Probabilities, size_weights
from panjue.finetune.classifier.linear import (
    UNUSUAL,
    FirstStage,
    TrainingItems,
    cross_calibrated,
    fit_first_stage,
    fit_views,
    moved_to_frequencies,
    regressions,
)
from panjue.finetune.classifier.opinions import Advisor, Opinion, case_key, opinion_text
from panjue.finetune.classifier.trees import FieldTrees, Items, fit_second_stage
from panjue.prompts.example import Example, LabelFields
from panjue.prompts.labels import Labels
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_folder, dump, read_lines
from panjue.prompts.plumbing.progress import meter
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task

OPINIONS_FILE = "opinions.jsonl"
"""File beside a classifier with its opinions on the cases that it was fitted on."""

MAX_EXAMPLES = 12_000
"""Cases of `train`, and as many of `mix`, to bound time and memory: an item takes some 50 kB."""

PLACEHOLDER_CHANCES = (0.75, 0.2)
"""Probabilities of the two labels in the prompts of a dry run."""

MIN_CASES = 300
"""Least number of cases for a second stage."""


@dataclass(frozen=True)
class Fitted:
    """A classifier, and its cross-fitted probabilities for the cases that it was fitted on."""

    classifier: Classifier
    items: TrainingItems
    crossed: Mapping[str, Array]  # field -> cross-fitted probabilities, [items, labels]

    def probabilities(self) -> Iterator[tuple[Example, list[dict[str, Probabilities]]]]:
        """Yield every case with the cross-fitted probabilities of its items."""
        start = 0
        for example, size in zip(self.items.cases, self.items.sizes, strict=True):
            own = slice(start, start + size)
            crossed = {name: of_items[own] for name, of_items in self.crossed.items()}
            yield example, self.classifier.by_item(crossed)
            start += size


def fit(
    task: Task,
    train: Iterable[Example],
    mix: Iterable[Example],
    known_labels: Labels,
    seed: int,
    console: Console,
) -> Fitted:
    """Return the classifier of the fields that `task` decides, fitted on examples with answers.

    Regressions give all items cross-fitted scores. On these scores, the calibration is fitted with
    the cases of `train` (Platt scaling for label sets, a temperature for classes; Guo et al., ICML
    2017), and the second stage, if any, with all cases. The less of a text is known, the more its
    probabilities then move to the frequencies of the labels. Last, the sizes of label sets get
    weights (`size_weights`). Labels of cases of `mix` that are not in `known_labels` are ignored.
    """
    label_fields = task.answer
    items = training_items(task, train, mix, known_labels)
    views, rows, shares_known = fit_views(items)
    stages: dict[str, FirstStage] = {}
    n_labels = 0
    for name in label_fields.fields:
        n_labels += len(label_fields.counts(name, known_labels.counts))
    with meter(console, FOLDS * n_labels) as shown:
        regress = partial(regressions, seed=seed, shown=shown)
        for name in label_fields.fields:
            stages[name] = fit_first_stage(name, task, items, rows, known_labels, regress)
    # `crossed` has the cross-fitted probabilities by field. The loop below adds fields without a
    # second stage, and moves all probabilities to the frequencies.
    second, crossed = second_stage_if_any(label_fields, items, stages, console)
    # Texts with this share of known n-grams or more count as fully known. In training, all do but a
    # share of `UNUSUAL`.
    usual_share = float(np.quantile(shares_known, UNUSUAL))
    text_known = how_known(shares_known, usual_share)  # from 0 to 1, [items]
    fields: dict[str, LabelField] = {}
    for name, stage in stages.items():
        if name not in crossed:
            crossed[name] = cross_calibrated(stage, items.fold)
        crossed[name] = moved_to_frequencies(stage, crossed[name], text_known, items.fold)
        fields[name] = stage.field
        if stage.field.is_set:
            values = [item[name] for item in items.answers]
            sizes = size_weights(stage.field.labels, values, crossed[name])
            fields[name] = replace(stage.field, sizes=sizes)
    weights = []
    for view in range(len(views)):
        of_fields = [stage.weights[view] for stage in stages.values()]
        weights.append(csr_array(hstack(of_fields, format="csr")))
    bias = np.concatenate([stage.bias for stage in stages.values()])
    classifier = Classifier(label_fields, views, weights, bias, fields, second, usual_share)
    return Fitted(classifier, items, crossed)


def training_items(
    task: Task, train: Iterable[Example], mix: Iterable[Example], known_labels: Labels
) -> TrainingItems:
    """Return the items of at most `MAX_EXAMPLES` cases of `train` and as many of `mix`.

    Cases that training refuses are left out, see `_usable`.
    """
    own = _usable(task, _sample(train), known_labels)
    cases = own + _usable(task, _sample(mix), known_labels)
    if not cases:
        raise UserError("train: no example is left to train on, or none has labels")
    answers = [task.answer.items_of(example.answer or {}) for example in cases]
    sizes = np.array([len(items) for items in answers])
    # By hash, so that the copy of a case in `mix` is in the same fold.
    fold_of_case = [int(text_hash(example), 16) % FOLDS for example in cases]
    is_own = np.arange(len(cases)) < len(own)
    return TrainingItems(
        cases=cases,
        sizes=sizes,
        answers=list(chain.from_iterable(answers)),
        fold=np.repeat(fold_of_case, sizes),
        is_own=np.repeat(is_own, sizes),
    )


def save_fitted(fitted: Fitted, task: Task, labels: Labels, folder: Path) -> None:
    """Write a classifier and its cross-fitted opinions. `folder` appears when it is complete."""
    advisor = Advisor(task, labels, fitted.classifier)
    with atomic_folder(folder) as temporary:
        fitted.classifier.save(temporary / CLASSIFIER)
        with (temporary / OPINIONS_FILE).open("w", encoding="utf-8") as out:
            for example, items in fitted.probabilities():
                text = opinion_text(example, advisor.with_answers(items), task.answer)
                out.write(dump({"key": case_key(example), "opinions": text}) + "\n")


def training_advisor(folder: Path, task: Task, labels: Labels) -> Advisor:
    """Return an advisor that gives training cases the cross-fitted opinions in `folder`."""
    known = {row["key"]: row["opinions"] for _, row in read_lines(folder / OPINIONS_FILE)}
    return Advisor(task, labels, read_classifier(folder / CLASSIFIER, task.answer), known)


def show_placeholders(task: Task, labels: Labels, example: Example) -> Example:
    """Return a training example with invented opinions in its prompt: the commonest labels.

    A dry run fits no classifier, and needs prompts of about the real length to measure them.
    """
    assert example.answer, "training examples have answers"
    probabilities = {}
    answer: dict[str, Any] = {}
    for name in task.answer.fields:
        commonest = list(task.answer.counts(name, labels.counts))[:2]
        probabilities[name] = dict(zip(commonest, PLACEHOLDER_CHANCES, strict=False))
        answer[name] = commonest[0] if name in task.answer.classes else commonest[:1]
    items = task.answer.items_of(example.answer)
    text = opinion_text(example, [Opinion(probabilities, answer)] * len(items), task.answer)
    return replace(example, inputs={**example.inputs, "opinions": text})


def _usable(task: Task, examples: Iterable[Example], known_labels: Labels) -> list[Example]:
    """Return the examples without those that training refuses because a label list is empty."""
    usable = []
    for example in examples:
        assert example.answer is not None, "training examples have answers"
        items = task.answer.items_of(example.answer)
        lists = [item[name] for item in items for name in task.answer.sets]
        if not all(lists):
            # The right reply is decoded: a repair says that the task allows no empty list.
            right_reply = task.ask.target(example)
            if task.ask.decode(right_reply, example, known_labels).repairs:
                continue
        usable.append(example)
    return usable


def _sample(examples: Iterable[Example]) -> list[Example]:
    """Return at most `MAX_EXAMPLES` examples with the lowest text hashes, in their old order."""
    lowest = nsmallest(MAX_EXAMPLES, enumerate(examples), key=lambda pair: text_hash(pair[1]))
    return [example for _, example in sorted(lowest, key=itemgetter(0))]


def second_stage_if_any(
    label_fields: LabelFields,
    items: TrainingItems,
    stages: Mapping[str, FirstStage],
    console: Console,
) -> tuple[dict[str, FieldTrees], dict[str, Array]]:
    """Return field -> second stage, if any, and field -> its cross-fitted probabilities.

    Both are empty if there are few cases, or if the task reads no evidence from texts, such as
    amounts of money: only tasks that do have a second stage.
    """
    if not label_fields.evidence or len(items.cases) < MIN_CASES:
        return {}, {}
    facts_of_items = []
    for example, size in zip(items.cases, items.sizes.tolist(), strict=True):
        facts_of_items += facts(marked(example, size), label_fields.evidence)
    scores = {name: stage.scores for name, stage in stages.items()}
    gold = {name: stage.gold for name, stage in stages.items()}
    scored_items = Items(items.sizes, scores, np.array(facts_of_items, float))
    return fit_second_stage(scored_items, gold, label_fields.sets, items.fold, console)
