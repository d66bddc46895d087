"""Fit how much the text classifier counts, field by field, on held-out completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.eval.answers import Run
from panjue.eval.beliefs import Belief
from panjue.eval.classifier import Classifier
from panjue.eval.decide import Decider
from panjue.eval.means import ScoreTable, metric_values, summarize
from panjue.eval.pool import Pool, Weights, belief_of, pooled
from panjue.prompts.example import Answer, Example

GRID: Sequence[Weights] = tuple(product((0.25, 0.5, 0.75, 1.0), (0.25, 0.5, 0.75, 1.0)))
"""Weights that are tried."""

FOLDS = 5

FLOOR = 1e-6
"""Least probability of a gold value that counts, so that no single item decides a fit."""


@dataclass(frozen=True)
class Case:
    """A held-out example with its first answer and the model's beliefs about its items."""

    example: Example
    first: Answer
    items: list[dict[str, Belief]]


@dataclass(frozen=True)
class Trial:
    """What cross-validation says about one field: the headline metric without and with it."""

    field: str
    weights: Weights
    without: float
    with_classifier: float

    @property
    def gains(self) -> bool:
        """Say whether the classifier is kept for the field."""
        return self.with_classifier > self.without


def trials(run: Run, classifier: Classifier) -> Iterator[Trial]:
    """Yield for each field the weights of the lowest log loss, and what they gain.

    The log loss says more than the metric does of few cases, and gives calibrated beliefs. The gain
    is that of the headline metric on folds whose cases had no part in the weights.
    """
    cases = _cases(run)
    folds = np.arange(len(cases)) % FOLDS
    alone = _headline(run, cases, [None] * len(cases))
    for name in classifier.fields:
        losses = np.array([_losses(classifier, case, name) for case in cases])
        pools = [Pool(classifier, {name: _lowest(losses[folds != k])}) for k in range(FOLDS)]
        crossed = _headline(run, cases, [pools[fold] for fold in folds])
        yield Trial(name, _lowest(losses), alone, crossed)


def _cases(run: Run) -> list[Case]:
    decider, task = Decider(run.task, run.labels), run.task
    result = []
    for example, row in run.completions():
        if "texts" in row:
            first = task.ask.decode(row["texts"][0], example, run.labels).answer
            result.append(Case(example, first, decider.beliefs(example, row)))
    return result


def _losses(classifier: Classifier, case: Case, name: str) -> NDArray[Any]:
    """Return the log loss of one field, summed over the items of a case, for each of `GRID`."""
    decides, field = classifier.decides, classifier.fields[name]
    assert case.example.answer is not None, "checked before"
    gold = decides.items_of(case.example.answer)
    total = np.zeros(len(GRID))
    for item, opinion, belief in zip(
        gold, classifier.opinions(case.example), case.items, strict=True
    ):
        value = frozenset(item[name]) if field.is_set else item[name]
        second = belief_of(field, opinion[name], belief[name])
        found = (pooled(belief[name], second, weights).get(value, 0.0) for weights in GRID)
        total -= [log(max(p, FLOOR)) for p in found]
    return total


def _lowest(losses: NDArray[Any]) -> Weights:
    """Return the weights of the lowest loss over cases, [cases, weights]."""
    return GRID[int(np.argmin(losses.sum(axis=0)))]


def _headline(run: Run, cases: Sequence[Case], pools: Sequence[Pool | None]) -> float:
    """Return the headline metric of the cases, each decided with its pool."""
    task, table = run.task, ScoreTable(run.task)
    for case, pool in zip(cases, pools, strict=True):
        items = pool(case.example, case.items) if pool else case.items
        answer = Decider(task, run.labels).decide_from(case.first, items).answer
        row = task.data.write(case.example, answer)
        values = metric_values(task, task.gold(case.example), row, str(run.folder))
        table.add(case.example, task.score.weight(case.example), values)
    return summarize(table, resamples=0).mean[task.score.names[-1]]
