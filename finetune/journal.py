"""The progress of a run on the console and in log.jsonl."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from panjue.prompts.plumbing.files import atomic_write, dump, read_lines, stream
from panjue.prompts.plumbing.progress import Meter, meter

HIDDEN_SUFFIXES = ("_runtime", "_per_second", "_num_tokens", "_precision", "_recall")
"""Names of evaluation values that are logged but not printed."""


class Journal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Shows progress with tokens/s and time left; appends each log entry to `log.jsonl`.

    Only the main process writes.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        """Write into `folder`, show on `console`."""
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

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Update the meter."""
        if self._meter:
            self._meter.to(state.global_step, self._status)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Append the entry to `log.jsonl`; show its loss and speed in the meter."""
        if not self._meter or not logs:
            return
        entry = {"step": state.global_step, "seconds": round(self._meter.seconds, 1), **logs}
        with stream(self._folder / "log.jsonl") as out:
            out.write(dump(entry) + "\n")
        if "eval_loss" in logs:
            self._show_held_out(state.global_step, logs)
        elif "loss" in logs:
            rate = (state.num_input_tokens_seen - self._tokens_before) / self._meter.seconds
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
