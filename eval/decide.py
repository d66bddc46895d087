"""Beliefs -> the answer of highest expected score: label sets by F1, classes by probability."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.eval.beliefs import Belief, Beliefs, marginals
from panjue.eval.classifier import trained_classifier
from panjue.eval.pool import Pool
from panjue.prompts.example import Answer, Example
from panjue.prompts.labels import Labels
from panjue.prompts.model import DECISION
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.plumbing.run import AnswersRecord
from panjue.prompts.task import Task

LabelSet = frozenset[str]

MAX_JOINT_LABELS = 8
MIN_JOINT_PROBABILITY = 0.01
"""Two fields are decided jointly over the likeliest labels of each: at most so many, and only
labels of at least this probability."""

TOLERANCE = 1e-12
"""Differences of expected F1 below this are rounding; the smaller set then stays."""


@dataclass(frozen=True)
class Decision:
    """An answer and its confidence.

    Attributes:
        answer: In the task's usual form.
        confidence: Per item: field -> probability that the field is exactly right.
        classes: Per item: field with one class -> class -> probability.
    """

    answer: Answer
    confidence: list[dict[str, float]]
    classes: list[dict[str, Belief]]


class Decider:
    """Decides answers from completions, with the training's labels as a prior."""

    def __init__(
        self,
        task: Task,
        labels: Labels,
        pair_price: float = 0.0,
        class_prior: float = 0.0,
        class_ratios: Mapping[str, Mapping[str, float]] | None = None,
        pool: Pool | None = None,
    ) -> None:
        """Prepare for one task and its labels.

        Args:
            task: A task whose answers are decided.
            labels: Its labels with their counts and the table of pairs.
            pair_price: Price, in F1, of a label of the first set that training never saw together
                with any decided label of the second set, and vice versa. 0 turns it off.
            class_prior: Weight of the class frequencies: beliefs are multiplied by `class_ratios`
                to this power and scaled to sum to 1. 0 turns it off.
            class_ratios: Field -> class -> real frequency divided by the model's mean belief;
                1 if not named. It corrects label shift, as training may have mixed in cases of
                another kind (Saerens et al., Neural Computation 2002).
            pool: Pools the beliefs with a text classifier's.
        """
        assert task.answer.fields, "the answers of this task are not decided"
        self._task, self._labels, self._decides = task, labels, task.answer
        self._beliefs = Beliefs(task, labels)
        self.pair_price, self.class_prior = pair_price, class_prior
        self._class_ratios = class_ratios or {}
        self.pool = pool

    def decide(
        self, example: Example, completion: Mapping[str, Any], *, keep_first: bool = False
    ) -> Decision:
        """Return the answer of highest expected score, and its confidence.

        With `keep_first` the answer is the first reply, unchanged, with its confidence.
        """
        first = self._task.ask.decode(completion["texts"][0], example, self._labels).answer
        return self.decide_from(first, self.beliefs(example, completion), keep_first=keep_first)

    def beliefs(self, example: Example, completion: Mapping[str, Any]) -> list[dict[str, Belief]]:
        """Return the beliefs from a completion, pooled with the classifier's if there is one.

        If no reply is readable, they are the classifier's own.
        """
        found = self._beliefs.of(example, completion)
        if self.pool is None:
            return found.items
        if not found.is_readable:
            return self.pool.alone(example)
        return self.pool(example, found.items)

    def decide_alone(self, example: Example) -> Decision:
        """Return what the classifier alone decides about an example that has no reply."""
        assert self.pool, "there is no classifier"
        fallback = self._task.ask.decode("", example, self._labels).answer
        return self.decide_from(fallback, self.pool.alone(example))

    def decide_from(
        self, first: Answer, beliefs: Sequence[Mapping[str, Belief]], *, keep_first: bool = False
    ) -> Decision:
        """Decide from the given beliefs; the fields that are not decided stay as in `first`."""
        items, confidence, classes = [], [], []
        for item, raw_belief in zip(self._decides.items_of(first), beliefs, strict=True):
            weighted = {f: self._weighted(f, raw_belief[f]) for f in self._decides.classes}
            belief = {**raw_belief, **weighted}
            chosen = (
                {f: item[f] for f in self._decides.fields} if keep_first else self.fields(belief)
            )
            items.append({**item, **chosen})
            classes.append(weighted)
            confidence.append(
                {
                    field: belief[field].get(frozenset(v) if isinstance(v, list) else v, 0.0)
                    for field, v in chosen.items()
                }
            )
        return Decision(self._decides.with_items(first, items), confidence, classes)

    def _weighted(self, field: str, belief: Belief) -> Belief:
        """Return the belief about a class, weighted by the class prior."""
        ratios = self._class_ratios.get(field, {})
        weights = {
            label: p * ratios.get(label, 1.0) ** self.class_prior for label, p in belief.items()
        }
        total = sum(weights.values())
        return {label: weight / total for label, weight in weights.items()}

    def fields(self, belief: Mapping[str, Belief]) -> dict[str, Any]:
        """Return the decided fields of one item, labels likeliest first."""
        sets = self._decides.sets
        max_sizes = {name: self._labels.most[self._decides.kind(name)] for name in sets}
        if len(sets) == 2 and self.pair_price:  # pairs are of two fields
            first, second = sets
            chosen: tuple[LabelSet, ...] = best_pair(
                (belief[first], belief[second]),
                (max_sizes[first], max_sizes[second]),
                self._labels.pairs,
                self.pair_price,
            )
        else:
            chosen = tuple(best_set(belief[field], max_sizes[field]) for field in sets)
        decided: dict[str, Any] = {
            field: _ranked(labels, belief[field])
            for field, labels in zip(sets, chosen, strict=True)
        }
        for field in self._decides.classes:
            decided[field] = max(belief[field].items(), key=lambda pair: (pair[1], str(pair[0])))[0]
        return decided


