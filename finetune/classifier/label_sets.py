"""Compute the probabilities of label sets from those of labels, and the set that scores best."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from panjue.finetune.classifier.calibration import TINY, calibrated
from panjue.finetune.classifier.features import Array

Probabilities = dict[str, float]
"""Label -> probability. For a class they sum to 1; for a label set each label has its own."""

MAX_SIZE = 3
"""Sets with this many labels or more count as one size."""


@dataclass(frozen=True)
class LabelField:
    """The labels of a field, and how their scores become probabilities."""

    labels: Sequence[str]
    is_set: bool  # whether the field is a label set, or one class
    scale: float  # a score is multiplied by this to give a logit: calibration
    shift: float  # is added to each logit of a label set
    sizes: Sequence[float] = (0.0, 1.0, 1.0, 1.0)
    """Weights of sets with 0, 1, 2 and more labels: how often training had sets of this size,
    divided by their mean probability if labels were independent."""
    frequencies: Sequence[float] = ()
    """Probability of each label if the text says nothing; empty in files of version 0.4."""

    def probabilities(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Return the probabilities of scores, [rows, labels]; no probability is 0."""
        if self.is_set:
            return calibrated(scores, self.scale, self.shift)
        logits = scores.astype(np.float64) * self.scale + self.shift
        result: NDArray[np.float64] = np.maximum(softmax(logits, axis=1), TINY)
        return result

    def as_far_as_known(self, probabilities: Array, known: Array) -> Array:
        """Return probabilities, [items, labels], moved towards the frequencies of the labels.

        `known`, [items], says from 0 to 1 how far the text of each item is known. The less it is
        known, the more its probabilities move, since words that training lacks say nothing.
        """
        if not self.frequencies:
            return probabilities
        share = known[:, None]
        result: Array = share * probabilities + (1 - share) * np.array(self.frequencies)
        return result

    def by_label(self, probabilities: NDArray[Any]) -> list[Probabilities]:
        """Convert [items, labels] to label -> probability for each item, without zeros."""
        item_of, label_of = np.nonzero(probabilities)
        values = probabilities[item_of, label_of].tolist()
        labels = [self.labels[number] for number in label_of.tolist()]
        ends = np.searchsorted(item_of, np.arange(1, len(probabilities) + 1)).tolist()
        result = []
        for start, end in pairwise([0, *ends]):
            result.append(dict(zip(labels[start:end], values[start:end], strict=True)))
        return result


def label_frequencies(gold: NDArray[np.bool_], is_set: bool) -> tuple[float, ...]:
    """Return the probability of each label if the text says nothing; gold is [items, labels].

    The probability of a class is the share of items that have it. For a label set, this share is
    the odds, so that sets of one label get the probability of their frequency; see `set_chances`.
    As in `platt`, one item with each label and one without it are added, so that no share is 0.
    """
    items, labels = gold.shape
    if not is_set:
        frequencies = (gold.sum(axis=0) + 1) / (items + labels)
        return tuple(frequencies.tolist())
    odds = (gold.sum(axis=0) + 1) / (items + 2)
    return tuple((odds / (1 + odds)).tolist())


def size_chances(probabilities: Iterable[Any]) -> list[Any]:
    """Return the chances of sets with 0, 1, 2 and more labels if labels are independent.

    Each probability is a number, or an array with a number for each item.
    """
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
    """Return `LabelField.sizes` of a label set, from its values and probabilities of all items."""
    known = set(labels)
    sizes = []
    chances = []
    for value, row in zip(values, probabilities, strict=True):
        if known.issuperset(value):  # without its unknown labels, it would count as a smaller set
            sizes.append(min(len(set(value)), MAX_SIZE))
            chances.append(size_chances(row[row > 0].tolist()))
    expected = np.maximum(np.mean(chances, axis=0), 1e-9)
    frequencies = np.bincount(sizes, minlength=MAX_SIZE + 1) / len(sizes)
    return tuple((frequencies / expected).tolist())


LABELS_OF_SETS = 6
"""Number of likeliest labels of which sets are formed."""

MAX_FORMED_SIZE = 3
"""Sets up to this size are formed of any of these labels, larger sets of the likeliest ones."""

ROUNDED_DIGITS = 12

ROUNDING = 1e-12
"""Smaller differences of expected F1 are rounding: then the smaller set is taken, and of equally
good labels the first by name."""


def by_probability(labels: Iterable[str], probabilities: Probabilities) -> list[str]:
    """Return the labels, the likeliest first."""
    return sorted(labels, key=lambda label: (-probabilities[label], label))


