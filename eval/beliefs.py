"""Samples and their token probabilities -> the probability of each label set and each class."""

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import value_spans
from panjue.prompts.plumbing.files import dump
from panjue.prompts.task import Task

TokenChoices = list[tuple[str, float]]
"""Tokens that are likely at one place, with their probabilities; the sampled one is first."""

Alternatives = Sequence[tuple[int, TokenChoices]]
"""Places of a reply, as character offsets, where another token was likely too."""

Belief = dict[Any, float]
"""Class, or label set as a frozenset, -> probability; sums to 1."""

Span = tuple[int, int]

CLOSED_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A complete value in JSON."""

LAST_CHARACTER = chr(0x10FFFF)
"""Sorts after every character of a label."""


class LabelIndex:
    """The labels of one field, as JSON strings, to be found by their first characters."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        """Index labels, given with how often training had them."""
        self.counts = {dump(label): n for label, n in counts.items()}
        self._sorted = sorted(self.counts)

    def share(self, text: str, mass: float) -> Iterator[tuple[str, float]]:
        """Divide `mass` among the labels that begin with `text`, in proportion to their counts.

        If `text` has a closed string, that is the only such label.
        """
        if closed := CLOSED_STRING.match(text):
            labels = [closed[0]] if closed[0] in self.counts else []
        else:
            start, end = (bisect_left(self._sorted, t) for t in (text, text + LAST_CHARACTER))
            labels = self._sorted[start:end]
        total = sum(self.counts[label] for label in labels)
        yield from ((label, mass * self.counts[label] / total) for label in labels)


class Estimator:
    """Estimates, from completions, the distribution of every field that a task decides."""

    def __init__(self, task: Task, labels: Labels) -> None:
        """Index the task's labels by field."""
        self._task, self._labels, self._decides = task, labels, task.answer
        self._indexes = {
            field: LabelIndex(task.answer.counts(field, labels.counts))
            for field in task.answer.fields
        }

    def beliefs(
        self, example: Example, completion: Mapping[str, Any]
    ) -> list[dict[str, Belief]] | None:
        """Return, for every item of the answer, the belief about each field.

        None if no reply is readable.
        Every readable reply has the same weight. A reply's alternative tokens at the end of a
        value count with their probabilities too, which lowers the variance (Rao-Blackwell).
        """
        texts = completion["texts"]
        alternatives = completion.get("alternatives") or [[]] * len(texts)
        replies = [
            (text, choices, self._task.ask.decode(text, example, self._labels))
            for text, choices in zip(texts, alternatives, strict=True)
        ]
        readable = [reply for reply in replies if reply[2].readable]
        sums: list[dict[str, Belief]] = []
        for text, choices, decoded in readable:
            items = self._decides.items_of(decoded.answer)
            sums = sums or [defaultdict(lambda: defaultdict(float)) for _ in items]
            spans = self._spans(text)
            for i, item in enumerate(items):
                for field in self._indexes:
                    belief = self._belief(text, choices, spans.get((i, field), []), field, item)
                    for value, mass in belief.items():
                        sums[i][field][value] += mass / len(readable)
        return sums or None

    def _spans(self, text: str) -> dict[tuple[int, str], list[Span]]:
        """Return (item, field) -> the spans of its values in the reply."""
        spans = defaultdict(list)
        for start, end, path in value_spans(text):
            match path:
                case (self._decides.items, int(i), str(field), *_):
                    spans[i, field].append((start, end))
                case (str(field), *_) if not self._decides.items:
                    spans[0, field].append((start, end))
        return spans

    def _belief(
        self,
        text: str,
        alternatives: Alternatives,
        spans: list[Span],
        field: str,
        item: Mapping[str, Any],
    ) -> Belief:
        """Return the belief of one reply about one field of one item."""
        is_set = field in self._decides.sets
        decoded = item[field] if is_set else [item[field]]
        values = [_read(text[start:end]) for start, end in spans]
        if not values or values != decoded:  # a reply that was repaired
            return {frozenset(decoded) if is_set else decoded[0]: 1.0}
        belief = walk(text, alternatives, spans, self._indexes[field])
        if is_set:
            return belief
        return {label: mass for labels, mass in belief.items() for label in labels}


def walk(text: str, alternatives: Alternatives, spans: Sequence[Span], index: LabelIndex) -> Belief:
    """Return the belief about a label set whose values are at `spans` in a reply.

    An alternative token inside the last value means: the earlier labels, and a label that begins
    with this token. Alternatives inside earlier values are ignored, the other samples cover them:
    a list that differs early would rarely have the same end, and to assume the same end makes
    long lists look rare. A token that begins no label has no mass; the rest is scaled to 1.
    """
    belief: Belief = defaultdict(float)
    *earlier, (start, end) = spans
    earlier_labels = frozenset(_read(text[a:b]) for a, b in earlier)
    reached = 1.0  # probability of the sampled tokens so far
    for place, choices in alternatives:
        if not start <= place <= end:
            continue
        for token, chance in choices[1:]:
            # The sampled label itself can get mass: other tokens spell it, or differ only after it.
            for label, mass in index.share(text[start:place] + token, reached * chance):
                belief[earlier_labels | {_read(label)}] += mass
        reached *= choices[0][1]
    belief[earlier_labels | {_read(text[start:end])}] += reached
    total = sum(belief.values())
    return {labels: mass / total for labels, mass in belief.items()}


def as_key(value: Any) -> Any:
    """Return a value of a field as a belief has it."""
    return frozenset(value) if isinstance(value, list) else value


def marginals(belief: Belief) -> dict[str, float]:
    """Return each label's probability of being in the set."""
    totals: dict[str, float] = {}
    for labels, mass in belief.items():
        for label in labels:
            totals[label] = totals.get(label, 0.0) + mass
    return totals


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return None