def fitted_decider(task: Task, labels: Labels, trained: Path | None) -> Decider | None:
    """Return the decider with the settings that `panjue tune` wrote into `trained`, if any.

    It has a text classifier if that gains in one of the fields.

    None if the task's answers are not decided.
    """
    if not task.answer.fields:
        return None
    fitted = _fitted(trained)
    names = ("pair_price", "class_prior", "class_ratios")
    settings = {name: fitted[name] for name in names if name in fitted}
    if trained and fitted.get("exponents"):
        exponents = {name: (one, other) for name, (one, other) in fitted["exponents"].items()}
        settings["pool"] = Pool(trained_classifier(trained, task), exponents)
    return Decider(task, labels, **settings)


def decision_sha256(trained: Path | None) -> str | None:
    """Return the hash of the settings that `panjue tune` wrote into `trained`, if any."""
    path = trained / DECISION if trained else None
    return sha256(path) if path and path.exists() else None


def cases_of(record: AnswersRecord) -> dict[str, Any]:
    """Return which cases were answered."""
    return {"test_sha256": record.test_sha256, "held_out": record.held_out}


def is_fitted_on(trained: Path, record: AnswersRecord) -> bool:
    """Say whether the settings in `trained` were fitted on the cases of these answers."""
    return _fitted(trained).get("fitted_on") == cases_of(record)


def _fitted(trained: Path | None) -> dict[str, Any]:
    """Return the settings that `panjue tune` wrote into `trained`; empty if there are none."""
    path = trained / DECISION if trained else None
    settings: dict[str, Any] = read_json(path) if path and path.exists() else {}
    return settings


def expected_f1(chosen: LabelSet, belief: Belief) -> float:
    """Return the expected F1 of `chosen` if the gold set is distributed as `belief`.

    F1 is 1 if both sets are empty.
    """
    if not chosen:
        return belief.get(chosen, 0.0)
    return sum(
        mass * 2 * len(chosen & gold) / (len(chosen) + len(gold)) for gold, mass in belief.items()
    )


