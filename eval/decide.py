"""Beliefs -> the answer of highest expected score: label sets by F1, classes by probability."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panjue.eval.beliefs import Belief, Estimator, as_key, marginals
from panjue.eval.classifier import Classifier, Opinion, load_classifier
from panjue.eval.pool import belief_of, pool_beliefs
from panjue.eval.rule import Rule
from panjue.prompts.example import Answer, Example, first_reply
from panjue.prompts.labels import Labels
from panjue.prompts.task import Task

Beliefs = Sequence[Mapping[str, Belief]]
"""For every item of an answer: field -> belief."""

TOLERANCE = 1e-12
"""Differences of expected F1 below this are rounding; the smaller set then stays."""


@dataclass(frozen=True)
class Decision:
    """An answer and its confidence.

    Attributes:
        answer: In the task's usual form.
        confidence: Per item: field -> probability that the field is exactly right.
        classes: Per item: field with one class -> class -> probability.
    """

    answer: Answer
    confidence: list[dict[str, float]]
    classes: list[dict[str, Belief]]


@dataclass(frozen=True)
class Evidence:
    """What is known of an example before its answer is decided.

    Attributes:
        first: The answer of the first reply; the task's fallback if there is none.
        beliefs: For every item of the answer: field -> belief; None without a readable reply.
        opinions: The text classifier's, for every item; None if there is no classifier.
    """

    first: Answer
    beliefs: Beliefs | None
    opinions: list[dict[str, Opinion]] | None


class Decider:
    """Decides answers from completions, with the training's labels as a prior."""

    def __init__(
        self,
        task: Task,
        labels: Labels,
        rule: Rule | None = None,
        classifier: Classifier | None = None,
    ) -> None:
        """Prepare for one task, its labels, and the text classifier of the same training."""
        assert task.answer.fields, "the answers of this task are not decided"
        self._task, self._labels, self._decides = task, labels, task.answer
        self._estimator = Estimator(task, labels)
        self.rule, self.classifier = rule or Rule(), classifier

    def decide(
        self, example: Example, completion: Mapping[str, Any], *, keep_first: bool = False
    ) -> Decision:
        """Return the answer of highest expected score, and its confidence.

        With `keep_first` the answer is the first reply, unchanged, with its confidence.
        """
        return self.decide_from(self.evidence(example, completion), keep_first=keep_first)

    def with_rule(self, rule: Rule) -> "Decider":
        """Return the decider with another rule."""
        other = copy(self)
        other.rule = rule
        return other

    def evidence(self, example: Example, completion: Mapping[str, Any]) -> Evidence:
        """Return what a completion, which may be refused, and the classifier say."""
        opinions = self.classifier.opinions(example) if self.classifier else None
        first = self._task.ask.decode(first_reply(completion), example, self._labels).answer
        is_asked = completion.get("refused") is None
        beliefs = self._estimator.beliefs(example, completion) if is_asked else None
        return Evidence(first, beliefs, opinions)

    def decide_from(self, evidence: Evidence, *, keep_first: bool = False) -> Decision:
        """Decide from the evidence; the fields that are not decided stay as in the first answer.

        Without beliefs the first answer stays.
        """
        items, confidence, classes = [], [], []
        first_items, names = self._decides.items_of(evidence.first), self._decides.fields
        certain = [{name: {as_key(item[name]): 1.0} for name in names} for item in first_items]
        beliefs = self.beliefs(evidence)
        has_first = evidence.beliefs is not None or evidence.opinions is None
        keep_first = (keep_first and has_first) or beliefs is None
        for item, belief in zip(first_items, beliefs or certain, strict=True):
            chosen = {name: item[name] for name in names} if keep_first else self.fields(belief)
            items.append({**item, **chosen})
            classes.append({name: belief[name] for name in self._decides.classes})
            confidence.append({f: belief[f].get(as_key(value), 0.0) for f, value in chosen.items()})
        return Decision(self._decides.with_items(evidence.first, items), confidence, classes)

    def beliefs(self, evidence: Evidence) -> Beliefs | None:
        """Return the beliefs to decide from; without a readable reply those of the classifier.

        None if there is no classifier either.
        """
        if evidence.opinions is None or self.classifier is None:
            return evidence.beliefs
        fields = self.classifier.fields
        if evidence.beliefs is None or self.rule.classifier_alone:
            return [
                {name: belief_of(fields[name], opinion[name]) for name in opinion}
                for opinion in evidence.opinions
            ]
        return [
            {
                name: pool_beliefs(b, belief_of(fields[name], opinion[name], b), exponents[name])
                if name in (exponents := self.rule.exponents)
                else b
                for name, b in belief.items()
            }
            for belief, opinion in zip(evidence.beliefs, evidence.opinions, strict=True)
        ]

    def fields(self, belief: Mapping[str, Belief]) -> dict[str, Any]:
        """Return the decided fields of one item, labels likeliest first."""
        decided: dict[str, Any] = {}
        for field in self._decides.sets:
            chosen = best_set(belief[field], self._labels.most[self._decides.kind(field)])
            marginal = marginals(belief[field])
            decided[field] = sorted(chosen, key=lambda label: (-marginal[label], label))
        for field in self._decides.classes:
            decided[field] = max(belief[field].items(), key=lambda pair: (pair[1], str(pair[0])))[0]
        return decided


def decider_of(task: Task, labels: Labels, trained: Path | None) -> Decider | None:
    """Return the decider of a training, with its text classifier if it has one, and no rule yet.

    None if the task's answers are not decided.
    """
    if not task.answer.fields:
        return None
    return Decider(task, labels, classifier=load_classifier(trained, task) if trained else None)


def best_set(belief: Belief, max_size: int) -> frozenset[str]:
    """Return the set of at most `max_size` labels with the highest expected F1, exactly.

    It is empty only if the belief has the empty set.

    For a given size m, the expected F1 is a sum over the chosen labels. The term of a label is the
    sum of 2 P(gold) / (m + |gold|) over the gold sets that have it. So the m labels with the
    largest terms are the best set of size m (Dembczyński et al., "An exact algorithm for F-measure
    maximization", NIPS 2011).
    """
    labels = sorted({label for gold in belief for label in gold})
    best = frozenset[str]()
    best_value = belief.get(best, -1.0)
    for size in range(1, min(max_size, len(labels)) + 1):
        terms = {
            label: sum(2 * p / (size + len(gold)) for gold, p in belief.items() if label in gold)
            for label in labels
        }
        chosen = frozenset(sorted(labels, key=lambda label: (-terms[label], label))[:size])
        value = sum(terms[label] for label in chosen)
        if value > best_value + TOLERANCE:
            best, best_value = chosen, value
    return best
