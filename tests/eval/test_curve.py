"""The picture of a training's losses: what it draws lies in its frame, and in order."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.curve import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    loss_marks,
    picture,
    read_losses,
    step_marks,
)
from panjue.prompts.plumbing.files import dump

losses = st.floats(1e-9, 1e9)
points = st.lists(st.tuples(st.integers(1, 10**7), st.just(0.0) | losses), max_size=9)


@given(losses, losses)
def test_the_marks_are_around_the_losses(one: float, other: float) -> None:
    low, high = sorted((one, other))
    marks = loss_marks(low, high)
    assert len(marks) >= 2
    assert marks == sorted(set(marks))
    assert marks[0] <= low
    assert high <= marks[-1]
    assert len(marks) < 5 or (marks[1] > low and marks[-2] < high), "not further than needed"


@given(st.integers(1, 10**9))
def test_the_marks_of_steps_are_few_and_round(last: int) -> None:
    marks = step_marks(last)
    assert 2 <= len(marks) <= 6
    assert marks[0] == 0
    assert last - marks[-1] < marks[1]


@given(points, points)
def test_all_lies_in_the_frame_and_a_lower_loss_never_higher(
    training: list[tuple[int, float]], held_out: list[tuple[int, float]]
) -> None:
    drawn = picture(training, held_out, None)
    values = [loss for _, loss in (*training, *held_out)]
    assert (drawn is None) == (not any(values))
    if drawn is None:
        return
    places = [*drawn.training, *((x, y) for x, y, _, _ in drawn.held_out)]
    assert len(places) == len(values)
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in places)
    by_loss = sorted(zip(values, (y for _, y in places), strict=True))
    heights = [y for _, y in by_loss]
    assert heights == sorted(heights, reverse=True)


def test_by_hand(tmp_path: Path) -> None:
    entries = [
        {"step": 5, "seconds": 1.0, "loss": 1.0, "num_tokens": 9},
        {"step": 10, "seconds": 2.0, "loss": 0.1},
        {"step": 10, "seconds": 2.0, "eval_loss": 0.01},
    ]
    assert picture(*read_losses(tmp_path), None) is None, "there is no log"
    (tmp_path / "log.jsonl").write_text("\n".join(map(dump, entries)), "utf-8")
    drawn = picture(*read_losses(tmp_path), 10)
    assert drawn
    middle = (LEFT + RIGHT) / 2
    assert drawn.training == [(middle, TOP), (RIGHT, (TOP + BOTTOM) / 2)]
    assert drawn.held_out == [(RIGHT, BOTTOM, 10, 0.01)]
    assert drawn.kept == RIGHT
    assert [step for _, step in drawn.steps] == [0, 2, 4, 6, 8, 10]
    assert [loss for _, loss in drawn.losses] == pytest.approx(
        [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    )
