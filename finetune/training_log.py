"""The plan of a run and its progress, on the console and in log.jsonl."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import TrainerCallback, TrainerState

from panjue.finetune.data import IGNORED, TrainingRows
from panjue.finetune.estimate import estimate
from panjue.finetune.examples import Examples, check_files, trained_on
from panjue.finetune.memory import in_gib, moment_bytes, stored_bytes
from panjue.finetune.model import gpu_memory, lacks_kernels
from panjue.finetune.settings import SftConfig
from panjue.finetune.trained import Trained
from panjue.finetune.trainer import ReplyTrainer, step_size, steps
from panjue.prompts.gpu import unused_device
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError, printable
from panjue.prompts.plumbing.files import atomic_write, dump, read_lines, stream
from panjue.prompts.plumbing.progress import Meter, duration, meter
from panjue.prompts.plumbing.records import TrainingSummary
from panjue.prompts.plumbing.run import CONFIG
from panjue.prompts.reader import text_hash

MAX_SHOWN_EXAMPLES = 5
"""Number of refused examples, and of notes, on the console; the report file has all."""


class TrainingLog(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Shows progress with tokens/s and time left; appends each log entry to `log.jsonl`."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder = folder
        self._console = console
        self._stack = ExitStack()
        self._meter: Meter | None = None
        self._status = ""
        self._tokens_before = 0
        self._seconds_before = 0.0

    @property
    def seconds(self) -> float:
        """Return the time of the training so far, without the time of steps that a crash lost."""
        return self._seconds_before + (self._meter.seconds if self._meter else 0.0)

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Start the meter. When a run resumes, delete the log entries after the checkpoint."""
        if state.is_world_process_zero:
            self._seconds_before = self._drop_entries_after(state.global_step)
            shown = meter(self._console, state.max_steps, state.global_step)
            self._meter = self._stack.enter_context(shown)
            self._tokens_before = state.num_input_tokens_seen  # from before the resume

    def on_step_end(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        if self._meter:
            self._meter.to(state.global_step, self._status)

    def on_log(
        self, _: Any, state: TrainerState, __: Any, logs: Mapping[str, Any], **___: Any
    ) -> None:
        """Append the entry to `log.jsonl`; show its loss and speed in the meter."""
        if not state.is_world_process_zero or "train_runtime" in logs:  # the summary at the end
            return
        entry = {"step": state.global_step, "seconds": round(self.seconds, 1), **logs}
        with stream(self._folder / "log.jsonl") as out:
            out.write(dump(entry) + "\n")
        if "eval_loss" in logs:
            loss = float(logs["eval_loss"])
            self._console.print(f"step {state.global_step}: held-out loss {loss:.4f}")
        elif "loss" in logs and self._meter:
            rate = (state.num_input_tokens_seen - self._tokens_before) / self._meter.seconds
            self._status = f"loss {float(logs['loss']):.4f}  {rate:,.0f} tokens/s"

    def _drop_entries_after(self, step: int) -> float:
        """Delete the log entries of steps that are trained again; return the time of the others."""
        log = self._folder / "log.jsonl"
        if not log.exists():
            return 0.0
        with stream(log):
            pass  # opening drops an incomplete last line
        seconds = 0.0
        with atomic_write(log) as out:
            for _, entry in read_lines(log):
                if entry["step"] <= step:
                    out.write(dump(entry) + "\n")
                    seconds = float(entry["seconds"])
        return seconds

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the meter, but keep the time that it measured: the summary has it."""
        self._seconds_before = self.seconds
        self._meter = None
        self._stack.close()


def print_plan(
    console: Console,
    trainer: ReplyTrainer,
    rows: TrainingRows,
    examples: Examples,
    labels: Labels,
    *,
    with_example: bool,
) -> None:
    """Print what is trained on and how, with one example if a dry run ends here."""
    plan = [*data_plan(rows, examples), *training_plan(trainer), *doubts_of(examples, labels)]
    print_lines(console, plan)
    if with_example:
        print_example(console, trainer.train_dataset[0], trainer.processing_class)


def print_lines(console: Console, lines: Iterable[tuple[str, str]]) -> None:
    """Print (title, text) of each line, with all texts in one column."""
    for title, text in lines:
        console.print(f"{title:12s} {printable(text)}")


def print_start(
    console: Console, config: SftConfig, start: Trained, examples: Examples, new: Labels
) -> None:
    """Print from which adapter a training starts; compare its labels and cases with the new ones.

    `new` are the labels of the new cases alone. The doubt is about new held-out cases that the
    adapter may have been trained on.
    """
    summary = TrainingSummary.read(start.run) or TrainingSummary()
    step = start.step(summary)
    which = "its adapter" if step is None else f"adapter of step {step}"
    if start.chosen:
        which = str(start.chosen)  # it also says by which score `panjue choose` chose it
    settings = ""
    if config.path == start.run / CONFIG:
        settings = f"; settings as in {config.path}, but for its data"
    console.print(f"{'from':12s} {config.from_run}: {which}{settings}")
    before = distinct(start.labels)
    now = distinct(new)
    if before:
        known = f"{len(before)} of {config.from_run}, {len(before - now)} of them in no new case"
        console.print(f"{'labels':12s} {known}; {len(now - before)} new")
    if doubt := doubt_of_held_out(start, examples):
        console.print(f"{'held out':12s} {doubt}")


def doubt_of_held_out(start: Trained, examples: Examples) -> str:
    """Say how many held-out cases `start` was trained on, or why nobody knows; empty if on none."""
    task = examples.reader.task
    held_out = {text_hash(example) for example in examples.held_out}
    known = set()
    doubts = []
    for record in start.record.history:
        if record.adopted:
            doubts.append("nobody knows on which cases its adopted adapter was trained")
            continue
        try:
            check_files(record)
            known |= {text_hash(example) for example in trained_on(record, task)} & held_out
        except UserError as error:
            doubts.append(str(error))
    lines = []
    if known:
        count = f"{len(known)} of {len(held_out)} cases were trained on by {start.run}"
        lines.append(
            f"{count}: their loss is too low, which favors the model; give another dev=FILE"
        )
    if doubts:
        more = "more" if known else "cases"
        lines.append(f"may have {more} that {start.run} was trained on: {doubts[0]}")
    return "; ".join(lines)


def distinct(labels: Labels) -> set[tuple[str, str]]:
    """Return each label with the field to which it belongs."""
    return {(kind, label) for kind, counts in labels.counts.items() for label in counts}


def data_plan(rows: TrainingRows, examples: Examples) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of lines about cases and rows; one without title continues the last."""
    report = rows.report
    held_out = rows.held_report
    yield "examples", f"{len(report.tokens)} to train on, {len(held_out.tokens)} held out"
    if examples.mixed_size:
        yield "", f"{examples.mixed_size} of the training examples come from the mix file"
    if examples.dropped:
        yield "", f"{examples.dropped} cases of train are in dev too and are not trained on"
    yield "refused", f"{len(report.refused)}, and {len(held_out.refused)} held out"
    yield from first_lines([*report.refused, *held_out.refused])
    too_long = [*report.too_long, *held_out.too_long]
    if too_long:
        count = len(too_long) + len(report.tokens) + len(held_out.tokens)
        # The line has the limit that takes all examples, and a lower one that takes 99 in 100: for
        # the few longest, the limit and the memory for it may have to be much higher.
        yield "", larger_limits(too_long, most_left=count // 100)
    if report.notes:
        yield "notes", f"{len(report.notes)}; these examples are still used"
        yield from first_lines(report.notes)
    lost = sum(before - after for _, before, after in report.shortened)
    counts = f"{len(report.shortened)} ({lost:,} tokens left out)"
    yield "shortened", f"{counts}, and {len(held_out.shortened)} held out"
    low, median, high, longest = np.percentile(report.tokens, [10, 50, 90, 100]).astype(int)
    spread = f"10% {low}, 50% {median}, 90% {high}, longest {longest}"
    yield "tokens", f"{sum(report.tokens):,} in all; {spread}"


def larger_limits(needed: Sequence[int], most_left: int) -> str:
    """Return which `max_tokens` takes all refused examples, and which leaves `most_left` of them.

    `needed` has the `max_tokens` of each refused example. Limits are rounded up to multiples of 64.
    """
    limits = [math.ceil(tokens / 64) * 64 for tokens in sorted(needed, reverse=True)]
    line = f"max_tokens={limits[0]} would take all of these"
    if len(limits) > most_left and limits[most_left] < limits[0]:
        line += f", max_tokens={limits[most_left]} all but {most_left}"
    return line


def doubts_of(examples: Examples, labels: Labels) -> Iterator[tuple[str, str]]:
    """Yield (title, doubt) about the cases: labels that look equal, missing names, bad rows."""
    label_fields = examples.reader.task.answer
    alike = labels.look_alikes(map(label_fields.kind, label_fields.fields))
    for line in islice(alike, MAX_SHOWN_EXAMPLES):
        yield "labels", line
    for line in examples.reader.task.ask.doubts(labels):
        yield "labels", line
    for line in examples.names.lines():
        yield "names", line
    if examples.reader.skipped.rows:
        yield "skipped", str(examples.reader.skipped)


def first_lines(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield ("", line) for the first lines about single examples, then one that says where all are.

    The titles are empty because these lines continue the one before, which has their number.
    """
    for line in lines[:MAX_SHOWN_EXAMPLES]:
        yield "", f"id {line}"
    if len(lines) > MAX_SHOWN_EXAMPLES:
        yield "", "… all in the run's rows/*/report.json"


def training_plan(trainer: ReplyTrainer) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of lines about the model, the steps, the machine and the time."""
    args = trainer.args
    weights = list(trainer.model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = trainer.model.num_parameters()  # counts four-bit weights one by one
    yield "weights", f"{trained:,} trained of {total:,} ({trained / total:.2%})"
    if device := unused_device():
        yield "device", device
    if args.world_size > 1:
        strategy = "sharded weights (FSDP)" if trainer.is_fsdp_enabled else "DDP"
        each = f"{args.train_batch_size} × {args.gradient_accumulation_steps} examples"
        yield "processes", f"{args.world_size}, {strategy}; each has {each} of each step"
    yield "steps", f"{steps(trainer)}, each of {step_size(args)} examples or packs"
    needed = float(stored_bytes(trainer.model, args))
    what = "weights and optimizer"
    if moment_bytes(args.optim) is None:
        what = f"weights and gradients, without the state of {args.optim}"
    if trainer.is_fsdp_enabled:
        needed /= args.world_size
    memory = gpu_memory()
    has = f"; the GPU has {in_gib(memory)}" if memory else ""
    yield "memory", f"{in_gib(needed)} a device for {what}, without activations{has}"
    if trainer.is_world_process_zero() and (estimated := estimate(trainer)):
        seconds, busy_line = estimated
        yield "time", f"about {duration(seconds)}, from a step timed just now"
        if busy_line:
            yield "processor", busy_line
    if lacks_kernels(trainer.model):
        packages = "flash-linear-attention and causal-conv1d"
        yield "kernels", f"training is slow without {packages}: .ci/install python3 fast"


def print_example(console: Console, row: dict[str, Any], tokenizer: Any) -> None:
    """Print one row as the model sees it: tokens with loss, and tokens without."""
    pairs = zip(row["labels"], row["input_ids"], strict=True)
    for has_loss, run in groupby(pairs, key=lambda pair: pair[0] != IGNORED):
        title = "[loss]" if has_loss else "[no loss]"
        lines = tokenizer.decode([token for _, token in run]).split("\n")
        text = "\n".join(map(printable, lines))
        console.print(title, text, markup=False, emoji=False)
