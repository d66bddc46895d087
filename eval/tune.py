"""Fit the rules by which answers are decided, on held-out completions, by the headline metric."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from panjue.eval.answers import AnsweredFile, open_answers
from panjue.eval.decide import Beliefs, Decider, Evidence, decider_of
from panjue.eval.pool import Exponents, belief_of, pool_beliefs
from panjue.eval.rule import Fitted, Rule, cases_of, characters_of, replies_of
from panjue.eval.values import Members, MetricValues, metric_values, summarize
from panjue.prompts.example import Answer, Example
from panjue.prompts.model import DECISION, has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.plumbing.run import ANSWERS, TUNE
from panjue.prompts.task import Task

PAIR_PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
CLASS_PRIORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
TRIED = (0.25, 0.5, 0.75, 1.0)
EXPONENTS: Sequence[Exponents] = [(one, other) for one in TRIED for other in TRIED]

FOLDS = 5

MIN_GOLD_PROBABILITY = 1e-6
"""No gold value counts as less likely, so that no single item decides a fit."""

Ratios = dict[str, dict[str, float]]
"""`class_ratios` of a rule."""


@dataclass(frozen=True)
class Case:
    """A held-out example and what is known of it."""

    example: Example
    evidence: Evidence
    is_asked: bool


@dataclass(frozen=True)
class Trial:
    """The pool of one field: its exponents, and the headline metric without and with it."""

    field: str
    headline: str
    exponents: Exponents
    by_fold: Sequence[Exponents]
    without: float
    with_classifier: float

    @property
    def gains(self) -> bool:
        """Say whether the classifier is kept for the field."""
        return self.with_classifier > self.without

    def __str__(self) -> str:
        """Return the line that is printed."""
        used = "exponents {:g}, {:g}".format(*self.exponents) if self.gains else "not used"
        return (
            f"text classifier, {self.field}: {used}; in cross-validation "
            f"{self.headline} {self.without:.4f} -> {self.with_classifier:.4f}"
        )


def main(folder: Path) -> None:
    """Fit the rules for one reply a case and for all; write them into the adapter's folder."""
    tuning = folder / ANSWERS / TUNE
    answered = open_answers(tuning if tuning.is_dir() else folder)
    check(answered)
    console, record = Console(soft_wrap=True, highlight=False, markup=False), answered.record
    decider = decider_of(answered.task, answered.labels, answered.trained)
    assert decider, "checked before"
    rules = {}
    for samples in sorted({0, record.samples}):
        console.print(f"{samples + 1} replies to a case:" if samples else "one reply to a case:")
        cases = held_out_cases(answered, decider, samples + 1)
        rules[samples] = Fitting(answered, decider, cases).rule(samples, console)
    characters = characters_of(answered)
    fitted = Fitted(cases_of(record), replies_of(record), characters, rules)
    write_json(answered.trained / DECISION, asdict(fitted))
    console.print(f"written: {answered.trained / DECISION}; `panjue decode` uses it")


def held_out_cases(answered: AnsweredFile, decider: Decider, replies: int) -> list[Case]:
    """Return the held-out cases with their first replies."""
    cases = []
    for example, row in answered.completions():
        if example.answer is None:
            raise UserError(f"{answered.test}: id {example.id} has no gold answer to tune on")
        few: dict[str, Any] = {
            key: row[key][:replies] for key in ("texts", "alternatives") if key in row
        }
        evidence = decider.evidence(example, {**row, **few})
        cases.append(Case(example, evidence, row.get("refused") is None))
    return cases


