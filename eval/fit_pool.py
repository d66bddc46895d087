"""Fit how much the text classifier counts, field by field, on held-out completions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.eval.answers import Run
from panjue.eval.beliefs import Belief, Beliefs
from panjue.eval.classifier import Classifier, Opinion
from panjue.eval.decide import Decider
from panjue.eval.means import ScoreTable, metric_values, summarize
from panjue.eval.pool import Exponents, Pool, belief_of, pool_beliefs
from panjue.prompts.example import Answer, Example

TRIED = (0.25, 0.5, 0.75, 1.0)
TRIED_EXPONENTS: Sequence[Exponents] = tuple(product(TRIED, TRIED))

FOLDS = 5

MIN_GOLD_PROBABILITY = 1e-6
"""No gold value counts as less likely, so that no single item decides a fit."""


@dataclass(frozen=True)
class Case:
    """A held-out example with its first answer, and what model and classifier believe of it.

    Attributes:
        items: The model's beliefs; None if no reply was readable: the classifier then decides
            alone, whatever the exponents.
    """

    example: Example
    first: Answer
    items: list[dict[str, Belief]] | None
    opinions: Sequence[Mapping[str, Opinion]]


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


def trials(run: Run, classifier: Classifier) -> Iterator[Trial]:
    """Yield for each field the exponents of the lowest log loss, and what they gain.

    The log loss says more than the metric does of few cases, and gives calibrated beliefs. The gain
    is that of the headline metric on folds whose cases had no part in the exponents.
    """
    cases = list(_cases(run, classifier))
    if not cases:
        return
    folds = np.arange(len(cases)) % FOLDS
    alone = _headline(run, cases, [Pool(classifier, {})] * len(cases))
    for name in classifier.fields:
        losses = np.array([_losses(classifier, case, name) for case in cases])
        pools = [Pool(classifier, {name: _lowest(losses[folds != k])}) for k in range(FOLDS)]
        crossed = _headline(run, cases, [pools[fold] for fold in folds])
        yield Trial(name, _lowest(losses), alone, crossed)


def _cases(run: Run, classifier: Classifier) -> Iterator[Case]:
    beliefs, task = Beliefs(run.task, run.labels), run.task
    for example, row in run.completions():
        if "texts" in row:
            first = task.ask.decode(row["texts"][0], example, run.labels).answer
            found = beliefs.of(example, row)
            items = found.items if found.is_readable else None
            yield Case(example, first, items, classifier.opinions(example))


def _losses(classifier: Classifier, case: Case, name: str) -> NDArray[Any]:
    """Return the log loss of one field, summed over a case's items, for `TRIED_EXPONENTS`."""
    decides, field = classifier.decides, classifier.fields[name]
    assert case.example.answer is not None, "checked before"
    gold, total = decides.items_of(case.example.answer), np.zeros(len(TRIED_EXPONENTS))
    for item, opinion, belief in zip(gold, case.opinions, case.items or (), strict=False):
        value = frozenset(item[name]) if field.is_set else item[name]
        second = belief_of(field, opinion[name], belief[name])
        for i, exponents in enumerate(TRIED_EXPONENTS):
            likely = pool_beliefs(belief[name], second, exponents).get(value, 0.0)
            total[i] -= log(max(likely, MIN_GOLD_PROBABILITY))
    return total


def _lowest(losses: NDArray[Any]) -> Exponents:
    """Return the exponents of the lowest loss over cases, [cases, exponents]."""
    return TRIED_EXPONENTS[int(np.argmin(losses.sum(axis=0)))]


def _headline(run: Run, cases: Sequence[Case], pools: Sequence[Pool]) -> float:
    """Return the headline metric of the cases, each decided with its pool."""
    task, table, decider = run.task, ScoreTable(run.task), Decider(run.task, run.labels)
    for case, pool in zip(cases, pools, strict=True):
        if case.items is None:
            items = pool.of_opinions(case.opinions)
        else:
            items = pool.with_opinions(case.opinions, case.items)
        row = task.data.write(case.example, decider.decide_from(case.first, items).answer)
        values = metric_values(task, task.gold(case.example), row, str(run.folder))
        table.add(case.example.groups, task.score.weight(case.example), values)
    return summarize(table, resamples=0).mean[task.score.names[-1]]
