"""Fit how much the text classifier counts, field by field, on held-out completions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.eval.answers import AnsweredFile
from panjue.eval.beliefs import Belief, Beliefs
from panjue.eval.classifier import Classifier, Opinion
from panjue.eval.decide import Decider
from panjue.eval.pool import Exponents, Pool, belief_of, pool_beliefs
from panjue.eval.values import score_answers
from panjue.prompts.example import Answer, Example, first_reply
from panjue.prompts.plumbing.errors import UserError

TRIED = (0.25, 0.5, 0.75, 1.0)
TRIED_EXPONENTS: Sequence[Exponents] = tuple(product(TRIED, TRIED))

FOLDS = 5

MIN_GOLD_PROBABILITY = 1e-6
"""No gold value counts as less likely, so that no single item decides a fit."""


@dataclass(frozen=True)
class FitCase:
    """A held-out example with its first answer, and what model and classifier believe of it.

    Attributes:
        beliefs: The model's beliefs; None if the example could not be asked.
        is_readable: Whether a reply was readable; else the classifier decides alone, if there is
            one, whatever the exponents.
        opinions: Those of the classifier; empty if there is none.
    """

    example: Example
    first: Answer
    beliefs: list[dict[str, Belief]] | None
    is_readable: bool
    opinions: Sequence[Mapping[str, Opinion]]

    def pooled(self, pool: Pool | None) -> list[dict[str, Belief]]:
        """Return the beliefs to decide from; empty if the first answer stays."""
        if pool is None:
            return self.beliefs or []
        if self.beliefs is None or not self.is_readable:
            return pool.of_opinions(self.opinions)
        return pool.with_opinions(self.opinions, self.beliefs)


def fit_cases(answered: AnsweredFile, classifier: Classifier | None) -> Iterator[FitCase]:
    """Yield the held-out examples of a answered."""
    beliefs, task = Beliefs(answered.task, answered.labels), answered.task
    for example, row in answered.completions():
        if example.answer is None:
            raise UserError(f"{answered.test}: id {example.id} has no gold answer to tune on")
        found = beliefs.of(example, row) if "texts" in row else None
        yield FitCase(
            example,
            task.ask.decode(first_reply(row), example, answered.labels).answer,
            found.items if found else None,
            found is not None and found.is_readable,
            classifier.opinions(example) if classifier else (),
        )


@dataclass(frozen=True)
class Trial:
    """What cross-validation says about one field: the headline metric without and with it."""

    field: str
    exponents: Exponents
    without: float
    with_classifier: float

    @property
    def gains(self) -> bool:
        """Say whether the classifier is kept for the field."""
        return self.with_classifier > self.without


def trials(
    answered: AnsweredFile, cases: Sequence[FitCase], classifier: Classifier
) -> Iterator[Trial]:
    """Yield for each field the exponents of the lowest log loss, and what they gain.

    The log loss says more than the metric does of few cases, and gives calibrated beliefs. The gain
    is that of the headline metric on folds whose cases had no part in the exponents.
    """
    cases = [case for case in cases if case.beliefs is not None]
    if not cases:
        return
    folds = np.arange(len(cases)) % FOLDS
    alone = _headline(answered, cases, [Pool(classifier, {})] * len(cases))
    for name in classifier.fields:
        losses = np.array([_losses(classifier, case, name) for case in cases])
        pools = [Pool(classifier, {name: _lowest(losses[folds != k])}) for k in range(FOLDS)]
        crossed = _headline(answered, cases, [pools[fold] for fold in folds])
        yield Trial(name, _lowest(losses), alone, crossed)


def _losses(classifier: Classifier, case: FitCase, name: str) -> NDArray[Any]:
    """Return the log loss of one field, summed over a case's items, for `TRIED_EXPONENTS`."""
    decides, field = classifier.decides, classifier.fields[name]
    assert case.example.answer is not None, "checked before"
    gold, total = decides.items_of(case.example.answer), np.zeros(len(TRIED_EXPONENTS))
    beliefs = (case.beliefs if case.is_readable else None) or ()
    for item, opinion, belief in zip(gold, case.opinions, beliefs, strict=False):
        value = frozenset(item[name]) if field.is_set else item[name]
        second = belief_of(field, opinion[name], belief[name])
        for i, exponents in enumerate(TRIED_EXPONENTS):
            likely = pool_beliefs(belief[name], second, exponents).get(value, 0.0)
            total[i] -= log(max(likely, MIN_GOLD_PROBABILITY))
    return total


def _lowest(losses: NDArray[Any]) -> Exponents:
    """Return the exponents of the lowest loss over cases, [cases, exponents]."""
    return TRIED_EXPONENTS[int(np.argmin(losses.sum(axis=0)))]


def _headline(answered: AnsweredFile, cases: Sequence[FitCase], pools: Sequence[Pool]) -> float:
    """Return the headline metric of the cases, each decided with its pool."""
    decider = Decider(answered.task, answered.labels)
    answers = (
        (case.example, decider.decide_from(case.first, case.pooled(pool)).answer)
        for case, pool in zip(cases, pools, strict=True)
    )
    return score_answers(answered.task, answers)[answered.task.score.names[-1]]
