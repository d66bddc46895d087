"""SIGTERM or Ctrl-C during generation: keep the finished rows and say how to resume."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Self

from panjue.prompts.plumbing.errors import Stopped

LATE_S = 1.0
"""When the block fails, a signal is awaited for so long: the engine may get it before we do."""


class StopSignals:
    """Within the block, SIGTERM and Ctrl-C end it with a message on how to resume.

    Attributes:
        at_once: Whether a signal raises immediately; otherwise `check` raises. Set it only while
            vLLM starts: a running vLLM does not survive an exception at an arbitrary point.
    """

    def __init__(self, folder: Path) -> None:
        """Take the folder of the answers, which the message names."""
        self._completions = folder / "completions.jsonl"
        self._received, self.at_once = 0, True

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
            self.check()

    def _receive(self, number: int, _: FrameType | None) -> None:
        for handled in self._old_handlers:
            signal.signal(handled, signal.SIG_IGN)  # a second signal must not disturb the shutdown
        self._received = number
        if self.at_once:
            self.check()

    def check(self) -> None:
        """Raise `Stopped` if there was a signal."""
        if self._received:
            rows = f"{self._completions} has the finished rows"
            kept = rows if self._completions.exists() else "no row was finished"
            raise Stopped(
                f"stopped; {kept}, run the same command to resume", self._received
            ) from None
