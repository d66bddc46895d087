"""Pool two beliefs about a field: the model's, and the text classifier's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from panjue.eval.beliefs import Belief, marginals
from panjue.eval.classifier import Classifier, FieldWeights, Opinion
from panjue.prompts.example import Example

Exponents = tuple[float, float]
"""Exponents of the model's belief and of the classifier's."""

MODEL_ALONE: Exponents = (1.0, 0.0)
"""Leaves the model's belief as it is."""

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


@dataclass(frozen=True)
class Pool:
    """Pools beliefs with the opinions of a classifier.

    Attributes:
        classifier: The classifier of the same training.
        exponents: Field -> its exponents; the other fields keep the model's belief.
    """

    classifier: Classifier
    exponents: Mapping[str, Exponents]

    def __call__(self, example: Example, items: list[dict[str, Belief]]) -> list[dict[str, Belief]]:
        """Return the pooled beliefs about every item's fields."""
        return self.with_opinions(self.classifier.opinions(example), items)

    def with_opinions(
        self, opinions: Sequence[Mapping[str, Opinion]], items: list[dict[str, Belief]]
    ) -> list[dict[str, Belief]]:
        """Do the same with the classifier's opinions on the items."""
        return [
            {
                name: self._pooled(name, belief, opinion[name])
                if name in self.exponents
                else belief
                for name, belief in item.items()
            }
            for item, opinion in zip(items, opinions, strict=True)
        ]

    def alone(self, example: Example) -> list[dict[str, Belief]]:
        """Return the classifier's own beliefs about every item's fields."""
        return self.of_opinions(self.classifier.opinions(example))

    def of_opinions(self, opinions: Sequence[Mapping[str, Opinion]]) -> list[dict[str, Belief]]:
        """Do the same with the classifier's opinions on the items."""
        fields = self.classifier.fields
        return [
            {name: belief_of(fields[name], opinion[name]) for name in opinion}
            for opinion in opinions
        ]

    def _pooled(self, name: str, belief: Belief, opinion: Opinion) -> Belief:
        second = belief_of(self.classifier.fields[name], opinion, belief)
        return pool_beliefs(belief, second, self.exponents[name])


def pool_beliefs(first: Belief, second: Belief, exponents: Exponents) -> Belief:
    """Return the logarithmic pool of two beliefs (Genest & Zidek, Statistical Science 1986).

    The probability of a value is proportional to the product of its probabilities, each to the
    power of its exponent. A value that the model never replied has `UNSEEN_SHARE` of its
    probability in `second`, which has to have all values of `first`. If the probabilities in
    `second` sum to less than 1, the rest belongs to values that it does not list; their share of
    the pool is missing in the result too.
    """
    if exponents == MODEL_ALONE:
        return first
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
    opinion and of `other`, as if labels were independent; the empty set is one of them only if
    training had it. The sets that are not formed have the rest of the probability, so the sum is
    less than 1.
    """
    if not field.is_set:
        return {**dict.fromkeys(other or (), 0.0), **opinion}
    ranked = sorted(opinion, key=lambda label: (-opinion[label], label))[:LABELS_OF_EACH]
    known = marginals(other or {})
    labels = dict.fromkeys([*ranked, *sorted(known, key=lambda k: (-known[k], k))[:LABELS_OF_EACH]])
    sets = {
        frozenset(chosen)
        for size in range(1, MAX_FORMED_SIZE + 1)
        for chosen in combinations(labels, size)
    }
    sets |= {frozenset(ranked[:size]) for size in range(1, len(ranked) + 1)}
    sets |= set(other or ()) | ({frozenset()} if field.may_be_empty else set())
    inside = {
        label: min(max(p, TINY_PROBABILITY), 1 - TINY_PROBABILITY) for label, p in opinion.items()
    }
    odds = {label: p / (1 - p) for label, p in inside.items()}
    none = prod(1 - p for p in inside.values())
    scale = none if field.may_be_empty else none / max(1 - none, TINY_PROBABILITY)
    return {s: scale * prod(odds.get(label, TINY_PROBABILITY) for label in s) for s in sets}
