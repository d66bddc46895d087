"""SIGTERM or Ctrl-C during training: finish the step, or stop its evaluation; save; stop."""

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
        agreed: The signal that all processes stop for at the end of this step; 0 if none.
    """

    def __init__(self, console: Console) -> None:
        """Prepare; `console` shows the training."""
        self._console, self._quiet = console, console.quiet
        self.agreed = 0
        self._received, self._received_at, self._saved_step, self._process = 0, 0.0, -1, 0
        self._old_handlers: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Install the signal handlers."""
        self.listen()

    def listen(self) -> None:
        """Install the signal handlers."""
        self._process = os.getpid()
        self._old_handlers = {n: signal.signal(n, self._receive) for n in SIGNALS}

    @property
    def is_received(self) -> bool:
        """Say whether this process has received a signal."""
        return bool(self._received)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a data-loading worker, which ends with its parent
        if not self._received:
            self._received, self._received_at = number, time.monotonic()
            # Ctrl-C ends `| tee` too, and writing to its closed pipe would end this process.
            self._console.quiet = self._quiet or not self._console.file.isatty()
            if PartialState().is_local_main_process:
                # The step may take minutes. Not `print`: the signal may have interrupted one.
                with suppress(OSError):
                    os.write(2, b"stopping after this step is saved; a second signal stops now\n")
        elif time.monotonic() - self._received_at > SIGNAL_DEBOUNCE_S:
            self.release()
            signal.raise_signal(number)

    def release(self) -> None:
        """Restore the signal handlers of before."""
        self._console.quiet = self._quiet
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask the trainer to save and stop, in all processes at the same step."""
        self._agree()
        if self.agreed:
            control.should_training_stop = True
            # At the end of an epoch the trainer saves anyway, with its score.
            ends = args.save_strategy == "epoch" and state.epoch is not None and not state.epoch % 1
            control.should_save = not ends

    def _agree(self) -> None:
        self.agreed = self._received
        if PartialState().num_processes > 1:  # a signal during this call counts for the next one
            self.agreed = max(gather_object([self.agreed]))

    def check(self, step: int) -> None:
        """Stop the evaluation of `step`; all processes call this equally often.

        Raises:
            Stopped: In all processes, if one of them has received a signal.
        """
        self._agree()
        if self.agreed:
            raise Stopped(
                f"stopped while scoring step {step}; run the same command to resume", self.agreed
            )

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Prevent the scoring and saving of an epoch's end if the epoch is not complete."""
        if self.agreed and state.epoch is not None and state.epoch % 1:
            control.should_save = control.should_evaluate = control.should_log = False

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Record the step."""
        self._saved_step = state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Restore the signal handlers.

        Raises:
            Stopped: A signal came before the last step, or the evaluation of the last one.
        """
        self.release()
        if self.agreed and (state.global_step < state.max_steps or control.should_evaluate):
            # With `save_strategy: best` a step without a better score is not saved.
            is_saved = self._saved_step == state.global_step
            saved = "which is saved" if is_saved else "the last checkpoint before is saved"
            scored = " but not scored" if control.should_evaluate else ""
            raise Stopped(
                f"stopped at step {state.global_step} of {state.max_steps}, {saved}{scored}; "
                "run the same command to resume",
                self.agreed,
            )
