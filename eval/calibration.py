"""Confidences: how often judgments of each confidence are right, and what is made of that."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize
from scipy.special import expit, logit

from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.run import ANSWERS, HELD_OUT
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row

BINS = 10

MIN_CALIBRATION = 50
"""Judgments that a calibration needs; with fewer the probabilities stay as they are."""

CALIBRATION = "calibration.json"
"""File beside answers to held-out cases with the calibration of confidences: a `Scaling`."""

Scaling = Mapping[str, Mapping[str, tuple[float, float]]]
"""Field -> `agree` or `differ`, as model and classifier do -> scale and shift of the log-odds."""

TINY = 1e-9
"""No probability counts as less, and none as closer to 1."""


@dataclass(frozen=True)
class Bin:
    """Judgments whose confidence lies in one tenth of [0, 1]."""

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Calibration of one field."""

    ece: float
    """Expected calibration error: the mean distance between confidence and accuracy over the bins,
    weighted by their counts (Guo et al., ICML 2017)."""
    bins: tuple[Bin, ...]  # the bins that are not empty, least certain first


def calibration(confidence: ArrayLike, correct: ArrayLike) -> Calibration:
    """Bin confidences in [0, 1] and compare their means with the accuracy of the bins."""
    confidences = np.array(confidence, dtype=float)
    hits = np.array(correct, dtype=float)
    bin_of = np.minimum((confidences * BINS).astype(int), BINS - 1)
    bins = []
    error = 0.0
    for number in np.unique(bin_of):
        inside = bin_of == number
        one = Bin(
            count=int(inside.sum()),
            confidence=float(confidences[inside].mean()),
            accuracy=float(hits[inside].mean()),
        )
        error += one.count * abs(one.confidence - one.accuracy)
        bins.append(one)
    return Calibration(error / max(1, len(confidences)), tuple(bins))


def platt(
    logits: NDArray[Any], gold: NDArray[Any], weights: NDArray[Any] | None = None
) -> tuple[float, float]:
    """Return the scale, which is positive, and shift of logits with the lowest log loss.

    `weights` are those of the items if all logits are not alike.
    """

    def loss(of: NDArray[Any]) -> float:
        scaled = logits * np.exp(of[0]) + of[1]
        losses = np.logaddexp(0, np.where(gold, -scaled, scaled))
        return float(np.average(losses, weights=weights))

    log_scale, shift = minimize(loss, np.zeros(2), method="Nelder-Mead").x
    return float(np.exp(log_scale)), float(shift)


class Judgment(NamedTuple):
    """What the model answered in one field of one item."""

    field: str
    agrees: bool  # whether the text classifier answers the same
    chance: float  # the classifier's probability that exactly this answer is right
    correct: bool


def scaling_of(judgments: Iterable[Judgment]) -> Scaling:
    """Return the scaling that fits these judgments best."""
    groups: dict[tuple[str, str], list[Judgment]] = defaultdict(list)
    for judgment in judgments:
        groups[judgment.field, agreement_key(judgment.agrees)].append(judgment)
    scaling: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for (name, agreement), group in groups.items():
        if len(group) >= MIN_CALIBRATION:
            chances = log_odds([judgment.chance for judgment in group])
            correct = [judgment.correct for judgment in group]
            # Two more at the mean, one right and one wrong: nothing becomes certain.
            middle = np.full(2, chances.mean())
            scaling[name][agreement] = platt(
                np.concatenate([chances, middle]), np.array([*correct, True, False])
            )
    return scaling


def scaled(scaling: Scaling, name: str, agrees: bool, chance: float) -> float:
    """Return the confidence in an answer of the model; for the arguments see `Judgment`."""
    of_field = scaling.get(name, {})
    if (agreement := agreement_key(agrees)) not in of_field:
        return chance
    scale, shift = of_field[agreement]
    return float(expit(scale * log_odds(chance) + shift))


def agreement_key(agrees: bool) -> str:
    return "agree" if agrees else "differ"


def log_odds(chance: ArrayLike) -> NDArray[Any]:
    return np.asarray(logit(np.clip(chance, TINY, 1 - TINY)))


def read_scaling(trained: Path) -> Scaling:
    """Return the scaling beside the newest answers to the cases that a training held out."""
    found = trained.parent.glob(f"{ANSWERS}/{HELD_OUT}-*/{CALIBRATION}")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return read_json(newest) if newest else {}


def mean_confidence(row: Mapping[str, Any]) -> float:
    """Return the mean confidence over all judgments of a row of `confidence.jsonl`."""
    values: list[float] = []
    for item in row["confidence"]:
        values += item.values()
    return float(sum(values) / len(values))


def is_same(gold: Any, value: Any) -> bool:
    """Say whether two values of a field are equal; the order of a label set does not matter."""
    if isinstance(gold, list) and isinstance(value, list):
        return set(gold) == set(value)
    return bool(gold == value)


class Certainty:
    """Collects confidences, and whether the judgments are correct, example by example."""

    def __init__(self, task: Task, path: Path) -> None:
        assert task.answer.fields, "only decided answers have a confidence"
        self._decides = task.answer
        self._rows = Rows(path)
        # Field -> the confidence of every judgment, and whether it is correct.
        self._judgments = {field: (array("d"), array("b")) for field in task.answer.fields}

    def add(self, example: Example, gold: Row, row: Row | None) -> None:
        """Compare the confidences of one example, if it has any, with its gold answer."""
        told = self._rows.get(example.id)
        if told is None or row is None:
            return
        confidences = told["confidence"]
        items = self._decides.items_of(row)
        if len(confidences) != len(items):
            raise UserError(f"{self._rows.path}: id {example.id} is of another submission")
        # By name as in the metric: persons whom gold does not have, or a second time, are ignored.
        gold_items = {item.get("name"): item for item in self._decides.items_of(gold)}
        for confidence, item in zip(confidences, items, strict=True):
            gold_item = gold_items.pop(item.get("name"), None)
            if gold_item is None:
                continue
            for name, (sure, correct) in self._judgments.items():
                sure.append(confidence[name])
                correct.append(is_same(gold_item[name], item[name]))

    def fields(self) -> dict[str, Calibration]:
        return {name: calibration(*judgments) for name, judgments in self._judgments.items()}


def show_calibration(fields: Mapping[str, Calibration], console: Console) -> None:
    """Print the error of each field; the report has the bins."""
    table = Table("field", "ECE", "judgments")
    for name, result in fields.items():
        judgments = sum(one.count for one in result.bins)
        table.add_row(name, f"{result.ece:.4f}", str(judgments))
    console.print(table)
