"""One way to show how far a long job is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


class Meter:
    """Counts towards `total`; made by `meter`."""

    def __init__(self, console: Console, total: int, start: int) -> None:
        """Begin at `start`."""
        self.total, self.done, self._start = total, start, start
        self._console, self._began, self._last_line = console, time.monotonic(), time.monotonic()
        self.bar: Progress | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the meter began."""
        return max(time.monotonic() - self._began, 1e-3)

    @property
    def rate(self) -> float:
        """Items a second, those done before it began left out."""
        return (self.done - self._start) / self.seconds

    def to(self, done: int, text: str) -> None:
        """Show that `done` items are finished, with `text` beside."""
        self.done = done
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done, description=text)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S or done == self.total:
            self._last_line = time.monotonic()
            left = (self.total - done) / self.rate / 60 if self.rate else 0.0
            self._console.print(
                f"{done}/{self.total}  {text}  {left:.1f} min left", highlight=False
            )


@contextmanager
def meter(console: Console, total: int, start: int = 0) -> Iterator[Meter]:
    """Show progress from `start` to `total` while the block runs."""
    shown = Meter(console, total, start)
    if not console.is_terminal or console.quiet:
        yield shown
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        bar.add_task("", total=total, completed=start)
        shown.bar = bar
        yield shown
