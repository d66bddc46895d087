"""Calibration of a run's confidences: how often answers of each confidence are right."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from panjue.prompts.example import Example, is_same
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row, by_name

BINS = 10


@dataclass(frozen=True)
class Bin:
    """Answers to a field whose confidence lies in one tenth of [0, 1]."""

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Reliability:
    """Calibration of one field."""

    ece: float
    """Expected calibration error: the mean distance between confidence and accuracy over the bins,
    weighted by their counts (Guo et al., ICML 2017)."""
    bins: tuple[Bin, ...]  # the bins that are not empty; the least certain first


def reliability(confidence: ArrayLike, correct: ArrayLike) -> Reliability:
    """Put confidences in [0, 1] into bins; compare their means with the accuracy of the bins."""
    confidences = np.array(confidence, dtype=float)
    hits = np.array(correct, dtype=float)
    bin_of = np.minimum((confidences * BINS).astype(int), BINS - 1)  # 1.0 goes into the last one
    bins = []
    distances = 0.0
    for number in np.unique(bin_of):
        is_inside = bin_of == number
        count = int(is_inside.sum())
        mean = float(confidences[is_inside].mean())
        accuracy = float(hits[is_inside].mean())
        bins.append(Bin(count, mean, accuracy))
        distances += count * abs(mean - accuracy)
    return Reliability(distances / max(1, len(confidences)), tuple(bins))


class Confidences:
    """The rows of a `confidence.jsonl`, by id: `{"id": 1, "confidence": [{"charges": 0.9}]}`."""

    def __init__(self, task: Task, path: Path) -> None:
        self._answer = task.answer
        self._rows = Rows(path)

    def of(self, example: Example, row: Row) -> list[Mapping[str, float]] | None:
        """Return for each item of an example's answer: field -> confidence; None without any."""
        kept = self._rows.get(example.id)
        if kept is None:
            return None
        items: Any = kept.get("confidence")
        is_whole = isinstance(items, list) and all(map(self._is_of_item, items))
        if not is_whole or len(items) != len(self._answer.items_of(row)):
            raise UserError(
                f"{self._rows.path}: id {example.id}: is not about the answer in the submission; "
                "`panjue decode` makes it again"
            )
        found: list[Mapping[str, float]] = items
        return found

    def _is_of_item(self, item: Any) -> bool:
        """Say whether a value of the file has the form of an item: field -> number from 0 to 1."""
        if not isinstance(item, dict) or not item.keys() <= set(self._answer.fields):
            return False
        return all(isinstance(one, float | int) and 0 <= one <= 1 for one in item.values())


def mean_confidence(items: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean confidence over all fields of all items; None if there are none."""
    values = [value for item in items for value in item.values()]
    return sum(values) / len(values) if values else None


class Certainty:
    """Collects confidences example by example, and whether the answers are right."""

    def __init__(self, task: Task, path: Path) -> None:
        assert task.answer.fields, "only answers that a text classifier may give have a confidence"
        self._answer = task.answer
        self._rows = Confidences(task, path)
        # Field -> for every answer: its confidence, and whether it is right.
        self._confidences = {field: array("d") for field in task.answer.fields}
        self._correct = {field: array("b") for field in task.answer.fields}

    def add(self, example: Example, gold: Row, row: Row | None) -> None:
        """Add the confidences of one example, if it has any, with whether its answers are right."""
        confidences = self._rows.of(example, row) if row else None
        if row is None or confidences is None:
            return
        # As in the metric, an item is found by its name and how often that came before. Tasks
        # without names have one item. Persons that are not in gold are left out.
        gold_items = by_name(self._answer.items_of(gold))
        items = by_name(self._answer.items_of(row))
        for confidence, (name, item) in zip(confidences, items.items(), strict=True):
            gold_item = gold_items.get(name)
            if gold_item is None:
                continue
            for field, chance in confidence.items():
                self._confidences[field].append(chance)
                self._correct[field].append(is_same(gold_item[field], item[field]))

    def fields(self) -> dict[str, Reliability]:
        """Return field -> the calibration of all answers to it."""
        fields = {}
        for field, confidences in self._confidences.items():
            fields[field] = reliability(confidences, self._correct[field])
        return fields
