"""The text classifier's opinion on a case: prompts show it, and it answers what no reply has.

After PLJP (Wu et al., "Precedent-Enhanced Legal Judgment Prediction with LLM and Domain-Model
Collaboration", EMNLP 2023): a small model of the domain gives candidates, the language model
decides. After a change to what prompts show raise `render.RULES`.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from panjue.eval.calibration import is_same
from panjue.eval.classifier import (
    MAX_SIZE,
    Classifier,
    Probabilities,
    load_classifier,
    size_chances,
)
from panjue.eval.scaling import TINY, Judgment, Scaling, scaled_chance
from panjue.prompts.example import Answer, AnswerFields, Decoded, Example, first_reply
from panjue.prompts.labels import Labels
from panjue.prompts.task import Task

SHOWN_FROM = 0.08
"""Labels of a lower probability are shown only if the classifier answers them."""

MAX_LABELS = 4
MAX_CLASSES = 3
"""Labels of a label set that are shown, unless the classifier answers more, and classes."""

LABELS_OF_SETS = 6
"""Sets are formed of so many of the likeliest labels."""

MAX_FORMED_SIZE = 3
"""Sets of up to so many labels are formed of all of these, larger ones of the likeliest."""

ROUNDING = 1e-12
"""Differences of expected F1 below this are rounding; the smaller set then stays."""


@dataclass(frozen=True)
class Opinion:
    """The classifier's opinion on one item of an answer.

    Attributes:
        probabilities: Field -> label -> probability. Of a class they sum to 1; of a label set each
            stands alone.
        answer: Field -> what the classifier itself would answer: labels, or one class.
    """

    probabilities: Mapping[str, Probabilities]
    answer: Mapping[str, Any]


class Answered(NamedTuple):
    """What a reply answers; without a text classifier there are no opinions and no confidence."""

    decoded: Decoded  # the reply after repair
    answer: Answer  # complete: what the reply does not have is the classifier's
    opinions: Sequence[Opinion] = ()
    confidence: Sequence[Mapping[str, float]] = ()  # see `Advisor.confidence`


EMPTY_REPLY: Mapping[str, Any] = {"texts": [""]}
"""A row of which everything is a guess."""


@dataclass(frozen=True)
class Advisor:
    """The classifier of a training, with what it needs to give opinions.

    Attributes:
        known: `case_key` -> the opinions, as prompts show them, on cases that the classifier was
            fitted on. They come from parts of it that had not seen the case.
        in_prompts: Whether prompts show its opinions.
        scaling: Corrects its probabilities where the model answers; empty, they stay as they are.
    """

    task: Task
    labels: Labels
    classifier: Classifier
    known: Mapping[str, str] = field(default_factory=dict)
    in_prompts: bool = True
    scaling: Scaling = field(default_factory=dict)

    def opinions(self, example: Example, row: Mapping[str, Any] = EMPTY_REPLY) -> list[Opinion]:
        """Return the opinion on every item of the answer.

        `row`, the example's row of completions, may already hold the opinions that its prompt
        showed; otherwise the classifier is asked now.
        """
        if "opinions" in row:
            return [Opinion(**of_item) for of_item in row["opinions"]]
        return self.with_answers(self.classifier.probabilities(example))

    def with_answers(self, items: Sequence[Mapping[str, Probabilities]]) -> list[Opinion]:
        """Return the opinions on items, each with what it makes of the item's probabilities."""
        return [Opinion(of_item, self._answer(of_item)) for of_item in items]

    def _answer(self, probabilities: Mapping[str, Probabilities]) -> dict[str, Any]:
        """Return field -> the set with the highest expected F1, or the likeliest class."""
        decides = self.task.answer
        answer: dict[str, Any] = {}
        for name in decides.sets:
            sizes = self.classifier.fields[name].sizes
            sets = likely_sets(sizes, probabilities[name])
            chosen = best_set(sets, self.labels.most[decides.kind(name)])
            answer[name] = by_probability(chosen, probabilities[name])
        for name in decides.classes:
            answer[name] = by_probability(probabilities[name], probabilities[name])[0]
        return answer

    def show(self, example: Example, opinions: Sequence[Opinion] | None = None) -> Example:
        """Return the example with the opinions for its prompt, if prompts show them."""
        if not self.in_prompts:
            return example
        text = self.known.get(case_key(example))
        if text is None:
            text = opinion_text(example, opinions or self.opinions(example), self.task.answer)
        return replace(example, inputs={**example.inputs, "opinions": text})

    def alone(self, example: Example, opinions: Sequence[Opinion]) -> Answer:
        """Return the classifier's own answer."""
        nothing = self.task.ask.decode("", example, self.labels)
        return self.complete(nothing, opinions)

    def complete(self, decoded: Decoded, opinions: Sequence[Opinion]) -> Answer:
        """Return the answer of a reply; the classifier answers what the reply does not have."""
        decides = self.task.answer
        items = [dict(item) for item in decides.items_of(decoded.answer)]
        for number, opinion in enumerate(opinions):
            for name, value in opinion.answer.items():
                if decoded.is_guess(number, name):
                    items[number][name] = value
        return decides.with_items(decoded.answer, items)

    def judgments(
        self, decoded: Decoded, answer: Answer, opinions: Sequence[Opinion]
    ) -> Iterator[Judgment]:
        """Yield each field of each item of a completed answer, beside the opinions."""
        for number, item in enumerate(self.task.answer.items_of(answer)):
            opinion = opinions[number]
            for name, probabilities in opinion.probabilities.items():
                value = item[name]
                agreement = "agree" if is_same(value, opinion.answer[name]) else "differ"
                if decoded.is_guess(number, name):
                    agreement = ""
                chance = self._chance_of(value, name, probabilities)
                yield Judgment(number, name, value, agreement, chance)

    def confidence(
        self, decoded: Decoded, answer: Answer, opinions: Sequence[Opinion]
    ) -> list[dict[str, float]]:
        """Return for each item: field -> the probability that exactly what it has is right."""
        confidence: list[dict[str, float]] = [{} for _ in opinions]
        for judgment in self.judgments(decoded, answer, opinions):
            confidence[judgment.item][judgment.field] = scaled_chance(self.scaling, judgment)
        return confidence

    def _chance_of(self, value: Any, name: str, probabilities: Probabilities) -> float:
        """Return the probability that field `name` has exactly this value: a class, or labels."""
        if name in self.task.answer.classes:
            return probabilities.get(value, 0.0)
        sizes = self.classifier.fields[name].sizes
        [chance] = set_chances(sizes, probabilities, [frozenset(value)])
        return chance


