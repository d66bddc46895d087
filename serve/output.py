"""Rows to `completions.jsonl` as they are finished, and the progress to the terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, stream
from panjue.prompts.plumbing.progress import Meter, meter, waiting
from panjue.serve.rows import Row

MAX_FIRST_REFUSALS = 64
"""After so many refusals and no reply, the run ends: the endpoint cannot do this task."""


class Output:
    """Appends rows, and counts calls, tokens and answered examples."""

    def __init__(self, file: IO[str], progress: Meter) -> None:
        """Take the open file and the progress display."""
        self._file, self._progress = file, progress
        self._calls = self._solved = self._tokens = 0
        self._has_several = False
        self.note: Callable[[], str] = str

    def write(self, row: Row) -> None:
        """Append a row, which then survives `kill -9`."""
        self._file.write(dump(row) + "\n")
        self._file.flush()
        self._calls += 1
        self._tokens += row.get("completion_tokens", 0)
        self._has_several = self._has_several or "call" in row
        if self._progress.done < self._progress.total:
            self._show(self._progress.done)

    def solved(self) -> None:
        """Count an example that has its answer."""
        self._solved += 1
        self._show(self._progress.done + 1)

    def summary(self) -> str:
        """Return the speed, and the number of calls if examples take several."""
        calls = f"{self._calls} calls" if self._has_several else ""
        speed = f"{self._tokens / self._progress.seconds:,.0f} tokens/s"
        return ", ".join(filter(None, (speed, calls, self.note())))

    def _show(self, done: int) -> None:
        self._progress.to(done, f"{self._progress.rate:.2f} cases/s, {self.summary()}")


@contextmanager
def output(folder: Path, done: int, total: int, console: Console) -> Iterator[Output]:
    """Open the file for the block; `done` of `total` examples have been answered before."""
    with stream(folder / "completions.jsonl") as file, meter(console, total, done) as progress:
        yield Output(file, progress)


@contextmanager
def holding_refusals(write: Callable[[Row], None], name: str) -> Iterator[Callable[[Row], None]]:
    """Yield a function that writes rows, but holds refused ones back until there is a reply."""
    held: list[Row] = []
    has_replied = False

    def check(most: int) -> None:
        if len(held) >= most:
            raise UserError(
                f"{name}: refuses all requests ({held[0]['refused']}); "
                "if it takes no schema, set constrained=false"
            )

    def write_or_hold(row: Row) -> None:
        nonlocal has_replied
        has_replied = has_replied or "refused" not in row
        held.append(row)
        if has_replied:
            for each in held:
                write(each)
            held.clear()
        check(MAX_FIRST_REFUSALS)

    yield write_or_hold
    check(1)


@contextmanager
def starting(console: Console, what: str, more: Callable[[], str] = str) -> Iterator[None]:
    """Say that `what` is starting while the block runs, and how long it took."""
    began = time.monotonic()
    with waiting(console, f"starting {what}", more):
        yield
    console.print(f"{what} is ready after {time.monotonic() - began:.0f} s")
