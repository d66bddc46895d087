"""`completions.jsonl`: the rows that are there, those that come, and how a signal ends it."""

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from rich.console import Console

from panjue.prompts.example import Decoded, Example, call_key, first_reply, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import Stopped
from panjue.prompts.plumbing.files import dump, stream
from panjue.prompts.plumbing.progress import Meter, meter
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.serve.ask import CompletionRow

LATE_S = 1.0  # when the block fails, a signal may still come: the engine may get it before we do


@dataclass
class Rest:
    """The examples of a run that have no answer yet."""

    examples: Iterator[Example]
    rows: Rows | None  # of an earlier run; some calls of an example may have rows already
    done: int  # examples that have their answer
    total: int

    def find_row(self, key: str) -> CompletionRow | None:
        return self.rows.get(key) if self.rows else None

    def rows_of(self, example: Example) -> dict[str, CompletionRow]:
        """Return all rows of an example from an earlier run, by the key of their call."""
        rows = {}
        for key in self._keys.get(str(example.id), ()):
            row = self.find_row(key)
            if row:
                rows[key] = row
        return rows

    @cached_property
    def _keys(self) -> dict[str, list[str]]:
        """Id -> keys, for tasks of several calls."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key in self.rows.ids() if self.rows else ():
            if " " in key:
                keys[key.rpartition(" ")[0]].append(key)
        return keys


def load_rows(path: Path) -> Rows | None:
    """Return the rows of an earlier run, without an incomplete last line; None if there is none."""
    if not path.exists():
        return None
    with stream(path):
        pass  # opening it drops an incomplete last line
    return Rows(path, key=call_key)


def answered_ids(reader: Reader, test: Path, labels: Labels, rows: Rows) -> set[str]:
    """Return the ids of the examples whose calls all have rows."""
    task = reader.task
    if task.solve is None:
        return rows.ids()
    answered = [e.id for e in reader.read(test) if is_answered(task, e, labels, rows)]
    return set(map(str, answered))


class MissingRow(Exception):
    """A call has no row yet."""


def is_answered(task: Task, example: Example, labels: Labels, rows: Rows) -> bool:
    """Say whether the rows are enough to compute an example's answer."""

    def reply(call: int, question: Example) -> Decoded:
        row = rows.get(call_key({"id": example.id, "call": call}))
        if row is None:
            raise MissingRow
        return task.ask.decode(first_reply(row), question, labels)

    try:
        run_steps(task.solving(example), reply)
    except MissingRow:
        return False
    return True


@dataclass
class Output:
    """Appends rows to an open file, and shows how many examples are answered and how fast."""

    file: IO[str]
    progress: Meter
    note: Callable[[], str] = str  # what else is shown
    calls: int = 0
    tokens: int = 0
    has_several: bool = False  # calls of an example

    def write(self, row: CompletionRow) -> None:
        """Append a row, which then survives `kill -9`."""
        self.file.write(dump(row) + "\n")
        self.file.flush()
        self.calls += 1
        self.tokens += row.get("completion_tokens", 0)
        self.has_several = self.has_several or "call" in row
        if self.progress.done < self.progress.total:
            self._show(self.progress.done)

    def solved(self) -> None:
        self._show(self.progress.done + 1)

    def summary(self) -> str:
        """Return the speed, and the number of calls if examples take several."""
        calls = f"{self.calls} calls" if self.has_several else ""
        speed = f"{self.tokens / self.progress.seconds:,.0f} tokens/s"
        return ", ".join(filter(None, (speed, calls, self.note())))

    def _show(self, done: int) -> None:
        self.progress.to(done, f"{self.progress.rate:.2f} cases/s, {self.summary()}")


@contextmanager
def output(folder: Path, done: int, total: int, console: Console) -> Iterator[Output]:
    """Open the file for the block; `done` of `total` examples have been answered before."""
    with stream(folder / "completions.jsonl") as file, meter(console, total, done) as progress:
        yield Output(file, progress)


@contextmanager
def starting(console: Console, what: str) -> Iterator[None]:
    """Say that `what` is starting while the block runs, and how long it took."""
    began = time.monotonic()
    console.print(f"starting {what}, which takes a minute or more", highlight=False)
    yield
    console.print(f"{what.partition(',')[0]} is ready after {time.monotonic() - began:.0f} s")


class StopSignals:
    """Within the block, SIGTERM and Ctrl-C end it with a message on how to resume."""

    folder: Path | None = None
    """Of the answers that are being made, which the message names."""

    def __init__(self) -> None:
        self._received = 0  # number of the signal; 0: none came
        self._cancel: Callable[[], object] | None = None  # a signal calls it; None: it raises
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the handlers; if a Ctrl-C also killed the engine, report the signal instead."""
        failed = kind is not None and issubclass(kind, Exception)
        try:
            if failed and not self._received:
                time.sleep(LATE_S)
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        if failed or kind is None:
            self._check()

    async def until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`; a signal cancels it, then Stopped is raised.

        A signal handler may not raise here: a running vLLM does not survive an exception.
        """
        self._check()
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            self._check()
            raise
        finally:
            self._cancel = lambda: None  # the shutdown is not disturbed either

    def _receive(self, number: int, _: FrameType | None) -> None:
        for handled in self._old_handlers:
            signal.signal(handled, signal.SIG_IGN)  # a second signal must not disturb the shutdown
        self._received = number
        if self._cancel:
            self._cancel()
        else:
            self._check()

    def _check(self) -> None:
        if self._received:
            kept = "no row was finished"
            if self.folder and (completions := self.folder / "completions.jsonl").exists():
                kept = f"{completions} has the finished rows"
            raise Stopped(
                f"stopped; {kept}, run the same command to resume", self._received
            ) from None