def read_answer(
    task: Task, labels: Labels, advisor: Advisor | None, example: Example, row: Mapping[str, Any]
) -> Answered:
    """Return what the row of an example's only call answers; it may have the opinions already."""
    decoded = task.ask.decode(first_reply(row), example, labels)
    if advisor is None:
        return Answered(decoded, decoded.answer)
    opinions = advisor.opinions(example, row)
    answer = advisor.complete(decoded, opinions)
    return Answered(decoded, answer, opinions, advisor.confidence(decoded, answer, opinions))


def load_advisor(trained: Path, task: Task, labels: Labels) -> Advisor | None:
    """Return the advisor of an adapter or model; None if its training fitted no classifier."""
    classifier = load_classifier(trained, task)
    return Advisor(task, labels, classifier) if classifier else None


def case_key(example: Example) -> str:
    """Return a key of a case's text and names; two tasks or files may use the same id."""
    text = "\n".join((*example.names, example.text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def opinion_text(example: Example, opinions: Sequence[Opinion], decides: AnswerFields) -> str:
    """Return the opinions for a prompt, one line an item: its name if items have one, the fields.

    The labels that the classifier answers come first, so that to agree is to copy, or a dash if it
    answers none; the others follow after a bar.
    """
    lines = ["; ".join(_field_texts(opinion)) for opinion in opinions]
    if decides.items:
        lines = [f"{name}: {line}" for name, line in zip(example.names, lines, strict=True)]
    return "\n".join(lines)


def _field_texts(opinion: Opinion) -> Iterator[str]:
    for name, probabilities in opinion.probabilities.items():
        answered = opinion.answer[name]
        most = MAX_LABELS
        if isinstance(answered, str):  # a class
            answered = [answered]
            most = MAX_CLASSES
        likely = [label for label, p in probabilities.items() if p >= SHOWN_FROM]
        others = by_probability(set(likely).difference(answered), probabilities)
        room = max(0, most - len(answered))
        text = _with_percent(answered, probabilities) or "-"
        if others[:room]:
            text += f" | {_with_percent(others[:room], probabilities)}"
        yield text


def _with_percent(labels: Sequence[str], probabilities: Probabilities) -> str:
    return ", ".join(f"{label} {probabilities[label]:.0%}" for label in labels)


def by_probability(labels: Iterable[str], probabilities: Probabilities) -> list[str]:
    """Return labels, the likeliest first."""
    return sorted(labels, key=lambda label: (-probabilities[label], label))


def likely_sets(
    weights: Sequence[float], probabilities: Probabilities
) -> dict[frozenset[str], float]:
    """Return the sets of the likeliest labels, with their probabilities.

    `weights` are `LabelField.sizes`. The empty set is one of them only if training had it. The sets
    that are not formed have the rest of the probability.
    """
    ranked = by_probability(probabilities, probabilities)[:LABELS_OF_SETS]
    sets: list[frozenset[str]] = []
    for size in range(1, MAX_FORMED_SIZE + 1):
        sets += map(frozenset, combinations(ranked, size))
    for size in range(MAX_FORMED_SIZE + 1, len(ranked) + 1):
        sets.append(frozenset(ranked[:size]))
    if weights[0]:
        sets.append(frozenset())
    chances = set_chances(weights, probabilities, sets)
    return dict(zip(sets, chances, strict=True))


def set_chances(
    weights: Sequence[float], probabilities: Probabilities, sets: Sequence[frozenset[str]]
) -> list[float]:
    """Return the probability of each set, that exactly it is right.

    Labels are independent, but for the sizes of sets: a set of a size that training had seldom is
    less likely: `weights` are `LabelField.sizes`.
    """
    chances = {label: min(max(p, TINY), 1 - TINY) for label, p in probabilities.items()}
    odds = {label: p / (1 - p) for label, p in chances.items()}
    none = prod(1 - p for p in chances.values())
    likely = [p for p in chances.values() if p > TINY]
    by_size = size_chances(likely or chances.values())
    expected = sum(map(mul, by_size, weights))
    scale = none / (expected or 1)
    found = []
    for labels in sets:
        size = min(len(labels), MAX_SIZE)
        # Sorted: sums and products of floats depend on their order.
        of_labels = [odds.get(label, TINY) for label in sorted(labels)]
        found.append(scale * weights[size] * prod(of_labels))
    return found


def best_set(chances: Mapping[frozenset[str], float], max_size: int) -> frozenset[str]:
    """Return the set of at most `max_size` labels with the highest expected F1, exactly.

    For a given size m, the expected F1 is a sum over the chosen labels. The term of a label is the
    sum of 2 P(gold) / (m + |gold|) over the gold sets that have it. So the m labels with the
    largest terms are the best set of size m (Dembczyński et al., "An exact algorithm for F-measure
    maximization", NIPS 2011). It is empty only if `chances` has the empty set.
    """
    # Label -> size of gold -> probability of the gold sets of this size that have it.
    by_size: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for gold, p in chances.items():
        for label in gold:
            by_size[label][len(gold)] += p
    labels = sorted(by_size)
    best = frozenset[str]()
    best_value = chances.get(best, -1.0)
    for size in range(1, min(max_size, len(labels)) + 1):
        terms = {}
        for label in labels:
            parts = [2 * p / (size + of_gold) for of_gold, p in by_size[label].items()]
            terms[label] = sum(parts)
        ranked = sorted(labels, key=lambda label: (-terms[label], label))
        value = sum(terms[label] for label in ranked[:size])
        if value > best_value + ROUNDING:
            best = frozenset(ranked[:size])
            best_value = value
    return best
