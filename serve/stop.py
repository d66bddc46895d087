"""SIGTERM or Ctrl-C during generation: keep the finished rows and say how to resume."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, Self

from panjue.prompts.plumbing.errors import Stopped

LATE_S = 1.0
"""When the block fails, a signal is awaited for so long: the engine may get it before we do."""


class StopSignals:
    """Within the block, SIGTERM and Ctrl-C end it with a message on how to resume."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of the answers, which the message names."""
        self._completions = folder / "completions.jsonl"
        self._received = 0
        self._cancel: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._old_handlers = {number: signal.signal(number, self._receive) for number in numbers}
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
        if failed:
            self._check()

    async def until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, which a signal cancels: a running vLLM does not survive an exception.

        Raises:
            Stopped: There was a signal.
        """
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            self._check()
            raise
        finally:
            self._cancel = int  # the shutdown is not disturbed either

    def _receive(self, number: int, _: FrameType | None) -> None:
        for handled in self._old_handlers:
            signal.signal(handled, signal.SIG_IGN)  # a second signal must not disturb the shutdown
        self._received = number
        if self._cancel:
            self._cancel()
        else:
            self._check()

    def _check(self) -> None:
        """Raise `Stopped` if there was a signal."""
        if self._received:
            rows = f"{self._completions} has the finished rows"
            kept = rows if self._completions.exists() else "no row was finished"
            raise Stopped(
                f"stopped; {kept}, run the same command to resume", self._received
            ) from None