def set_chances(
    weights: Sequence[float], probabilities: Probabilities, sets: Sequence[frozenset[str]]
) -> list[float]:
    """Return for each set the probability that exactly this set is right.

    Labels are taken as independent, except for the size of the set: a size that was rare in
    training is less likely. `weights` are `LabelField.sizes`.
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


def _members() -> Array:
    """Return which of the likeliest labels each formed set has, [sets, labels]."""
    labels = range(LABELS_OF_SETS)
    sets: list[Sequence[int]] = []
    for size in range(1, MAX_FORMED_SIZE + 1):
        sets += combinations(labels, size)
    for size in range(MAX_FORMED_SIZE + 1, LABELS_OF_SETS + 1):
        sets.append(labels[:size])
    members = np.zeros((len(sets), LABELS_OF_SETS), bool)
    for number, of_set in enumerate(sets):
        members[number, list(of_set)] = True
    return members


MEMBERS = _members()

SIZES = MEMBERS.sum(axis=1)  # of the sets, [sets]

BY_SIZE = MEMBERS * (np.arange(1, LABELS_OF_SETS + 1)[:, None] == SIZES)[..., None]
"""The same for each size from 1, [sizes, sets, labels]."""


def best_sets(
    weights: Sequence[float], items: Sequence[Probabilities], max_size: int
) -> list[list[str]]:
    """Return for each item the labels of the set with the highest expected F1, likeliest first.

    The best set of a size has the labels with the largest terms. The term of a label is the sum of
    2 P(gold) / (size + |gold|) over the gold sets that have it (Dembczyński et al., "An exact
    algorithm for F-measure maximization", NIPS 2011). Gold sets are formed of the likeliest labels;
    all other sets together have the rest of the probability. `weights` are `LabelField.sizes`. The
    empty set is possible only if training had it. A set has at most `max_size` labels.
    """
    count = len(items)
    ranked = [by_probability(item, item)[:LABELS_OF_SETS] for item in items]
    # By rank, [items, labels]; an item with fewer labels has some of probability 0.
    chances = np.zeros((count, LABELS_OF_SETS))
    # Rank of a label by name: of two equally good labels, the first by name is chosen.
    place = np.tile(np.arange(LABELS_OF_SETS), (count, 1))
    for number, (item, labels) in enumerate(zip(items, ranked, strict=True)):
        chances[number, : len(labels)] = [item[label] for label in labels]
        place[number, : len(labels)] = sorted(range(len(labels)), key=labels.__getitem__)
    counts = np.array([len(labels) for labels in ranked], int)  # [items]
    is_label = np.arange(LABELS_OF_SETS) < counts[:, None]  # [items, labels]
    chances = np.where(is_label, np.clip(chances, TINY, 1 - TINY), 0)
    odds = chances / (1 - chances)
    scale = _scales(weights, items)  # [items]
    of_size = np.array(weights)[np.minimum(SIZES, MAX_SIZE)]  # [sets]
    products = np.where(MEMBERS, odds[:, None, :], 1).prod(axis=2)  # [items, sets]
    of_sets = scale[:, None] * of_size * products  # [items, sets]
    # The probability of the sets of a size that have a label, [items, sizes, labels].
    with_label = np.einsum("is,zsl->izl", of_sets, BY_SIZE)
    # The terms of sets of each size, the labels by name, [items, sizes, labels].
    sizes = np.arange(1, min(max_size, LABELS_OF_SETS) + 1)
    gold_sizes = np.arange(1, LABELS_OF_SETS + 1)
    terms = np.einsum("izl,nz->inl", with_label, 2 / (sizes[:, None] + gold_sizes))
    terms = np.where(is_label[:, None], terms.round(ROUNDED_DIGITS), -1)
    terms = np.take_along_axis(terms, place[:, None], axis=2)
    order = np.argsort(-terms, axis=2, kind="stable")
    largest = np.take_along_axis(terms, order, axis=2)
    is_in_set = np.arange(LABELS_OF_SETS) < sizes[:, None]  # [sizes, labels]
    values = np.where(is_in_set, largest, 0).sum(axis=2)  # [items, sizes]
    best_value = scale * weights[0] if weights[0] else np.full(count, -1.0)  # [items]
    best_size = np.zeros(count, int)
    for size, value in zip(sizes, values.T, strict=True):
        is_better = (value > best_value + ROUNDING) & (counts >= size)
        best_value = np.where(is_better, value, best_value)
        best_size[is_better] = size
    result = []
    for labels, by_name, orders, size in zip(ranked, place, order, best_size, strict=True):
        chosen = by_name[orders[size - 1, :size]] if size else ()
        result.append([labels[rank] for rank in sorted(chosen)])
    return result


def _scales(weights: Sequence[float], items: Sequence[Probabilities]) -> Array:
    """Return the factor that turns products of odds into probabilities of sets, [items]."""
    columns = max(map(len, items), default=0)
    chances = np.zeros((columns, len(items)))
    for number, item in enumerate(items):
        chances[: len(item), number] = list(item.values())
    is_label = np.arange(columns)[:, None] < np.array([len(item) for item in items], int)
    chances = np.where(is_label, np.clip(chances, TINY, 1 - TINY), 0)
    likely = np.where(chances > TINY, chances, 0)  # [columns, items]
    likely = np.where(likely.any(axis=0), likely, chances)
    none = np.ones(len(items))  # [items]
    for of_column in chances:
        none *= 1 - of_column
    expected = np.zeros(len(items))
    for weight, chance in zip(weights, size_chances(likely), strict=True):
        expected += weight * chance
    result: Array = none / np.where(expected == 0, 1, expected)
    return result
