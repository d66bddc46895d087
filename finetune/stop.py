"""SIGTERM or Ctrl-C while training: the step at hand is finished and saved, then all stops."""

import signal
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from panjue.prompts.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Saves a checkpoint and ends the training at the first signal; a second one ends it at once.

    Attributes:
        received: The signal, once there was one.
    """

    def __init__(self) -> None:
        """Listen from the first step on."""
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the signals."""
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self._release()

    def _release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask the trainer to save and stop."""
        if self.received:
            control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Give the signals back.

        Raises:
            Stopped: One came before the last step.
        """
        self._release()
        if self.received and state.global_step < state.max_steps:
            raise Stopped(
                f"stopped at step {state.global_step} of {state.max_steps}, which is saved; "
                "the same command goes on from there",
                self.received,
            )
