"""Metric values per example, and their weighted means with intervals."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from panjue.prompts.errors import UserError
from panjue.prompts.task import Example, Row, Task

Numbers = NDArray[np.float64]
RESAMPLES = 1000


@dataclass
class Columns:
    """One row per example: metric values and the weight, kept as flat number arrays."""

    names: tuple[str, ...]
    weights: list[float] = field(default_factory=list)
    values: list[Numbers] = field(default_factory=list)
    groups: dict[str, list[str]] = field(default_factory=dict)

    def add(self, example: Example, weight: float, values: Numbers) -> None:
        """Append one example."""
        self.weights.append(weight)
        self.values.append(values)
        before = len(self.weights) - 1
        for attribute in {**self.groups, **example.groups}:
            groups = self.groups.setdefault(attribute, ["-"] * before)
            groups.append(example.groups.get(attribute, "-"))


@dataclass(frozen=True)
class Summary:
    """Mean and 95% interval of every metric over `examples` examples.

    Attributes:
        unweighted: The examples' weights add up to nothing, so the mean is the plain one.
    """

    examples: int
    mean: dict[str, float]
    interval: dict[str, tuple[float, float]]
    unweighted: bool = False


@cache
def metric(name: str) -> Callable[[Row, Row | None], float]:
    """Return the function that a task names: `reading.f1`, or a bare name of `eval/metrics.py`."""
    module, _, function = name.rpartition(".")
    found: Callable[[Row, Row | None], float] = getattr(
        import_module(f"panjue.eval.{module or 'metrics'}"), function
    )
    return found


def metric_values(task: Task, gold: Row, row: Row | None, place: str) -> Numbers:
    """Return the task's metrics of one submission row; None is an example not answered.

    `gold` is what the row is scored against, as `Task.gold` makes it.

    Raises:
        UserError: The row is not in the hand-in format; names `place`.
    """
    functions = [metric(name) for name in task.metrics]
    try:
        return np.array([function(gold, row) for function in functions])
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{place} is not in the hand-in format; see `panjue check`") from None


def summarize(
    columns: Columns, resamples: int = RESAMPLES, mask: NDArray[np.bool_] | None = None
) -> Summary:
    """Return weighted means with 95% percentile bootstrap intervals over examples (seed 0).

    Where all weights are 0 (cases of one defendant in the official metric) the mean is the plain
    one, and the summary says so.
    """
    weights, values = np.array(columns.weights), np.array(columns.values)
    if mask is not None:
        weights, values = weights[mask], values[mask]
    unweighted = not weights.any()
    if unweighted:
        weights = np.ones_like(weights)
    mean = weights @ values / weights.sum()
    low = high = mean
    if resamples:
        low, high = np.percentile(resampled(weights, values, resamples), [2.5, 97.5], axis=0)
    return Summary(
        len(weights),
        dict(zip(columns.names, mean.tolist(), strict=True)),
        {name: (float(a), float(b)) for name, a, b in zip(columns.names, low, high, strict=True)},
        unweighted,
    )


def gold_rows(task: Task, gold: Path) -> Iterator[tuple[Example, Row]]:
    """Yield the examples of a labelled file with what their submission rows are scored against.

    Raises:
        UserError: One has no answer.
    """
    for example in task.read(gold):
        if example.answer is None:
            raise UserError(
                f"{gold}: id {example.id} has no gold answer; score needs the labelled file"
            )
        yield example, task.gold(example)


def resampled(weights: Numbers, values: Numbers, resamples: int) -> Numbers:
    """Return the weighted means of `resamples` bootstrap draws of examples (seed 0)."""
    draw = np.random.default_rng(0)
    n = len(weights)
    means = np.empty((resamples, values.shape[1]))
    for i in range(resamples):
        drawn = np.bincount(draw.integers(n, size=n), minlength=n) * weights
        means[i] = drawn @ values / drawn.sum() if drawn.any() else values.mean(axis=0)
    return means
