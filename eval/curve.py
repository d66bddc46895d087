"""The losses in the log of a training, and the positions of lines in a picture of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from panjue.prompts.plumbing.files import read_lines

LEFT, RIGHT, TOP, BOTTOM = 40.0, 350.0, 8.0, 168.0
"""The frame within the picture, which is 360 wide and 200 high."""

WIDE_RANGE = 1000.0
"""If the highest loss is this many times the lowest, only powers of ten are marked."""

Point = tuple[int, float]
"""A step of a training and its loss."""


@dataclass(frozen=True)
class Picture:
    """The positions of the losses in the picture, on a logarithmic scale."""

    training: Sequence[tuple[float, float]]
    held_out: Sequence[tuple[float, float, int, float]]
    """x, y, step and loss."""
    kept: float | None  # x of the step whose weights are kept
    steps: Sequence[tuple[float, int]]  # marks of the x axis: position and step
    losses: Sequence[tuple[float, float]]  # marks of the y axis: position and loss


def read_losses(run: Path) -> tuple[list[Point], list[Point]]:
    """Return the losses in training and on held-out cases in a run's log; empty without a log."""
    path = run / "log.jsonl"
    training = []
    held_out = []
    for _, entry in read_lines(path) if path.exists() else ():
        if "eval_loss" in entry:
            held_out.append((entry["step"], entry["eval_loss"]))
        elif "loss" in entry:
            training.append((entry["step"], entry["loss"]))
    return training, held_out


def picture(
    training: Sequence[Point], held_out: Sequence[Point], kept_step: int | None
) -> Picture | None:
    """Return the positions of all parts; None if there is nothing to draw."""
    points = [*training, *held_out]
    positive = [loss for _, loss in points if loss > 0]
    if not positive:
        return None
    marks = loss_marks(min(positive), max(positive))
    lowest = marks[0]
    highest = marks[-1]
    last = max(step for step, _ in points)

    def x(step: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / last, 1)

    def y(loss: float) -> float:
        height = math.log(max(loss, lowest) / lowest) / math.log(highest / lowest)  # from 0 to 1
        return round(BOTTOM - (BOTTOM - TOP) * height, 1)

    return Picture(
        training=[(x(step), y(loss)) for step, loss in training],
        held_out=[(x(step), y(loss), step, loss) for step, loss in held_out],
        kept=None if kept_step is None else x(kept_step),
        steps=[(x(step), step) for step in step_marks(last)],
        losses=[(y(loss), loss) for loss in marks],
    )


def loss_marks(low: float, high: float) -> list[float]:
    """Return the marks of the axis of losses, e.g. `[0.2, 0.5, 1.0, 2.0]` for losses 0.3 to 1.1.

    They are 1, 2 and 5 times powers of ten, from the last below the losses to the first above; in a
    wide range (`WIDE_RANGE`), the powers of ten alone.
    """
    lowest = math.floor(math.log10(low)) - 1  # the logarithm may be rounded
    highest = math.ceil(math.log10(high)) + 1
    factors = (1, 2, 5) if high / low < WIDE_RANGE else (1,)
    powers = range(lowest, highest + 1)
    marks = [float(f"{factor}e{power}") for power in powers for factor in factors]
    first = max(number for number, mark in enumerate(marks) if mark <= low)
    end = min(number for number, mark in enumerate(marks) if mark >= high)
    return marks[first : max(end, first + 1) + 1]


def step_marks(last: int) -> range:
    """Return at most six round numbers of steps, beginning with 0."""
    distances = (factor * 10**power for power in count() for factor in (1, 2, 5))
    apart = next(distance for distance in distances if last <= 5 * distance)
    return range(0, last + 1, apart)
