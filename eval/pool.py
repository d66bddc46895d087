"""Pool two beliefs about a field: the model's, and the text classifier's."""

from itertools import chain, combinations
from math import prod

import numpy as np

from panjue.eval.beliefs import Belief, marginals
from panjue.eval.classifier import MAX_SIZE, FieldWeights, Opinion, size_chances

Exponents = tuple[float, float]
"""Exponents of the model's belief and of the classifier's."""

UNSEEN_SHARE = 0.1
"""Share of the model's belief that is spread as the classifier has it: few replies never have all
values that are possible."""

LABELS_OF_EACH = 6
"""Label sets are formed of so many of the likeliest labels of each belief."""

MAX_FORMED_SIZE = 3
"""Sets of up to so many labels are formed of all of these, larger ones of the likeliest."""

MIN_PROBABILITY = 1e-4
"""Values of a lower pooled probability are left out, but for the likeliest one."""

TINY_PROBABILITY = 1e-9
"""No probability of a value counts as less."""


def pool_beliefs(first: Belief, second: Belief, exponents: Exponents) -> Belief:
    """Return the logarithmic pool of two beliefs (Genest & Zidek, Statistical Science 1986).

    The probability of a value is proportional to the product of its probabilities, each to the
    power of its exponent. A value that the model never replied has `UNSEEN_SHARE` of its
    probability in `second`, which has to have all values of `first`. If the probabilities in
    `second` sum to less than 1, the rest belongs to values that it does not list; their share of
    the pool is missing in the result too.
    """
    pairs = [
        ((1 - UNSEEN_SHARE) * first.get(value, 0.0) + UNSEEN_SHARE * p, p)
        for value, p in second.items()
    ]
    rest = 1 - sum(second.values())
    if rest > TINY_PROBABILITY:
        pairs.append((UNSEEN_SHARE * rest, rest))
    masses = [
        max(a, TINY_PROBABILITY) ** exponents[0] * max(b, TINY_PROBABILITY) ** exponents[1]
        for a, b in pairs
    ]
    total, listed = sum(masses), dict(zip(second, masses, strict=False))
    least = min(MIN_PROBABILITY * total, max(listed.values()))
    return {value: mass / total for value, mass in listed.items() if mass >= least}


def belief_of(field: FieldWeights, opinion: Opinion, other: Belief | None = None) -> Belief:
    """Return the belief that a classifier's opinion amounts to.

    For a class it is the opinion itself. Label sets are formed of the likeliest labels of the
    opinion and of `other`, as if labels were independent but for the sizes of sets in training;
    the empty set is one of them only if training had it. The sets that are not formed have the
    rest of the probability, so the sum is less than 1.
    """
    if not field.is_set:
        return {**dict.fromkeys(other or (), 0.0), **opinion}
    ranked = sorted(opinion, key=lambda label: (-opinion[label], label))[:LABELS_OF_EACH]
    known = marginals(other or {})
    labels = dict.fromkeys([*ranked, *sorted(known, key=lambda k: (-known[k], k))[:LABELS_OF_EACH]])
    formed = (combinations(labels, size) for size in range(1, MAX_FORMED_SIZE + 1))
    largest = (ranked[:size] for size in range(1, len(ranked) + 1))
    empty = ((),) if field.sizes[0] else ()
    # In an order that does not depend on hashes: sums of floats would differ between processes.
    sets = dict.fromkeys(map(frozenset, chain(*formed, largest, other or (), empty)))
    chances = {
        label: min(max(p, TINY_PROBABILITY), 1 - TINY_PROBABILITY) for label, p in opinion.items()
    }
    none = prod(1 - p for p in chances.values())
    likely = [p for p in chances.values() if p > TINY_PROBABILITY]
    [by_size] = size_chances(np.array([likely]))
    scale = none / max(float(by_size @ field.sizes), TINY_PROBABILITY)
    odds = {label: p / (1 - p) for label, p in chances.items()}
    return {
        s: scale
        * field.sizes[min(len(s), MAX_SIZE)]
        * prod(odds.get(label, TINY_PROBABILITY) for label in sorted(s))
        for s in sets
    }
