"""Pool two beliefs about a field: the model's, and the text classifier's."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod

from panjue.eval.beliefs import Belief, marginals
from panjue.eval.classifier import Classifier, FieldWeights, Opinion
from panjue.prompts.example import Example

Weights = tuple[float, float]
"""Exponents of the model's belief and of the classifier's. `(1, 0)` leaves the model's as it is."""

ALONE: Weights = (1.0, 0.0)

UNSEEN = 0.1
"""Share of the model's belief that is spread as the classifier has it: few replies never have all
values that are possible."""

LIKELY = 6
"""Label sets are formed of so many of the likeliest labels of each belief."""

MOST = 3
"""Sets of up to so many labels are formed of all of these, larger ones of the likeliest."""

LEAST = 1e-4
"""Values of a lower pooled probability are left out."""

SMALLEST = 1e-9
"""No probability of a value counts as less."""


@dataclass(frozen=True)
class Pool:
    """Pools beliefs with the opinions of a classifier.

    Attributes:
        classifier: The classifier of the same training.
        weights: Field -> its weights; the other fields keep the model's belief.
    """

    classifier: Classifier
    weights: Mapping[str, Weights]

    def __call__(self, example: Example, items: list[dict[str, Belief]]) -> list[dict[str, Belief]]:
        """Return the pooled beliefs about every item's fields."""
        opinions = self.classifier.opinions(example)
        return [
            {
                name: self._pooled(name, belief, opinion[name]) if name in self.weights else belief
                for name, belief in item.items()
            }
            for item, opinion in zip(items, opinions, strict=True)
        ]

    def alone(self, example: Example) -> list[dict[str, Belief]]:
        """Return the classifier's own beliefs about every item's fields."""
        return [
            {name: belief_of(self.classifier.fields[name], opinion[name]) for name in opinion}
            for opinion in self.classifier.opinions(example)
        ]

    def _pooled(self, name: str, belief: Belief, opinion: Opinion) -> Belief:
        second = belief_of(self.classifier.fields[name], opinion, belief)
        return pooled(belief, second, self.weights[name])


def pooled(first: Belief, second: Belief, weights: Weights) -> Belief:
    """Return the logarithmic pool of two beliefs (Genest & Zidek, Statistical Science 1986).

    The probability of a value is proportional to the product of its probabilities, each to the
    power of its weight. A value that the model never replied has `UNSEEN` of its probability in
    `second`, which has to have all values of `first`. What `second` lacks to 1 is the probability
    of all other values, and so is what the result lacks.
    """
    if weights == ALONE:
        return first
    rest = max(0.0, 1 - sum(second.values()))
    pairs = [(UNSEEN * rest, rest)] if rest > SMALLEST else []
    pairs += [((1 - UNSEEN) * first.get(value, 0.0) + UNSEEN * p, p) for value, p in second.items()]
    masses = [max(a, SMALLEST) ** weights[0] * max(b, SMALLEST) ** weights[1] for a, b in pairs]
    total = sum(masses)
    values = zip(second, masses[len(pairs) - len(second) :], strict=True)
    return {value: mass / total for value, mass in values if mass >= LEAST * total}


def belief_of(field: FieldWeights, opinion: Opinion, other: Belief | None = None) -> Belief:
    """Return the belief that a classifier's opinion amounts to.

    For a class it is the opinion itself. Label sets are formed of the likeliest labels of the
    opinion and of `other`, as if labels were independent; the empty set is one of them only if
    training had it. Sets that are left out have the rest of the probability: it sums to less
    than 1.
    """
    if not field.is_set:
        return {**dict.fromkeys(other or (), 0.0), **opinion}
    ranked = sorted(opinion, key=lambda label: (-opinion[label], label))[:LIKELY]
    known = marginals(other or {})
    labels = dict.fromkeys([*ranked, *sorted(known, key=lambda k: (-known[k], k))[:LIKELY]])
    sets = {frozenset(s) for size in range(1, MOST + 1) for s in combinations(labels, size)}
    sets |= {frozenset(ranked[:size]) for size in range(1, len(ranked) + 1)}
    sets |= set(other or ()) | ({frozenset()} if field.may_be_empty else set())
    inside = {label: min(max(p, SMALLEST), 1 - SMALLEST) for label, p in opinion.items()}
    odds = {label: p / (1 - p) for label, p in inside.items()}
    none = prod(1 - p for p in inside.values())
    scale = none if field.may_be_empty else none / (1 - none)
    return {s: scale * prod(odds.get(label, SMALLEST) for label in s) for s in sets}
