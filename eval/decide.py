"""Beliefs -> the answer that is worth most: label sets by expected F1, classes by probability."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.eval.beliefs import Belief, Beliefs
from panjue.prompts.example import Answer, Decide, Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.plumbing.model import DECISION
from panjue.prompts.task import Task

LabelSet = frozenset[str]

CANDIDATES = 8
NEGLIGIBLE = 0.01
"""Labels of one field that are weighed jointly with another field's: the likeliest ones, as long
as they are likelier than this."""


@dataclass(frozen=True)
class Decision:
    """An answer and how sure of it one may be.

    Attributes:
        answer: Of the task's usual form.
        confidence: For every item, field -> probability that the field is exactly right.
        classes: For every item, field that is one class -> class -> probability.
    """

    answer: Answer
    confidence: list[dict[str, float]]
    classes: list[dict[str, Belief]]


class Decider:
    """Decides answers from completions, with what training knew as a prior."""

    def __init__(
        self,
        task: Task,
        labels: Labels,
        pair_price: float = 0.0,
        class_prior: float = 0.0,
        class_ratios: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Prepare for one task and its labels.

        Args:
            task: A task whose answers are decided.
            labels: Its labels with their counts and the table of pairs.
            pair_price: Price, in F1, of a label of the first set that training never saw together
                with any decided label of the second, and the other way round. 0 turns it off.
            class_prior: Weight of how common a class is: beliefs are multiplied by `class_ratios`
                to this power, and scaled to 1 again. 0 turns it off.
            class_ratios: Field -> class -> how much commoner it is than the model believes on
                average, whose training may have mixed in cases of another kind (the shift of
                labels; Saerens et al., Neural Computation 2002). 1 where not named.
        """
        assert isinstance(task.answer, Decide), "not every task is decided"
        self._task, self._labels, self._decides = task, labels, task.answer
        self._beliefs = Beliefs(task, labels)
        self.pair_price, self.class_prior = pair_price, class_prior
        self._class_ratios = class_ratios or {}

    def decide(
        self, example: Example, completion: Mapping[str, Any], *, echo: bool = False
    ) -> Decision:
        """Return the answer of highest expected score, and its confidence.

        With `echo` the answer is the first reply as it is, and its confidence.
        """
        first = self._task.ask.decode(completion["texts"][0], example, self._labels).answer
        return self.decide_from(first, self._beliefs.of(example, completion), echo=echo)

    def decide_from(
        self, first: Answer, beliefs: Sequence[Mapping[str, Belief]], *, echo: bool = False
    ) -> Decision:
        """Decide from beliefs that are at hand; what they say nothing of stays as in `first`."""
        items, confidence, classes = [], [], []
        for item, told in zip(first[self._decides.items], beliefs, strict=True):
            weighed = {f: self._weighed(f, told[f]) for f in self._decides.classes}
            belief = {**told, **weighed}
            chosen = {f: item[f] for f in self._decides.fields} if echo else self.fields(belief)
            items.append({**item, **chosen})
            classes.append(weighed)
            confidence.append(
                {
                    field: belief[field].get(frozenset(v) if isinstance(v, list) else v, 0.0)
                    for field, v in chosen.items()
                }
            )
        return Decision({**first, self._decides.items: items}, confidence, classes)

    def _weighed(self, field: str, belief: Belief) -> Belief:
        """Return the belief about a class, weighed with how common it is."""
        ratios = self._class_ratios.get(field, {})
        weights = {
            label: p * ratios.get(label, 1.0) ** self.class_prior for label, p in belief.items()
        }
        total = sum(weights.values())
        return {label: weight / total for label, weight in weights.items()}

    def fields(self, belief: Mapping[str, Belief]) -> dict[str, Any]:
        """Return the decided fields of one item, labels likeliest first."""
        sets, most = self._decides.sets, self._labels.most
        if len(sets) == 2 and self.pair_price:  # pairs are of two fields
            one, other = sets
            chosen: tuple[LabelSet, ...] = best_pair(
                (belief[one], belief[other]),
                (most[one], most[other]),
                self._labels.pairs,
                self.pair_price,
            )
        else:
            chosen = tuple(best_set(belief[field], most[field]) for field in sets)
        decided: dict[str, Any] = {
            field: _ranked(labels, belief[field])
            for field, labels in zip(sets, chosen, strict=True)
        }
        for field in self._decides.classes:
            decided[field] = max(belief[field].items(), key=lambda pair: (pair[1], str(pair[0])))[0]
        return decided


def fitted_decider(task: Task, labels: Labels, trained: Path | None) -> Decider | None:
    """Return the decider as `panjue tune` fitted it to the replies of `trained`, if it did.

    None where the task's answers are not decided.
    """
    if not isinstance(task.answer, Decide):
        return None
    found = _fit(trained)
    names = ("pair_price", "class_prior", "class_ratios")
    return Decider(task, labels, **{name: found[name] for name in names if name in found})


def decision_sha256(trained: Path | None) -> str | None:
    """Return the hash of what `panjue tune` fitted to the replies of `trained`, if it did."""
    place = trained / DECISION if trained else None
    return sha256(place) if place and place.exists() else None