def best_set(belief: Belief, max_size: int) -> LabelSet:
    """Return the set of at most `max_size` labels with the highest expected F1, exactly.

    It is empty only if the belief has the empty set.

    For a given size m, the expected F1 is a sum over the chosen labels. The term of a label is the
    sum of 2 P(gold) / (m + |gold|) over the gold sets that have it. So the m labels with the
    largest terms are the best set of size m (Dembczyński et al., "An exact algorithm for F-measure
    maximization", NIPS 2011).
    """
    labels = sorted({label for gold in belief for label in gold})
    best: LabelSet = frozenset()
    best_value = belief.get(best, -1.0)
    for size in range(1, min(max_size, len(labels)) + 1):
        terms = {
            label: sum(2 * p / (size + len(gold)) for gold, p in belief.items() if label in gold)
            for label in labels
        }
        chosen = frozenset(sorted(labels, key=lambda label: (-terms[label], label))[:size])
        value = sum(terms[label] for label in chosen)
        if value > best_value + TOLERANCE:
            best, best_value = chosen, value
    return best


def best_pair(
    beliefs: tuple[Belief, Belief],
    max_sizes: tuple[int, int],
    pairs: Mapping[str, Mapping[str, int]],
    price: float,
) -> tuple[LabelSet, LabelSet]:
    """Return the two sets with the highest sum of expected F1s, less the price of unpaired labels.

    Exact over the likeliest labels of each field, and over sets of at most one label more than the
    largest sampled set. The commonest partner of each likely first label is a candidate too, even
    if no sample has it.
    """
    first = _likeliest(beliefs[0])
    partners = (max(pairs[a], key=lambda b: (pairs[a][b], b)) for a in first if pairs.get(a))
    second = list(dict.fromkeys([*_likeliest(beliefs[1]), *partners]))
    sizes = [min(m, 1 + max(map(len, b))) for m, b in zip(max_sizes, beliefs, strict=True)]
    rows_1, sets_1 = _subsets(first, sizes[0])
    rows_2, sets_2 = _subsets(second, sizes[1])
    is_pair = np.array([[pairs.get(a, {}).get(b, 0) > 0 for b in second] for a in first])
    # [first sets, second sets]: number of labels of the one set without a pair in the other.
    unpaired_1 = rows_1 @ (rows_2 @ is_pair.T == 0).T
    unpaired_2 = (rows_1 @ is_pair == 0) @ rows_2.T
    f1_1 = np.array([expected_f1(labels, beliefs[0]) for labels in sets_1])
    f1_2 = np.array([expected_f1(labels, beliefs[1]) for labels in sets_2])
    values = f1_1[:, None] + f1_2 - price * (unpaired_1 + unpaired_2)
    i, j = np.unravel_index(np.argmax(values > values.max() - TOLERANCE), values.shape)
    return sets_1[i], sets_2[j]


def _likeliest(belief: Belief) -> list[str]:
    marginal = marginals(belief)
    ranked = sorted(marginal, key=lambda label: (-marginal[label], label))
    likely = [label for label in ranked if marginal[label] >= MIN_JOINT_PROBABILITY]
    return likely[:MAX_JOINT_LABELS] or ranked[:1]


def _subsets(labels: Sequence[str], max_size: int) -> tuple[NDArray[np.int64], list[LabelSet]]:
    """Return all subsets of 1 to `max_size` labels, as rows of 0 and 1 and as sets, small first."""
    subsets = [
        indices
        for size in range(1, min(max_size, len(labels)) + 1)
        for indices in combinations(range(len(labels)), size)
    ]
    rows = np.zeros((len(subsets), len(labels)), dtype=np.int64)
    for row, indices in zip(rows, subsets, strict=True):
        row[list(indices)] = 1
    return rows, [frozenset(labels[i] for i in indices) for indices in subsets]


def _ranked(labels: Iterable[str], belief: Belief) -> list[str]:
    marginal = marginals(belief)
    return sorted(labels, key=lambda label: (-marginal.get(label, 0.0), label))