class Fitting:
    """Fits one rule on cases with the same number of replies."""

    def __init__(self, answered: AnsweredFile, decider: Decider, cases: Sequence[Case]) -> None:
        """Count the gold classes of the whole file that the run answered.

        Training cases are among them: these cases are like the test cases, but those that training
        mixed in may not be.
        """
        self._task, self._decider, self._cases = answered.task, decider, cases
        whole_file = replace(answered.reader, held_out=False)
        self._gold = self._task.ask.labels(whole_file.read(answered.test)).counts
        self._asked = np.array([n for n, case in enumerate(cases) if case.is_asked], dtype=int)
        self._folds = np.full(len(cases), -1)
        self._folds[self._asked] = np.arange(len(self._asked)) % FOLDS

    def rule(self, samples: int, console: Console) -> Rule:
        """Return the rule; the classifier's answer if no other is better in cross-validation.

        There each fold is decided by what was fitted on the other ones.
        """
        if not len(self._asked):
            console.print("no case could be asked: nothing is fitted")
            return Rule()
        exponents: dict[str, Exponents] = {}
        crossed: list[dict[str, Exponents]] = [{} for _ in range(FOLDS)]
        for trial in self._trials():
            console.print(str(trial))
            if trial.gains:
                exponents[trial.field] = trial.exponents
                for one, of_fold in zip(crossed, trial.by_fold, strict=True):
                    one[trial.field] = of_fold
        first = self._first_replies()
        if not exponents and not samples:
            rule, value, name = Rule(), first, "first replies"
        else:
            everything = [np.arange(len(self._cases))]
            [rule] = self._search([Rule(exponents=exponents)], everything, self._folds * 0)
            others = [self._asked[self._folds[self._asked] != k] for k in range(FOLDS)]
            rules = self._search([Rule(exponents=e) for e in crossed], others, self._folds)
            value, name = self._headline(rules), "decided answers"
        alone = Rule(classifier_alone=True)
        found = {"first replies": first, name: value}
        if self._decider.classifier:
            found["the text classifier's"] = self._headline([alone] * FOLDS)
            if found["the text classifier's"] >= value:
                rule, name = alone, "the text classifier's"
        values = ", ".join(f"{source} {value:.4f}" for source, value in found.items())
        console.print(f"{self._task.score.names[-1]} in cross-validation: {values}; kept: {name}")
        return rule

    def _trials(self) -> Iterator[Trial]:
        """Yield for each field the exponents of the lowest log loss, and what they gain.

        The log loss says more than the metric does of few cases, and gives calibrated beliefs. The
        gain is that of the headline metric on folds whose cases had no part in the exponents.
        """
        if self._decider.classifier is None:
            return
        alone, folds = self._headline([Rule()] * FOLDS), self._folds[self._asked]
        for name in self._decider.classifier.fields:
            losses = np.array([self._losses(self._cases[n], name) for n in self._asked])
            by_fold = [_lowest(losses[folds != k]) for k in range(FOLDS)]
            rules = [Rule(exponents={name: of_fold}) for of_fold in by_fold]
            gained = self._headline(rules)
            headline = self._task.score.names[-1]
            yield Trial(name, headline, _lowest(losses), by_fold, alone, gained)

    def _losses(self, case: Case, name: str) -> NDArray[Any]:
        """Return the log loss of one field, summed over a case's items, for `EXPONENTS`."""
        assert self._decider.classifier, "checked before"
        assert case.example.answer is not None, "checked before"
        field, evidence = self._decider.classifier.fields[name], case.evidence
        gold, total = self._task.answer.items_of(case.example.answer), np.zeros(len(EXPONENTS))
        found = zip(gold, evidence.opinions or (), evidence.beliefs or (), strict=False)
        for item, opinion, belief in found:
            value = frozenset(item[name]) if field.is_set else item[name]
            second = belief_of(field, opinion[name], belief[name])
            for i, exponents in enumerate(EXPONENTS):
                likely = pool_beliefs(belief[name], second, exponents).get(value, 0.0)
                total[i] -= log(max(likely, MIN_GOLD_PROBABILITY))
        return total

    def _search(
        self, rules: Sequence[Rule], members: Sequence[Members], folds: NDArray[np.int64]
    ) -> list[Rule]:
        """Return the rules with the ratios, price and prior that are best on their `members`.

        Case n is decided by the rule of its fold. The price acts on label sets only and the prior
        on classes only: each is fitted alone. Of equal ones the smallest is taken.
        """
        beliefs = [
            self._decider.with_rule(rules[fold]).beliefs(case.evidence)
            for fold, case in zip(folds, self._cases, strict=True)
        ]
        fitted = [
            replace(rule, class_ratios=self._ratios(of, beliefs))
            for rule, of in zip(rules, members, strict=True)
        ]
        settings: Sequence[tuple[Sequence[float], Callable[[Rule, float], Rule]]] = (
            (PAIR_PRICES, lambda rule, price: replace(rule, pair_price=price)),
            (CLASS_PRIORS, lambda rule, prior: replace(rule, class_prior=prior)),
        )
        for tried, with_value in settings:
            scored = []
            for value in tried:
                deciders = [self._decider.with_rule(with_value(rule, value)) for rule in fitted]
                answers = (
                    deciders[fold].decide_beliefs(case.evidence.first, belief).answer
                    for fold, case, belief in zip(folds, self._cases, beliefs, strict=True)
                )
                scored.append(scores_of(self._task, self._cases, answers))
            for k, of in enumerate(members):
                headlines = [headline(values, of) for values in scored]
                fitted[k] = with_value(fitted[k], tried[int(np.argmax(headlines))])
        return fitted

    def _ratios(self, members: Members, beliefs: Sequence[Beliefs | None]) -> Ratios:
        """Return, for each class, its frequency in gold divided by its mean belief.

        Cases that are no members count in neither.
        """
        believed: dict[str, Counter[str]] = {name: Counter() for name in self._task.answer.classes}
        for n in np.intersect1d(members, self._asked):
            for item in beliefs[n] or ():
                for name, masses in believed.items():
                    masses.update(item[name])
        others = np.setdiff1d(np.arange(len(self._cases)), members)
        left_out = self._task.ask.labels(self._cases[n].example for n in others).counts
        return {
            name: ratios(
                Counter(self._gold.get(name, {})) - Counter(left_out.get(name, {})), masses
            )
            for name, masses in believed.items()
        }

    def _first_replies(self) -> float:
        answers = [case.evidence.first for case in self._cases]
        return headline(scores_of(self._task, self._cases, answers), self._asked)

    def _headline(self, rules: Sequence[Rule]) -> float:
        """Return the headline metric of the cases that were asked, decided by their fold's rule."""
        deciders = [self._decider.with_rule(rule) for rule in rules]
        cases = [self._cases[n] for n in self._asked]
        folds = zip(self._folds[self._asked], cases, strict=True)
        answers = (deciders[fold].decide_from(case.evidence).answer for fold, case in folds)
        return headline(scores_of(self._task, cases, answers))