def cases_of(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return which cases a run answered, by the record of how."""
    return {"test_sha256": made["test_sha256"], "held_out": bool(made.get("held_out"))}


def is_fitted_on(trained: Path, made: Mapping[str, Any]) -> bool:
    """Say whether `panjue tune` fitted to replies of `trained` on the cases of this run."""
    return _fit(trained).get("fitted_on") == cases_of(made)


def _fit(trained: Path | None) -> dict[str, Any]:
    """Return what `panjue tune` wrote beside `trained`; empty where it did not."""
    place = trained / DECISION if trained else None
    found: dict[str, Any] = read_json(place) if place and place.exists() else {}
    return found


def expected_f1(chosen: LabelSet, belief: Belief) -> float:
    """Return the F1 of `chosen` expected when the gold set is distributed as `belief`."""
    return sum(
        mass * 2 * len(chosen & gold) / (len(chosen) + len(gold))
        for gold, mass in belief.items()
        if chosen and gold
    )


def best_set(belief: Belief, most: int) -> LabelSet:
    """Return the set of 1 to `most` labels with the highest expected F1. Exact at any size.

    For a given size m the expected F1 is a sum over the chosen labels of
    Σ over gold sets with the label of 2 P(gold) / (m + |gold|), so the m best labels are best
    together (Dembczyński et al., "An exact algorithm for F-measure maximization", NIPS 2011).
    """
    labels = sorted({label for gold in belief for label in gold})
    best: LabelSet = frozenset()
    best_value = -1.0
    for size in range(1, min(most, len(labels)) + 1):
        worth = {
            label: sum(2 * p / (size + len(gold)) for gold, p in belief.items() if label in gold)
            for label in labels
        }
        chosen = frozenset(sorted(labels, key=lambda label: (-worth[label], label))[:size])
        value = sum(worth[label] for label in chosen)
        if value > best_value + TOLERANCE:
            best, best_value = chosen, value
    return best


TOLERANCE = 1e-12
"""Differences of expected F1 below this are rounding; the smaller set then stays."""


def best_pair(
    beliefs: tuple[Belief, Belief],
    most: tuple[int, int],
    pairs: Mapping[str, Mapping[str, int]],
    price: float,
) -> tuple[LabelSet, LabelSet]:
    """Return the two sets whose expected F1s, less the price of labels without a pair, are highest.

    Exact over the likeliest labels of either field, to which the commonest partner of each likely
    first label belongs even if no sample wrote it, and over sets of at most one label more than
    the largest that a sample wrote.
    """
    first = _likeliest(beliefs[0])
    partners = (max(pairs[a], key=lambda b: (pairs[a][b], b)) for a in first if pairs.get(a))
    second = list(dict.fromkeys([*_likeliest(beliefs[1]), *partners]))
    sizes = [min(m, 1 + max(map(len, belief))) for m, belief in zip(most, beliefs, strict=True)]
    left, left_sets = _subsets(first, sizes[0])
    right, right_sets = _subsets(second, sizes[1])
    knows = np.array([[pairs.get(a, {}).get(b, 0) > 0 for b in second] for a in first])
    # [left sets, first labels]: whether none of a second set goes with the label, and vice versa.
    lonely_first = left @ (right @ knows.T == 0).T
    lonely_second = (left @ knows == 0) @ right.T
    worth_left = np.array([expected_f1(chosen, beliefs[0]) for chosen in left_sets])
    worth_right = np.array([expected_f1(chosen, beliefs[1]) for chosen in right_sets])
    worth = worth_left[:, None] + worth_right - price * (lonely_first + lonely_second)
    i, j = np.unravel_index(np.argmax(worth > worth.max() - TOLERANCE), worth.shape)
    return left_sets[i], right_sets[j]


def _likeliest(belief: Belief) -> list[str]:
    marginal = marginals(belief)
    ranked = sorted(marginal, key=lambda label: (-marginal[label], label))
    return [label for label in ranked if marginal[label] >= NEGLIGIBLE][:CANDIDATES] or ranked[:1]


def _subsets(labels: Sequence[str], most: int) -> tuple[NDArray[np.int64], list[LabelSet]]:
    """Return all subsets of 1 to `most` labels, as rows of 0 and 1 and as sets, small first."""
    chosen = [
        picked
        for size in range(1, min(most, len(labels)) + 1)
        for picked in combinations(range(len(labels)), size)
    ]
    rows = np.zeros((len(chosen), len(labels)), dtype=np.int64)
    for row, picked in zip(rows, chosen, strict=True):
        row[list(picked)] = 1
    return rows, [frozenset(labels[i] for i in picked) for picked in chosen]


def marginals(belief: Belief) -> dict[str, float]:
    """Return each label's probability of being in the set."""
    total: dict[str, float] = {}
    for labels, mass in belief.items():
        for label in labels:
            total[label] = total.get(label, 0.0) + mass
    return total


def _ranked(labels: Iterable[str], belief: Belief) -> list[str]:
    marginal = marginals(belief)
    return sorted(labels, key=lambda label: (-marginal.get(label, 0.0), label))
