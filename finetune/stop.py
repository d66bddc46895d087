"""On a signal such as SIGTERM or Ctrl-C, finish the step of the training, save it, and stop.

`agreed` is the number of the signal for which all processes stop, 0 if none came. transformers ends
a stopped epoch as it ends a whole one: it calls `on_epoch_end`, then evaluates and saves if asked.
"""

import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState

from panjue.prompts.plumbing.errors import SIGNAL_DEBOUNCE_S, Stopped
from panjue.prompts.plumbing.signals import stopping_signals


class StopOnSignal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Saves a checkpoint and ends the training at the first signal. A second one ends it at once.

    If the step is evaluated, the evaluation comes before the checkpoint.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._quiet = console.quiet
        self.agreed = 0  # the signal for which all processes stop at the end of this step
        self._received = 0  # the first signal that this process got
        self._received_at = 0.0
        self._process = 0  # id of the process that trains
        self._old_handlers: dict[int, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Take over the handlers of stopping signals; data-loading workers will inherit them."""
        self._process = os.getpid()
        self._old_handlers = {n: signal.signal(n, self._receive) for n in stopping_signals()}

    def _receive(self, number: int, _: FrameType | None) -> None:
        """Handle a signal: note the first one, and let a second one end the process."""
        if os.getpid() != self._process:
            return  # a data-loading worker, which ends with its parent
        if not self._received:
            self._received = number
            self._received_at = time.monotonic()
            # Ctrl-C also ends `| tee`, and the terminal may be closed. Writing there would end this
            # process before it has saved.
            self._console.quiet = self._quiet or not self._console.file.isatty()
            if PartialState().is_local_main_process:
                # The step may take minutes. Not `print`: the signal may have interrupted one.
                with suppress(OSError):
                    os.write(2, b"stopping after this step is saved; a second signal stops now\n")
        # A second signal ends the process at once, unless it is a copy of the first.
        elif time.monotonic() - self._received_at > SIGNAL_DEBOUNCE_S:
            self._restore_handlers()
            signal.raise_signal(number)

    def _restore_handlers(self) -> None:
        """Undo what `on_train_begin` and `_receive` changed: the handlers, and the console."""
        self._console.quiet = self._quiet
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def on_step_end(self, _: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        """Ask the trainer to save and stop, in all processes at the same step."""
        self.agreed = self._received
        if PartialState().num_processes > 1:  # a signal during this call counts for the next step
            self.agreed = max(gather_object([self.agreed]))
        if self.agreed:
            control.should_training_stop = True
            # The last step of an epoch is saved later, after the evaluation of the epoch.
            control.should_save = not _ends_epoch(state)

    def on_epoch_end(self, _: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        """Save a whole epoch after its evaluation.

        If a signal has stopped the epoch before its end, its last step is saved already. It is not
        saved again, and neither evaluated nor logged as a whole epoch.
        """
        if self.agreed:
            control.should_save = _ends_epoch(state)
            if not _ends_epoch(state):
                control.should_evaluate = control.should_log = False

    def on_train_end(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Restore the signal handlers; raise `Stopped` if a signal came before the end."""
        self._restore_handlers()
        if self.agreed and state.global_step < state.max_steps:
            raise Stopped(
                f"stopped at step {state.global_step} of {state.max_steps}, which is saved; "
                "run the same command to resume",
                self.agreed,
            )


def _ends_epoch(state: TrainerState) -> bool:
    """Say whether the step just done ends an epoch. The last step of a training always does."""
    is_last = state.global_step >= state.max_steps
    return is_last or (state.epoch is not None and not state.epoch % 1)
