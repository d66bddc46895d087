"""From probabilities of labels to those of label sets, and the set that scores best."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from panjue.finetune.classifier.calibration import TINY, calibrated
from panjue.finetune.classifier.features import Array

Probabilities = dict[str, float]
"""Label -> probability. Of a class they sum to 1; of a label set each stands alone."""

MAX_SIZE = 3
"""Sets of at least so many labels count as of one size."""


@dataclass(frozen=True)
class LabelField:
    """The labels of a field, and how their scores become probabilities."""

    labels: Sequence[str]
    is_set: bool  # whether the field is a label set, or one class
    scale: float  # a score is multiplied by this to give a logit: calibration
    shift: float  # is added to each logit of a label set
    sizes: Sequence[float] = (0.0, 1.0, 1.0, 1.0)
    """Weights of sets of 0, 1, 2 and more labels: how often training had such sets, divided by
    their mean probability if labels were independent."""
    frequencies: Sequence[float] = ()
    """The probability of each label if a text says nothing; none in files of version 0.4."""

    def probabilities(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Return the probabilities of scores, [rows, labels]; none is 0."""
        if self.is_set:
            return calibrated(scores, self.scale, self.shift)
        logits = scores.astype(np.float64) * self.scale + self.shift
        result: NDArray[np.float64] = np.maximum(softmax(logits, axis=1), TINY)
        return result

    def as_far_as_known(self, probabilities: Array, known: Array) -> Array:
        """Return probabilities of items, [items, labels], drawn to the labels' frequencies.

        `known` says how far the text of each item is known, from 0 to 1, [items]: words that
        training does not have say nothing.
        """
        if not self.frequencies:
            return probabilities
        share = known[:, None]
        result: Array = share * probabilities + (1 - share) * np.array(self.frequencies)
        return result

    def by_label(self, probabilities: NDArray[Any]) -> Probabilities:
        """Return label -> probability, of [labels]; labels of probability 0 are left out."""
        possible = np.flatnonzero(probabilities)
        return {self.labels[number]: float(probabilities[number]) for number in possible}


def label_frequencies(gold: NDArray[np.bool_], is_set: bool) -> tuple[float, ...]:
    """Return the probability of each label if the text says nothing; gold is [items, labels].

    Of a class it is how often items have it. Of a label set that is the odds: so are sets of one
    label as likely as they are frequent, see `set_chances`. As in `platt` there is one item more of
    each kind, with a label and without it: no frequency is 0.
    """
    items, labels = gold.shape
    if not is_set:
        frequencies = (gold.sum(axis=0) + 1) / (items + labels)
        return tuple(frequencies.tolist())
    odds = (gold.sum(axis=0) + 1) / (items + 2)
    return tuple((odds / (1 + odds)).tolist())


def size_chances(probabilities: Iterable[float]) -> list[float]:
    """Return the chances of sets of 0, 1, 2 and more labels, of independent labels."""
    none = 1.0
    one = 0.0
    two = 0.0
    more = 0.0
    for p in probabilities:
        # Largest size first: each line needs the old values of the sizes below it.
        more = more + two * p
        two = two * (1 - p) + one * p
        one = one * (1 - p) + none * p
        none = none * (1 - p)
    return [none, one, two, more]


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


LABELS_OF_SETS = 6
"""Sets are formed of so many of the likeliest labels."""

MAX_FORMED_SIZE = 3
"""Sets of up to so many labels are formed of all of these, larger ones of the likeliest."""

ROUNDING = 1e-12
"""Differences of expected F1 below this are rounding; the smaller set then stays."""


def by_probability(labels: Iterable[str], probabilities: Probabilities) -> list[str]:
    """Return labels, the likeliest first."""
    return sorted(labels, key=lambda label: (-probabilities[label], label))


def likely_sets(
    weights: Sequence[float], probabilities: Probabilities
) -> dict[frozenset[str], float]:
    """Return the sets of the likeliest labels, with their probabilities.

    `weights` are `LabelField.sizes`. The empty set is one of them only if training had it. The sets
    that are not formed have the rest of the probability.
    """
    ranked = by_probability(probabilities, probabilities)[:LABELS_OF_SETS]
    sets: list[frozenset[str]] = []
    for size in range(1, MAX_FORMED_SIZE + 1):
        sets += map(frozenset, combinations(ranked, size))
    for size in range(MAX_FORMED_SIZE + 1, len(ranked) + 1):
        sets.append(frozenset(ranked[:size]))
    if weights[0]:
        sets.append(frozenset())
    chances = set_chances(weights, probabilities, sets)
    return dict(zip(sets, chances, strict=True))


def set_chances(
    weights: Sequence[float], probabilities: Probabilities, sets: Sequence[frozenset[str]]
) -> list[float]:
    """Return the probability of each set, that exactly it is right.

    Labels are independent, but for the sizes of sets: a set of a size that training had seldom is
    less likely: `weights` are `LabelField.sizes`.
    """
    chances = {label: min(max(p, TINY), 1 - TINY) for label, p in probabilities.items()}
    odds = {label: p / (1 - p) for label, p in chances.items()}
    none = prod(1 - p for p in chances.values())
    likely = [p for p in chances.values() if p > TINY]
    by_size = size_chances(likely or chances.values())
    expected = sum(map(mul, by_size, weights))
    scale = none / (expected or 1)
    found = []
    for labels in sets:
        size = min(len(labels), MAX_SIZE)
        # Sorted: sums and products of floats depend on their order.
        of_labels = [odds.get(label, TINY) for label in sorted(labels)]
        found.append(scale * weights[size] * prod(of_labels))
    return found


def best_set(chances: Mapping[frozenset[str], float], max_size: int) -> frozenset[str]:
    """Return the set of at most `max_size` labels with the highest expected F1, exactly.

    For a given size m, the expected F1 is a sum over the chosen labels. The term of a label is the
    sum of 2 P(gold) / (m + |gold|) over the gold sets that have it. So the m labels with the
    largest terms are the best set of size m (Dembczyński et al., "An exact algorithm for F-measure
    maximization", NIPS 2011). It is empty only if `chances` has the empty set.
    """
    # Label -> size of gold -> probability of the gold sets of this size that have it.
    by_size: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for gold, p in chances.items():
        for label in gold:
            by_size[label][len(gold)] += p
    labels = sorted(by_size)
    best = frozenset[str]()
    best_value = chances.get(best, -1.0)
    for size in range(1, min(max_size, len(labels)) + 1):
        terms = {}
        for label in labels:
            parts = [2 * p / (size + of_gold) for of_gold, p in by_size[label].items()]
            terms[label] = sum(parts)
        ranked = sorted(labels, key=lambda label: (-terms[label], label))
        value = sum(terms[label] for label in ranked[:size])
        if value > best_value + ROUNDING:
            best = frozenset(ranked[:size])
            best_value = value
    return best
