"""SIGTERM or Ctrl-C while training: the step at hand is finished and saved, then all stops."""

import os
import signal
import time
from types import FrameType
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from panjue.prompts.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)

TWICE_S = 2.0
"""Within this time a signal is the first once more: `make` and launchers pass on what all got."""


class StopOnSignal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Saves a checkpoint and ends the training at the first signal; a second one ends it at once.

    Attributes:
        received: The signal, once there was one.
    """

    def __init__(self) -> None:
        """Listen from the first step on."""
        self.received: int | None = None
        self._saved, self._since = -1, 0.0
        self._before: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the signals."""
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._since > TWICE_S:
                self._release()
                signal.raise_signal(number)
            return
        self.received, self._since = number, time.monotonic()
        # It may take minutes; `print` may be at work where the signal came.
        os.write(2, b"stopping: this step is finished and saved; a second signal ends it at once\n")

    def _release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask the trainer to save and stop, in all processes at the same step."""
        if PartialState().num_processes > 1:
            self.received = max(gather_object([self.received or 0])) or None
        if self.received:
            control.should_training_stop = True
            # The end of an epoch saves for itself, with the score that belongs to it.
            ends = args.save_strategy == "epoch" and state.epoch is not None and not state.epoch % 1
            control.should_save = not ends

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Keep the trainer from taking a stop for the end of an epoch, which scores and saves."""
        if self.received and state.epoch is not None and state.epoch % 1:
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
        if self.received and state.global_step < state.max_steps:
            # With `save_strategy: best` a step that is no better is not.
            saved = "which" if self._saved == state.global_step else "the last checkpoint before"
            raise Stopped(
                f"stopped at step {state.global_step} of {state.max_steps}, {saved} is saved; "
                "the same command goes on from there",
                self.received,
            )
