"""What a long job shows where there is no terminal."""

import io
import time

import pytest
from rich.console import Console

from panjue.prompts.plumbing.progress import SETTLED_ITEMS, Meter, duration


@pytest.mark.parametrize(
    ("items", "line"),
    [
        (SETTLED_ITEMS - 1, f"{SETTLED_ITEMS - 1}/200  loss 1"),
        (SETTLED_ITEMS, f"{SETTLED_ITEMS}/200  loss 1  39.0 min left"),
    ],
)
def test_the_time_left_is_shown_once_it_has_settled(
    items: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    out = io.StringIO()
    meter = Meter(Console(file=out, width=200), total=200, start=0)
    now += 60
    meter.to(items, "loss 1")
    assert out.getvalue().strip() == line


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (45, "45 s"), (61, "1 min"), (3599, "1 h 0 min"), (7800, "2 h 10 min")],
)
def test_times_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said
