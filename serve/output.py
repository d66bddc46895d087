"""`completions.jsonl`: its earlier rows, its new rows, and how a signal ends the writing."""

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self, TypeVar

from rich.console import Console

from panjue.prompts.example import (
    Decoded,
    Example,
    call_key,
    first_reply,
    has_failed,
    run_steps,
)
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import Stopped
from panjue.prompts.plumbing.files import dump, located, stream
from panjue.prompts.plumbing.progress import Meter
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.signals import stopping_signals
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.serve.ask import CompletionRow

T = TypeVar("T")

LATE_SIGNAL_S = 1.0  # time to wait for a signal when the block fails


class EarlierRows:
    """The rows of an earlier run. Some calls of an example may have rows, others none.

    A call on which the engine failed counts as having no row, and so do the calls after it: they
    are asked again.
    """

    def __init__(self, path: Path) -> None:
        with stream(path):
            pass  # opening it drops an incomplete last line
        # A key, of `call_key`, identifies a call: "7", or "7 2" if the example has several calls.
        self._failed: set[str] = set()  # keys of the calls on which the engine failed
        self._calls: dict[str, dict[int, str]] = defaultdict(dict)
        """Id of an example with several calls -> number of a call -> key: {"7": {2: "7 2"}}."""
        self._rows = Rows(path, key=self._note_row, last_counts=True)  # notes each row, in order

    def _note_row(self, row: Mapping[str, Any]) -> str:
        """Note the call of a row, and whether the engine failed on it; return its key for `Rows`.

        Of several rows of a call, the last one counts.
        """
        key = call_key(row)
        if "call" in row:  # only examples that take several calls number them
            self._calls[str(row["id"])][row["call"]] = key
        self._failed.discard(key)
        if has_failed(row):
            self._failed.add(key)
        return key

    def of(self, example: Example) -> dict[str, CompletionRow]:
        """Return key of a call -> its row, for an example that takes several calls.

        The calls end before the first one on which the engine failed.
        """
        rows = {}
        for _, key in sorted(self._calls.get(str(example.id), {}).items()):
            if key in self._failed:
                break  # later calls may depend on its reply
            row = self._rows.get(key)
            if row:
                rows[key] = row
        return rows

    def answered(self, reader: Reader, file: Path, labels: Labels) -> set[str]:
        """Return the ids of the examples whose calls all have rows."""
        if reader.task.solve is None:
            return self._rows.ids() - self._failed
        examples = reader.read(file)
        return {str(one.id) for one in examples if self._is_answered(reader.task, one, labels)}

    def _is_answered(self, task: Task, example: Example, labels: Labels) -> bool:
        """Say whether there are enough rows to compute an example's answer."""
        rows = self.of(example)

        def reply(call: int, question: Example) -> Decoded:
            row = rows.get(call_key({"id": example.id, "call": call}))
            if row is None:
                raise MissingRow
            return task.ask.decode(first_reply(row), question, labels)

        try:
            with located(str(self._rows.path)):
                run_steps(task.solving(example), reply)
        except MissingRow:
            return False
        return True


class MissingRow(Exception):
    """Raised if a call has no row yet."""


@dataclass
class Output:
    """Appends rows to an open file. Shows how many examples are answered, and how fast."""

    file: IO[str]
    progress: Meter
    note: Callable[[], str]  # what else is shown
    tokens: int = 0

    def write(self, row: CompletionRow) -> None:
        """Append a row; it then survives `kill -9`."""
        self.file.write(dump(row) + "\n")
        self.file.flush()
        self.tokens += row.get("completion_tokens", 0)
        self._show(self.progress.done)

    def solved(self) -> None:
        """Count an example whose rows are all written."""
        self._show(self.progress.done + 1)

    def _show(self, done: int) -> None:
        tokens = self.tokens / self.progress.seconds
        speed = f"{self.progress.rate:.2f} cases/s, {tokens:,.0f} tokens/s"
        self.progress.to(done, ", ".join(filter(None, (speed, self.note()))))


@contextmanager
def starting(console: Console, what: str) -> Iterator[None]:
    """Print that `what` is starting while the block runs, then how long it took."""
    began = time.monotonic()
    console.print(f"starting {what}, which takes a minute or more", highlight=False)
    yield
    name, _, _details = what.partition(",")
    console.print(f"{name} is ready after {time.monotonic() - began:.0f} s")


class StopSignals:
    """Ends the block at SIGTERM, Ctrl-C and the like, with a message on how to resume."""

    folder: Path | None = None  # of the answers that are being made; the message names it

    def __init__(self) -> None:
        self._received = 0  # number of the signal; 0 if none came
        self._cancel: Callable[[], object] | None = None  # what a signal calls; None if it raises
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in stopping_signals():
            self._old_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the handlers. Raise Stopped if a signal has come, also in place of an error."""
        failed = kind is not None and issubclass(kind, Exception)
        try:
            if failed and not self._received:
                # A Ctrl-C that ended the engine first may have caused the error. Its signal comes
                # within this time, and Stopped replaces the error.
                time.sleep(LATE_SIGNAL_S)
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        if failed or kind is None:  # else Stopped, Ctrl-C or an exit already ends the block
            self._check()

    async def until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. A signal cancels it; then Stopped is raised.

        The signal handler does not raise, because a running vLLM does not survive an exception.
        """
        self._check()
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            self._check()
            raise
        finally:
            self._cancel = lambda: None  # nor must it disturb the shutdown

    def _receive(self, number: int, _: FrameType | None) -> None:
        """Cancel the work of `until_stopped`, or raise Stopped if there is none."""
        for handled in self._old_handlers:
            signal.signal(handled, signal.SIG_IGN)  # a second signal must not disturb the shutdown
        self._received = number
        if self._cancel:
            self._cancel()
        else:
            self._check()

    def _check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self._received:
            kept = "no row was finished"
            if self.folder and (completions := self.folder / "completions.jsonl").exists():
                kept = f"{completions} has the finished rows"
            raise Stopped(
                f"stopped; {kept}, run the same command to resume", self._received
            ) from None
