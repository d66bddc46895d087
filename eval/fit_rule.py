"""Fit the rules by which answers are decided, on held-out completions, by the headline metric."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from panjue.eval.answers import AnsweredFile, open_answers
from panjue.eval.beliefs import as_key
from panjue.eval.decide import Decider, Evidence, decider_of
from panjue.eval.pool import Exponents, belief_of, pool_beliefs
from panjue.eval.rule import Fitted, Rule, cases_of, replies_of
from panjue.eval.values import score_answers
from panjue.prompts.example import Answer, Example
from panjue.prompts.model import DECISION
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.task import Task

TRIED = (0.25, 0.5, 0.75, 1.0)
EXPONENTS: Sequence[Exponents] = [(one, other) for one in TRIED for other in TRIED]

FOLDS = 5

MIN_GOLD_PROBABILITY = 1e-6
"""No gold value counts as less likely, so that no single item decides a fit."""


def fit_rules(folder: Path) -> None:
    """Fit the rules for one reply a case and for all, and write them beside the adapter.

    `folder` has the answers of a training to the cases that it held out.
    """
    answered = open_answers(folder)
    console, record = Console(soft_wrap=True, highlight=False, markup=False), answered.record
    decider = decider_of(answered.task, answered.labels, answered.trained)
    assert decider, "such answers are not generated for other tasks"
    rules = {}
    for samples in sorted({0, record.samples}):
        evidence = held_out_evidence(answered, decider, samples + 1)
        rules[samples], scores = Fitting(answered.task, decider, evidence).rule(samples)
        number = f"{samples + 1} replies" if samples else "one reply"
        values = ", ".join(f"{source} {value:.4f}" for source, value in scores.items())
        console.print(f"{number} a case, cross-validation: {values}; kept: {rules[samples]}")
    characters = median([len(example.text) for example in answered.examples()] or [0])
    replies = replies_of(record.sampling, record.constrained)
    fitted = Fitted(cases_of(record), replies, characters, rules)
    write_json(answered.trained / DECISION, asdict(fitted))


Known = tuple[Example, Evidence]
"""A held-out example, and what is known of it."""


def held_out_evidence(answered: AnsweredFile, decider: Decider, replies: int) -> list[Known]:
    """Return the held-out examples that were asked, with so many of their replies."""
    known, rows = [], answered.rows()
    for example in answered.examples():
        row = answered.row(rows, {"id": example.id})
        if example.answer is None:
            raise UserError(f"{answered.test}: id {example.id} has no gold answer to fit on")
        if row.get("refused") is None:
            few: dict[str, Any] = dict(row)
            few |= {key: row[key][:replies] for key in ("texts", "alternatives") if key in row}
            known.append((example, decider.evidence(example, few)))
    return known


class Fitting:
    """Fits one rule on cases with the same number of replies."""

    def __init__(self, task: Task, decider: Decider, known: Sequence[Known]) -> None:
        """Divide the cases into folds."""
        self._task, self._decider, self._known = task, decider, known
        self._folds = np.arange(len(known)) % FOLDS

    def rule(self, samples: int) -> tuple[Rule, dict[str, float]]:
        """Return the rule that is best in cross-validation, and the headline metric of each source.

        There each fold is decided by what was fitted on the other ones. Of equal sources the first
        one counts.
        """
        if not self._known:
            return Rule(), {}
        sources: dict[str, tuple[Rule, float]] = {}
        if self._decider.classifier:
            alone = Rule(classifier_alone=True)
            sources["classifier"] = alone, self._headline([alone] * FOLDS)
        if gaining := list(self._gaining()):
            crossed = [Rule({name: folds[k] for name, _, folds in gaining}) for k in range(FOLDS)]
            rule = Rule({name: exponents for name, exponents, _ in gaining})
            sources["both"] = rule, self._headline(crossed)
        first = (evidence.first for _, evidence in self._known)
        replies = self._headline([Rule()] * FOLDS) if samples else self._score(first)
        sources["replies"] = Rule(), replies
        best = max(sources, key=lambda name: sources[name][1])
        return sources[best][0], {name: value for name, (_, value) in sources.items()}

    def _gaining(self) -> Iterator[tuple[str, Exponents, list[Exponents]]]:
        """Yield the fields that gain from the classifier: exponents on all cases, and by fold.

        They have the lowest log loss, which says more than the metric does of few cases, and gives
        calibrated beliefs. The gain is that of the headline metric on folds whose cases had no part
        in the exponents.
        """
        if self._decider.classifier is None:
            return
        alone = self._headline([Rule()] * FOLDS)
        for name in self._decider.classifier.fields:
            losses = np.array([self._losses(known, name) for known in self._known])
            by_fold = [_lowest(losses[self._folds != k]) for k in range(FOLDS)]
            if self._headline([Rule({name: of_fold}) for of_fold in by_fold]) > alone:
                yield name, _lowest(losses), by_fold

    def _losses(self, known: Known, name: str) -> NDArray[Any]:
        """Return the log loss of one field, summed over a case's items, for `EXPONENTS`."""
        example, evidence = known
        assert self._decider.classifier, "checked before"
        assert example.answer is not None, "checked before"
        field = self._decider.classifier.fields[name]
        gold, total = self._task.answer.items_of(example.answer), np.zeros(len(EXPONENTS))
        found = zip(gold, evidence.opinions or (), evidence.beliefs or (), strict=False)
        for item, opinion, belief in found:
            second = belief_of(field, opinion[name], belief[name])
            for i, exponents in enumerate(EXPONENTS):
                pooled = pool_beliefs(belief[name], second, exponents)
                likely = pooled.get(as_key(item[name]), 0.0)
                total[i] -= log(max(likely, MIN_GOLD_PROBABILITY))
        return total

    def _headline(self, rules: Sequence[Rule]) -> float:
        """Return the headline metric of the cases, each decided by the rule of its fold."""
        deciders = [self._decider.with_rule(rule) for rule in rules]
        return self._score(
            deciders[fold].decide_from(evidence).answer
            for fold, (_, evidence) in zip(self._folds, self._known, strict=True)
        )

    def _score(self, answers: Iterable[Answer]) -> float:
        """Return the headline metric of answers to the cases."""
        examples = (example for example, _ in self._known)
        metrics = score_answers(self._task, zip(examples, answers, strict=True))
        return metrics[self._task.score.names[-1]]


def _lowest(losses: NDArray[Any]) -> Exponents:
    """Return the exponents of the lowest loss over cases, [cases, exponents]."""
    return EXPONENTS[int(np.argmin(losses.sum(axis=0)))]