def scores_of(task: Task, cases: Sequence[Case], answers: Iterable[Answer]) -> MetricValues:
    """Return the metric values of answers to the cases."""
    values = MetricValues(task)
    for case, answer in zip(cases, answers, strict=True):
        example = case.example
        row = task.data.write(example, answer)
        values.add(example, metric_values(task, task.gold(example), row, f"id {example.id}"))
    return values


def headline(values: MetricValues, members: Members | None = None) -> float:
    """Return the headline metric; 0 of no cases."""
    if members is not None and not len(members):
        return 0.0
    return list(summarize(values, members, resamples=0).mean.values())[-1]


def _lowest(losses: NDArray[Any]) -> Exponents:
    """Return the exponents of the lowest loss over cases, [cases, exponents]."""
    return EXPONENTS[int(np.argmin(losses.sum(axis=0)))]


def ratios(gold: Mapping[str, int], believed: Mapping[str, float]) -> dict[str, float]:
    """Return ratios of frequencies, both add-one smoothed."""
    classes = sorted({*gold, *believed})
    gold_counts = [gold.get(label, 0) + 1 for label in classes]
    masses = [believed.get(label, 0.0) + 1 for label in classes]
    scale = sum(masses) / max(1, sum(gold_counts))
    return {c: scale * n / m for c, n, m in zip(classes, gold_counts, masses, strict=True)}


def check(answered: AnsweredFile) -> None:
    """Refuse runs that cannot be used for fitting."""
    folder, record = answered.folder, answered.record
    if not answered.task.answer.fields:
        raise UserError(f"{folder}: its task {record.task!r} has nothing to fit")
    if not record.is_of_adapter:
        raise UserError(f"{folder}: only answers of a fine-tuned model can be fitted")
    if not record.samples and not has_classifier(answered.trained):
        raise UserError(f"{folder}: has no samples to decide from; generate with samples=8")
    training = answered.answers.training
    dev = training.dev_sha256 if training else None
    if not record.held_out and (dev is None or record.test_sha256 != dev):
        raise UserError(
            f"{folder}: its cases are not those that training held out; generate with "
            "held_out=true on the training file, or on the dev file if training had one"
        )
