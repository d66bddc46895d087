"""Compute the probabilities of label sets from those of labels, and the set that scores best.

Labels count as independent, except that each size of a set has a weight (`LabelField.sizes`):

    P(set) = scale * weight of its size * product of the odds p / (1 - p) of its labels

The scale makes the probabilities of all sets sum to 1. To find the best set, not all sets that may
be right are looked at, but only formed sets: of the six likeliest labels of an item, all sets of up
to three, the four likeliest ones, the five likeliest ones, and all six.
"""

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
    sizes: Sequence[float] = (0.0, 1.0, 1.0, 1.0)  # see `size_weights`
    frequencies: Sequence[float] = ()  # see `label_frequencies`; empty in files of version 0.4

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
        result = []
        for of_item in probabilities:
            numbers = np.flatnonzero(of_item)
            labels = [self.labels[number] for number in numbers.tolist()]
            result.append(dict(zip(labels, of_item[numbers].tolist(), strict=True)))
        return result


def label_frequencies(gold: NDArray[np.bool_], is_set: bool) -> tuple[float, ...]:
    """Return the probability of each label if the text says nothing; gold is [items, labels].

    For a class, it is the share of items that have the label. For a label set, the share is taken
    as the odds p / (1 - p), because sets of one label have probabilities in proportion to the odds.
    For example, shares of 0.8 and 0.2 give p = 0.44 and p = 0.17. The set of the first label alone
    is then four times as likely as that of the second. One item with each label and, for a label
    set, one without it are added, so that no share is 0.
    """
    items, labels = gold.shape
    if not is_set:
        frequencies = (gold.sum(axis=0) + 1) / (items + labels)
        return tuple(frequencies.tolist())
    odds = (gold.sum(axis=0) + 1) / (items + 2)
    return tuple((odds / (1 + odds)).tolist())


