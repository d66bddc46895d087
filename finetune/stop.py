"""SIGTERM or Ctrl-C while training: the step at hand is finished and saved, then all stops."""

import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from panjue.prompts.plumbing.errors import SIGNAL_DEBOUNCE_S, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Saves a checkpoint and ends the training at the first signal; a second one ends it at once.

    Attributes:
        agreed: The signal, once all processes know of it at the end of the same step.
    """

    def __init__(self, console: Console) -> None:
        """Listen from the first step on; `console` shows the training."""
        self._console, self._quiet = console, console.quiet
        self.agreed = 0
        self._received, self._since, self._saved, self._process = 0, 0.0, -1, 0
        self._before: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the signals."""
        self._process = os.getpid()
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def _receive(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a worker that loads data: it ends with us
        if not self._received:
            self._received, self._since = number, time.monotonic()
            # A Ctrl-C ends `| tee` too, and a line that nobody reads any more would end us.
            self._console.quiet = self._quiet or not self._console.file.isatty()
            if PartialState().is_local_main_process:
                # It may take minutes; `print` may be at work where the signal came.
                word = "stopping: this step is finished and saved; a second signal ends it at once"
                with suppress(OSError):
                    os.write(2, f"{word}\n".encode())
        elif time.monotonic() - self._since > SIGNAL_DEBOUNCE_S:
            self._release()
            signal.raise_signal(number)

    def _release(self) -> None:
        self._console.quiet = self._quiet
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask the trainer to save and stop, in all processes at the same step."""
        self.agreed = self._received
        if PartialState().num_processes > 1:  # what comes while they gather is for the next step
            self.agreed = max(gather_object([self.agreed]))
        if self.agreed:
            control.should_training_stop = True
            # The end of an epoch saves for itself, with the score that belongs to it.
            ends = args.save_strategy == "epoch" and state.epoch is not None and not state.epoch % 1
            control.should_save = not ends

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Keep the trainer from taking a stop for the end of an epoch, which scores and saves."""
        if self.agreed and state.epoch is not None and state.epoch % 1:
            control.should_save = control.should_evaluate = control.should_log = False

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note the step."""
        self._saved = state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Give the signals back.

        Raises:
            Stopped: One came before the last step.
        """
        self._release()
        if self.agreed and state.global_step < state.max_steps:
            # With `save_strategy: best` a step that is no better is not.
            saved = "which" if self._saved == state.global_step else "the last checkpoint before"
            raise Stopped(
                f"stopped at step {state.global_step} of {state.max_steps}, {saved} is saved; "
                "the same command goes on from there",
                self.agreed,
            )
