"""What a person sees of a run while it trains, and what stays on disk: log.jsonl."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from panjue.prompts.plumbing.files import atomic_write, dump, read_lines, stream
from panjue.prompts.plumbing.progress import Meter, meter

UNSHOWN = ("_runtime", "_per_second", "_num_tokens", "_precision", "_recall")
"""Endings of what is logged at an evaluation and not shown."""


class Journal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Shows progress with tokens/s and time left, appends every log entry to `log.jsonl`.

    Only the first process writes.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        """Write into `folder`, show on `console`."""
        self._folder, self._console = folder, console
        self._open = ExitStack()
        self._meter: Meter | None = None
        self._text = ""
        self._before = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the meter; forget what was logged behind the checkpoint that is gone on from."""
        if state.is_world_process_zero:
            self._forget_after(state.global_step)
            shown = meter(self._console, state.max_steps, state.global_step)
            self._meter = self._open.enter_context(shown)
            self._before = state.num_input_tokens_seen  # what the meter did not see

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Move the meter."""
        if self._meter:
            self._meter.to(state.global_step, self._text)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Append the entry to `log.jsonl`; its loss and speed now stand beside the meter."""
        if not self._meter or not logs:
            return
        entry = {"step": state.global_step, "seconds": round(self._meter.seconds, 1), **logs}
        with stream(self._folder / "log.jsonl") as out:
            out.write(dump(entry) + "\n")
        if "eval_loss" in logs:
            self._show_held_out(state.global_step, logs)
        elif "loss" in logs:
            rate = (state.num_input_tokens_seen - self._before) / self._meter.seconds
            self._text = f"loss {float(logs['loss']):.4f}  {rate:,.0f} tokens/s"

    def _forget_after(self, step: int) -> None:
        path = self._folder / "log.jsonl"
        if path.exists():
            with stream(path):
                pass  # opening it drops a torn last line
            kept = [row for _, row in read_lines(path) if row["step"] <= step]
            with atomic_write(path) as out:
                out.writelines(dump(row) + "\n" for row in kept)

    def _show_held_out(self, step: int, logs: Mapping[str, Any]) -> None:
        """Print one line with the held-out loss and what else was measured beside it."""
        shown = {
            name.removeprefix("eval_").replace("_", " "): value
            for name, value in logs.items()
            if name.startswith("eval_") and not name.endswith(UNSHOWN)
        }
        text = ", ".join(f"{name} {float(value):.4f}" for name, value in shown.items())
        self._console.print(f"step {step}: held out: {text}", highlight=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop the meter."""
        self._open.close()
