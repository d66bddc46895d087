"""How far a run's confidence may be trusted, and what setting uncertain cases aside gives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from panjue.eval.means import ScoreTable, Summary, summarize
from panjue.prompts.example import Decide, Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row

BINS = 10
ABSTENTION_SHARES = (0.0, 0.1, 0.2, 0.3)
"""Shares of the examples that are set aside for a human, the least certain first."""


@dataclass(frozen=True)
class Bin:
    """Judgments whose confidence lies in one tenth of [0, 1]."""

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Calibration of one field.

    Attributes:
        error: Expected calibration error: the mean distance of confidence and accuracy over bins,
            weighted by their counts (Guo et al., ICML 2017).
        bins: The bins that are not empty, least certain first.
    """

    error: float
    bins: tuple[Bin, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the error and the reliability table."""
        return {"ece": self.error, "bins": [vars(one) for one in self.bins]}


def calibration(confidence: Sequence[float], correct: Sequence[bool]) -> Calibration:
    """Bin confidences in [0, 1] and compare them with how often they were right."""
    sure, right = np.array(confidence, dtype=float), np.array(correct, dtype=float)
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    bins = tuple(
        Bin(int(inside.sum()), float(sure[inside].mean()), float(right[inside].mean()))
        for inside in (place == number for number in range(BINS))
        if inside.any()
    )
    error = sum(one.count * abs(one.confidence - one.accuracy) for one in bins)
    return Calibration(error / max(1, len(sure)), bins)


def of_example(row: Mapping[str, Any]) -> float:
    """Return how sure a row of `confidence.jsonl` is: the mean over its judgments."""
    values = [value for item in row["confidence"] for value in item.values()]
    return float(sum(values) / len(values))


class Certainty:
    """Collects confidences beside what is right, example by example."""

    def __init__(self, task: Task, path: Path) -> None:
        """Read the confidences of `path` by id as they are asked for."""
        assert isinstance(task.answer, Decide), "only decided answers have a confidence"
        self._decides, self._rows = task.answer, Rows(path)
        self._sure: dict[str, list[float]] = {field: [] for field in task.answer.fields}
        self._right: dict[str, list[bool]] = {field: [] for field in task.answer.fields}
        self._of_example: list[float] = []

    def add(self, example: Example, gold: Row, row: Row | None) -> list[tuple[str, float, bool]]:
        """Take one example; one without a confidence (not asked, say) counts as least certain.

        Return (field, confidence, whether it is right) of each of its judgments.
        """
        sure = self._rows.get(example.id)
        if sure is None or row is None:
            self._of_example.append(0.0)
            return []
        written_items = row[self._decides.items]
        wanted_items = _in_order_of(written_items, gold[self._decides.items])
        items = (sure["confidence"], wanted_items, written_items)
        if len({len(part) for part in items}) != 1:
            raise UserError(f"{self._rows.path}: id {example.id} is of another submission")
        noted = [
            (field, float(confidence[field]), _plain(wanted[field]) == _plain(written[field]))
            for confidence, wanted, written in zip(*items, strict=True)
            for field in self._decides.fields
        ]
        for field, confidence, right in noted:
            self._sure[field].append(confidence)
            self._right[field].append(right)
        self._of_example.append(of_example(sure))
        return noted

    def fields(self) -> dict[str, Calibration]:
        """Return the calibration of each field over all judgments."""
        return {field: calibration(self._sure[field], self._right[field]) for field in self._sure}

    def abstention(self, scored: ScoreTable) -> dict[float, Summary]:
        """Return share set aside -> score of the other examples."""
        order = np.argsort(np.array(self._of_example), kind="stable")
        kept = {}
        for share in ABSTENTION_SHARES:
            mask = np.ones(len(order), dtype=bool)
            mask[order[: round(share * len(order))]] = False
            kept[share] = summarize(scored, resamples=0, mask=mask)
        return kept


def _in_order_of(written: Sequence[Row], gold: Sequence[Row]) -> Sequence[Row]:
    """Return the gold items in the order of the written ones: by name, as the metric does."""
    if not all("name" in item for item in (*written, *gold)):
        return gold
    by_name = {str(item["name"]): item for item in gold}
    names = [str(item["name"]) for item in written]
    if sorted(names) != sorted(by_name):
        return ()
    return [by_name[name] for name in names]


def _plain(value: Any) -> Any:
    return frozenset(value) if isinstance(value, list) else value


def show(
    fields: Mapping[str, Calibration], abstention: Mapping[float, Summary], console: Console
) -> None:
    """Print the reliability table and the scores with cases set aside."""
    for table in _tables(fields, abstention):
        console.print(table)


def _tables(
    fields: Mapping[str, Calibration], abstention: Mapping[float, Summary]
) -> Iterator[Table]:
    for field, found in fields.items():
        table = Table(f"{field}: ECE {found.error:.3f}", *(str(one.count) for one in found.bins))
        table.add_row("confidence", *(f"{one.confidence:.2f}" for one in found.bins))
        table.add_row("right", *(f"{one.accuracy:.2f}" for one in found.bins))
        yield table
    names = list(next(iter(abstention.values())).mean)
    table = Table("least certain set aside", *names)
    for share, summary in abstention.items():
        table.add_row(f"{share:.0%}", *(f"{summary.mean[name]:.4f}" for name in names))
    yield table
