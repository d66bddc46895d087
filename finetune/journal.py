"""The progress of a run on the console and in log.jsonl."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from panjue.prompts.plumbing.files import atomic_write, dump, read_lines, stream
from panjue.prompts.plumbing.progress import LINE_EVERY_S, Meter, meter

HIDDEN_SUFFIXES = (
    *("_runtime", "_preparation_time", "_per_second"),
    *("_num_tokens", "_precision", "_recall"),
)
"""Names of evaluation values that are logged but not printed."""


class Journal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Shows progress with tokens/s and time left; appends each log entry to `log.jsonl`.

    Only the main process writes.

    Attributes:
        evaluations: Their number in the whole training, for the time left.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        """Write into `folder`, show on `console`."""
        self.evaluations = 0
        self._evaluations_s: list[float] = []
        self._batches, self._last_line = 0, time.monotonic()
        self._step_ended = time.monotonic()
        self._folder, self._console = folder, console
        self._stack = ExitStack()
        self._meter: Meter | None = None
        self._status = ""
        self._tokens_before = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the meter; when resuming, delete log entries after the checkpoint."""
        if state.is_world_process_zero:
            self._delete_entries_after(state.global_step)
            shown = meter(self._console, state.max_steps, state.global_step)
            self._meter = self._stack.enter_context(shown)
            self._tokens_before = state.num_input_tokens_seen  # from before the resume
            self._step_ended = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Update the meter."""
        self._step_ended = time.monotonic()
        if self._meter:
            self._count_evaluations(self._meter, state)
            self._meter.to(state.global_step, self._status)

    def _count_evaluations(self, shown: Meter, state: TrainerState) -> None:
        """Add the evaluations to come to the time left."""
        left = self.evaluations - sum("eval_loss" in entry for entry in state.log_history)
        times = self._evaluations_s
        shown.pauses_s = sum(times)
        shown.pauses_left_s = max(left, 0) * sum(times) / len(times) if times else 0.0
        plural = "s" if left > 1 else ""
        shown.unmeasured = f" and {left} evaluation{plural}" if left > 0 and not times else ""

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Show how far the held-out loss is, with a line now and then."""
        self._batches += 1
        if time.monotonic() - max(self._last_line, self._step_ended) >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            done = f"{self._batches} of {len(eval_dataloader)} batches"
            self._console.print(f"held-out loss: {done}", highlight=False)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note how long the evaluation took."""
        self._batches = 0
        if self._meter:  # otherwise it is one that a signal had stopped: see `finish_evaluation`
            self._evaluations_s.append(time.monotonic() - self._step_ended)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Append the entry to `log.jsonl`; show its loss and speed in the meter."""
        if not state.is_world_process_zero or not logs:
            return
        seconds = round(self._meter.seconds, 1) if self._meter else 0.0
        entry = {"step": state.global_step, "seconds": seconds, **logs}
        with stream(self._folder / "log.jsonl") as out:
            out.write(dump(entry) + "\n")
        if "eval_loss" in logs:
            self._show_held_out(state.global_step, logs)
        elif "loss" in logs and self._meter:
            rate = (state.num_input_tokens_seen - self._tokens_before) / self._meter.busy_s
            self._status = f"loss {float(logs['loss']):.4f}  {rate:,.0f} tokens/s"

    def _delete_entries_after(self, step: int) -> None:
        path = self._folder / "log.jsonl"
        if path.exists():
            with stream(path):
                pass  # opening drops an incomplete last line
            kept = [row for _, row in read_lines(path) if row["step"] <= step]
            with atomic_write(path) as out:
                out.writelines(dump(row) + "\n" for row in kept)

    def _show_held_out(self, step: int, logs: Mapping[str, Any]) -> None:
        """Print one line with the held-out loss and metrics."""
        shown = {
            name.removeprefix("eval_").replace("_", " "): value
            for name, value in logs.items()
            if name.startswith("eval_") and not name.endswith(HIDDEN_SUFFIXES)
        }
        text = ", ".join(f"{name} {float(value):.4f}" for name, value in shown.items())
        self._console.print(f"step {step}: held out: {text}", highlight=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop the meter."""
        self._stack.close()