def size_chances(probabilities: Iterable[Any]) -> list[Any]:
    """Return the chances of sets with 0, 1, 2 and more labels if labels are independent.

    Each probability is a number, or an array with a number for each item. Two labels with
    probabilities 0.5 and 0.8 have the chances 0.1, 0.5, 0.4 and 0.
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
    """Return the weights of sets with 0, 1, 2 and more labels.

    A weight is how often the items' gold `values` have this size, divided by how often they would
    if labels were independent and had these probabilities, [items, labels].
    """
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


LABELS_OF_SETS = 6  # number of likeliest labels of which sets are formed
MAX_FORMED_SIZE = 3  # larger formed sets have only the likeliest of these labels

ROUNDED_DIGITS = 12
ROUNDING = 1e-12
"""Smaller differences of expected F1 are rounding: then the smaller set is taken, and of equally
good labels the first by name."""


def highest_first(labels: Iterable[str], values: Mapping[str, float]) -> list[str]:
    """Return labels by their values, the highest first; of equal ones, the first by name."""
    return sorted(labels, key=lambda label: (-values[label], label))


def set_chances(
    weights: Sequence[float], probabilities: Probabilities, sets: Sequence[frozenset[str]]
) -> list[float]:
    """Return for each set the probability that exactly this set is right.

    For example, let a have probability 0.5 and b 0.8. Their odds are 1 and 4, so the products of
    odds of {a}, {b} and {a, b} are 1, 4 and 4. With weight 0 for the empty set and 1 for the other
    sizes, their probabilities are 1/9, 4/9 and 4/9.
    """
    clipped = {label: min(max(p, TINY), 1 - TINY) for label, p in probabilities.items()}
    odds = {label: p / (1 - p) for label, p in clipped.items()}
    # To save time: of hundreds of labels, few are likely, and the others hardly change the scale.
    likely = [p for p in clipped.values() if p > TINY] or clipped.values()
    scale = _scale(weights, clipped.values(), likely)
    found = []
    for labels in sets:
        size = min(len(labels), MAX_SIZE)
        # Sorted: sums and products of floats depend on their order.
        of_labels = [odds.get(label, TINY) for label in sorted(labels)]
        found.append(scale * weights[size] * prod(of_labels))
    return found


def _scale(weights: Sequence[float], probabilities: Iterable[Any], likely: Iterable[Any]) -> Any:
    """Return the scale of the probabilities of sets: a number, or an array with one for each item.

    If labels were independent, a set would have the probability `none` (that of the empty set, the
    product of 1 - p of all labels) times the odds of its labels. Multiplied by the weights of the
    sizes, these probabilities sum to `expected`. So the scale is none / expected. To save time,
    `expected` is computed from `likely`: the probabilities above `TINY`, or all if none is above.
    """
    none = prod(1 - p for p in probabilities)
    expected = sum(map(mul, size_chances(likely), weights))
    return none / (expected + (expected == 0))  # divides by 1 instead of 0


def _members() -> Array:
    """Return which of the likeliest labels each formed set has, [sets, labels]."""
    labels = range(LABELS_OF_SETS)  # the likeliest first
    sets: list[Sequence[int]] = []
    for size in range(1, MAX_FORMED_SIZE + 1):
        sets += combinations(labels, size)
    for size in range(MAX_FORMED_SIZE + 1, LABELS_OF_SETS + 1):  # these are rare
        sets.append(labels[:size])
    return np.array([[label in of_set for label in labels] for of_set in sets])


MEMBERS = _members()
SIZES = MEMBERS.sum(axis=1)  # of the sets, [sets]

BY_SIZE = MEMBERS * (np.arange(1, LABELS_OF_SETS + 1)[:, None] == SIZES)[..., None]
"""Which sets of each size from 1 have which labels, [sizes, sets, labels]."""


def best_sets(
    weights: Sequence[float], items: Sequence[Probabilities], max_size: int
) -> list[list[str]]:
    """Return for each item the labels of the set with the highest expected F1, likeliest first.

    A set has at most `max_size` labels. It is empty only if the weight of empty sets allows this.

    If `gold` is right, a set has F1 2 * |common labels| / (|set| + |gold|). So each label adds a
    term of its own to the expected F1 of the set:

        term = sum of 2 * P(gold) / (|set| + |gold|) over the formed sets `gold` that have the label

    Terms depend only on the size of the set, so the best set of a size has the labels with the
    largest terms (Dembczyński et al., "An exact algorithm for F-measure maximization", NIPS 2011).
    For example, let {a}, {b} and {a, b} be right with the probabilities 1/9, 4/9 and 4/9. Then {b}
    has an expected F1 of 20/27, {a, b} of 22/27, and b and a are chosen.
    """
    ranked = []  # the likeliest labels of each item with their probabilities, the likeliest first
    for item in items:
        ranked.append({label: item[label] for label in highest_first(item, item)[:LABELS_OF_SETS]})
    probabilities = _clipped(ranked, LABELS_OF_SETS)  # [items, labels]
    scale = _scales(weights, items)  # [items]
    sizes = np.arange(min(max_size, LABELS_OF_SETS) + 1)  # of the set to choose, from 0
    terms = _terms(_formed_chances(weights, scale, probabilities), sizes)  # [items, sizes, labels]
    terms = np.where(probabilities[:, None] > 0, terms, -np.inf)  # an item may have fewer labels
    largest_first = -np.sort(-terms, axis=2)
    is_in_set = np.arange(LABELS_OF_SETS) < sizes[:, None]  # [sizes, labels]
    expected_f1 = np.where(is_in_set, largest_first, 0).sum(axis=2)  # [items, sizes]
    # The empty set has F1 1 if gold is empty too, else 0. The probability of an empty gold is
    # scale * weight, as there are no odds to multiply.
    expected_f1[:, 0] = scale * weights[0] if weights[0] else -np.inf
    result = []
    for labels, of_item, size in zip(ranked, terms, _best_sizes(expected_f1), strict=True):
        term_of = dict(zip(labels, of_item[size].tolist(), strict=False))
        chosen = highest_first(labels, term_of)[:size]
        result.append([label for label in labels if label in chosen])  # the likeliest first
    return result


def _clipped(items: Sequence[Probabilities], columns: int) -> Array:
    """Return the clipped probabilities of each item in its order, then zeros, [items, columns]."""
    result = np.zeros((len(items), columns))
    for number, item in enumerate(items):
        result[number, : len(item)] = list(item.values())
    lengths = np.array([len(item) for item in items], int)
    is_label = np.arange(columns) < lengths[:, None]  # [items, columns]
    return np.where(is_label, np.clip(result, TINY, 1 - TINY), 0)


def _scales(weights: Sequence[float], items: Sequence[Probabilities]) -> Array:
    """Return `_scale` of each item, [items], exactly as `set_chances` computes it for one item."""
    probabilities = _clipped(items, max(map(len, items), default=0)).T  # [labels, items]
    # As there, only likely labels count: one with probability 0 changes no chance of a size.
    likely = np.where(probabilities > TINY, probabilities, 0)
    # An item without a likely label keeps all its labels.
    likely = np.where(likely.any(axis=0), likely, probabilities)
    scale = _scale(weights, probabilities, likely)
    return np.broadcast_to(scale, len(items))  # it is one number if no item has a label


def _formed_chances(weights: Sequence[float], scale: Array, probabilities: Array) -> Array:
    """Return the probability of each formed set, [items, sets]."""
    odds = probabilities / (1 - probabilities)  # [items, labels]
    products = np.where(MEMBERS, odds[:, None], 1).prod(axis=2)  # [items, sets]
    of_size = np.array(weights)[np.minimum(SIZES, MAX_SIZE)]  # [sets]
    result: Array = scale[:, None] * of_size * products
    return result


def _terms(formed: Array, sizes: Array) -> Array:
    """Return the terms of labels in sets of these sizes, [items, sizes, labels].

    The term of a label is what it adds to the expected F1 of a set of this size that has it: the
    sum of 2 P(gold) / (size + |gold|) over the formed sets `gold` with this label. `formed` has
    P(gold) of each formed set, [items, sets].
    """
    # Subscripts: i items, s formed sets, g sizes of these, l labels, n sizes of the set to choose.
    # `BY_SIZE` has 1 for a formed set, its size and each of its labels, else 0.
    with_label = np.einsum("is,gsl->igl", formed, BY_SIZE)  # P(gold has this size and this label)
    gold_sizes = np.arange(1, LABELS_OF_SETS + 1)
    terms = np.einsum("igl,ng->inl", with_label, 2 / (sizes[:, None] + gold_sizes))
    result: Array = terms.round(ROUNDED_DIGITS)  # so that equal terms are equal
    return result


def _best_sizes(values: Array) -> Array:
    """Return the size with the highest of values, [items, sizes]; of equal ones the smallest."""
    best_value = np.full(len(values), -np.inf)
    best_size = np.zeros(len(values), int)
    for size, value in enumerate(values.T):
        is_better = value > best_value + ROUNDING
        best_value[is_better] = value[is_better]
        best_size[is_better] = size
    return best_size
