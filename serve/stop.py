"""SIGTERM or Ctrl-C while generating: what is answered stays, and a word says how to go on."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Self

from panjue.prompts.plumbing.errors import Stopped

LATE_S = 1.0
"""How much later than its engine this process may get a signal that is sent to both: so long is
waited for one when the block fails."""


class StopSignals:
    """While the block runs, SIGTERM and Ctrl-C end it with a word on how to go on.

    Attributes:
        at_once: Whether a signal ends the block where it is; else `check` does. vLLM survives the
            first while it starts, and not while it works.
    """

    def __init__(self, run: Path) -> None:
        """Say of `run` that it can be gone on with."""
        self._word = (
            f"stopped; {run / 'completions.jsonl'} has what is answered, "
            "the same command goes on from there"
        )
        self._received, self.at_once = 0, True

    def __enter__(self) -> Self:
        """Take the signals."""
        both = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._receive) for number in both}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the signals back; an engine that a Ctrl-C reached too has failed for that reason."""
        failed = kind is not None and issubclass(kind, Exception)
        try:
            if failed and not self._received:
                time.sleep(LATE_S)
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        if failed:
            self.check()

    def _receive(self, number: int, _: FrameType | None) -> None:
        for one in self._before:
            signal.signal(one, signal.SIG_IGN)  # a second one must not break the engine's end
        self._received = number
        if self.at_once:
            self.check()

    def check(self) -> None:
        """End the block if there was a signal."""
        if self._received:
            raise Stopped(self._word, self._received) from None
