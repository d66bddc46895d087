"""Show the progress of a long job: a bar on a terminal, otherwise a line every ten seconds."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINE_EVERY_S = 10.0

MANY = 10_000
"""Least number of items for which `counted` shows progress."""

T = TypeVar("T")

SETTLED_ITEMS = 5
"""Number of items after which the time left is shown, since the first ones of a run are slow."""


class Meter:
    """Counts up to `total` and shows the count. `start` of the items were done before."""

    def __init__(self, console: Console, total: int, start: int) -> None:
        self.total = total
        self.done = start
        self._start = start
        self._console = console
        self._start_time = self._last_line = time.monotonic()
        self.bar: Progress | None = None

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start_time, 1e-3)

    @property
    def rate(self) -> float:
        """Return how many items were done per second."""
        return (self.done - self._start) / self.seconds

    def to(self, done: int, text: str) -> None:
        """Set how many items are done; show it with a text."""
        self.done = done
        if self.bar:
            text += self._time_left()
            self.bar.update(self.bar.task_ids[0], completed=done, description=text)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S or done == self.total:
            self._last_line = time.monotonic()
            self._console.print(f"{done}/{self.total}  {text}{self._time_left()}", highlight=False)

    def step(self, text: str) -> None:
        """Count one more item."""
        self.to(self.done + 1, text)

    def _time_left(self) -> str:
        """Return the time left; empty until the rate has settled."""
        if self.done - self._start < SETTLED_ITEMS:
            return ""
        return f"  {(self.total - self.done) / self.rate / 60:.1f} min left"


@contextmanager
def meter(console: Console, total: int, start: int = 0) -> Iterator[Meter]:
    """Yield a Meter, which shows a bar on a terminal while the block runs."""
    progress = Meter(console, total, start)
    if not console.is_terminal or console.quiet:
        yield progress
        return
    columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console) as bar:
        bar.add_task("", total=total, completed=start)
        progress.bar = bar
        yield progress


def duration(seconds: float) -> str:
    """Return a readable time: 45 s, 12 min, 2 h 10 min."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def counted(items: Iterable[T], total: int) -> Iterator[T]:
    """Yield the items, mostly cases; if there are many, show how many of about `total` are done.

    The count is shown after every 256 items, since showing it takes time; so up to 255 last items
    are not shown. There may be more items than `total`.
    """
    if total < MANY:
        yield from items
        return
    with meter(Console(soft_wrap=True), total) as progress:
        for done, item in enumerate(items, start=1):
            yield item
            if done % 256 == 0:
                progress.total = max(total, done)
                progress.to(done, f"{progress.rate:,.0f} cases/s")
