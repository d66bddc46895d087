"""Samples and their token probabilities -> how likely each label set and each class is."""

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Decide, Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import dump
from panjue.prompts.plumbing.parts import value_spans
from panjue.prompts.task import Task

Ways = list[tuple[str, float]]
"""Tokens that may stand at one place and their probabilities; the one that was taken is first."""

Alternatives = Sequence[tuple[int, Ways]]
"""Places of a reply, as character offsets, where the model might well have gone on otherwise."""

Belief = dict[Any, float]
"""Class, or label set as a frozenset, -> probability; sums to 1."""

Span = tuple[int, int]

WHOLE = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A value that is complete: a closed string."""

LAST = chr(0x10FFFF)
"""Sorts behind every character of a label."""


class Written:
    """The labels of one field as a reply has them, to find those that begin alike."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        """Take labels and how often training had them."""
        self.counts = {dump(label): n for label, n in counts.items()}
        self._sorted = sorted(self.counts)

    def beginning(self, text: str) -> list[str]:
        """Return the labels that a value whose first characters are `text` may be."""
        if whole := WHOLE.match(text):
            return [whole[0]] if whole[0] in self.counts else []
        return self._sorted[
            bisect_left(self._sorted, text) : bisect_left(self._sorted, text + LAST)
        ]

    def share(self, text: str, mass: float) -> Iterator[tuple[str, float]]:
        """Yield `mass` dealt out to the labels that begin with `text`, commoner ones get more."""
        found = self.beginning(text)
        total = sum(self.counts[label] for label in found)
        yield from ((label, mass * self.counts[label] / total) for label in found)


class Beliefs:
    """What completions say about every field that a task decides."""

    def __init__(self, task: Task, labels: Labels) -> None:
        """Sort the task's labels as they are written."""
        assert isinstance(task.answer, Decide)
        self._task, self._labels, self._decides = task, labels, task.answer
        self._written = {field: Written(labels.counts[field]) for field in task.answer.fields}

    def of(self, example: Example, completion: Mapping[str, Any]) -> list[dict[str, Belief]]:
        """Return for every item of the answer the belief about each field.

        Every readable reply counts alike. Its alternatives tell more than which way it went: those
        not taken at the end of it get their probability too (after Rao and Blackwell).
        """
        texts = completion["texts"]
        alternatives = completion.get("alternatives") or [[]] * len(texts)
        replies = [
            (text, of_text, self._task.ask.decode(text, example, self._labels))
            for text, of_text in zip(texts, alternatives, strict=True)
        ]
        readable = [reply for reply in replies if reply[2].readable] or replies[:1]
        sums: list[dict[str, Belief]] = []
        for text, of_text, decoded in readable:
            items = decoded.answer[self._decides.items]
            sums = sums or [defaultdict(lambda: defaultdict(float)) for _ in items]
            spans = self._spans(text)
            for i, item in enumerate(items):
                for field in self._written:
                    belief = self._belief(text, of_text, spans.get((i, field), []), field, item)
                    for value, mass in belief.items():
                        sums[i][field][value] += mass / len(readable)
        return sums

    def _spans(self, text: str) -> dict[tuple[int, str], list[Span]]:
        """Return where the values of every item and field stand."""
        spans = defaultdict(list)
        for start, end, path in value_spans(text):
            match path:
                case (self._decides.items, int(i), str(field), *_):
                    spans[i, field].append((start, end))
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
        written = [_read(text[start:end]) for start, end in spans]
        if not written or written != decoded:  # a reply that was repaired
            return {frozenset(decoded) if is_set else decoded[0]: 1.0}
        found = walk(text, alternatives, spans, self._written[field])
        if is_set:
            return found
        return {label: mass for labels, mass in found.items() for label in labels}


def walk(text: str, alternatives: Alternatives, spans: Sequence[Span], written: Written) -> Belief:
    """Return the belief about a label set that was written as the values at `spans`.

    Inside the last value an alternative token stands for the labels before and one that begins so.
    Alternatives before that are left to the samples: a list that went another way early would
    hardly have ended as this one did, and to count it as if it had makes long lists look rare.
    Tokens that no label begins with have no mass; the rest is scaled to 1.
    """
    belief: Belief = defaultdict(float)
    *earlier, (start, end) = spans
    before = frozenset(_read(text[a:b]) for a, b in earlier)
    reach = 1.0
    for place, ways in alternatives:
        if not start <= place <= end:
            continue
        for token, chance in ways[1:]:
            # Mass on the label itself is of another spelling, or of what stands behind it.
            for label, mass in written.share(text[start:place] + token, reach * chance):
                belief[before | {_read(label)}] += mass
        reach *= ways[0][1]
    belief[before | {_read(text[start:end])}] += reach
    total = sum(belief.values())
    return {labels: mass / total for labels, mass in belief.items()}


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return None
