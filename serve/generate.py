"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from panjue.prompts.example import Decoded, Example, Solve, call_key, first_reply, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    dump,
    stream,
)
from panjue.prompts.plumbing.lock import exclusive_lock
from panjue.prompts.plumbing.model import has_classifier
from panjue.prompts.plumbing.progress import meter, waiting
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, configured, load_task
from panjue.serve.alternatives import ALTERNATIVES
from panjue.serve.ask import Asker
from panjue.serve.endpoint import Endpoint, PlainAsker
from panjue.serve.engine import Engine, check_engine, check_sampling, engine
from panjue.serve.record import Training, check_held_out, claim, find_training, provenance
from panjue.serve.rows import Calls, rows
from panjue.serve.settings import (
    GenerateConfig,
    generate_settings,
)
from panjue.serve.source import Sampling
from panjue.serve.stop import StopSignals
from panjue.serve.trained import served_model


def main(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Generate with the config at `path`, resuming if possible; return the answers' folder."""
    return generate(generate_settings(path, overrides))


def generate(config: GenerateConfig) -> Path:
    """Write one row per example of `config.test` to `completions.jsonl`; return its folder.

    A row has the raw replies (`texts`: the first one uses `sampling`, then come the `samples`), why
    each ended (`finish`), its `alternatives`, token counts and how many sentences `fit` left out;
    greedy rows list their `near_ties`. An example that cannot be asked has `refused`, the reason,
    instead. If an example takes several calls, each call has a row. Existing rows are kept.

    Raises:
        UserError: A file or setting is wrong, or the folder holds rows from other settings.
    """
    console = Console(soft_wrap=True)
    task = load_task(config.task)
    check_library_settings(config, task)
    reader = Reader(task, held_out=config.held_out, on_bad_row=config.on_bad_row)
    console.print("1/3 reading the cases", highlight=False)
    examples = sum(1 for _ in reader.read(config.test))
    if not examples:
        skipped = f"; {reader.skipped}" if reader.skipped.rows else ""
        raise UserError(f"{config.test}: has no cases{skipped}")
    training = find_training(config, task)
    task = configured(task, training.solve, config.folder)
    reader = replace(reader, task=task)
    record = provenance(config, training, task)
    if config.held_out:
        check_held_out(training.folder, record["test_sha256"])
    with exclusive_lock(config.folder):
        claim(config.folder, task, record, training.labels, console)
        reader.skipped.write(config.folder / "skipped-test.jsonl")
        if reader.skipped.rows:
            console.print(str(reader.skipped), highlight=False, markup=False)
        answer(config, reader, training, examples, console)
    return config.folder


def check_library_settings(config: GenerateConfig, task: Task) -> None:
    """Refuse settings that would otherwise fail only after the engine has started.

    Raises:
        UserError: A setting is unknown, or does nothing for the task.
    """
    check_engine(config.engine)
    check_sampling(config.sampling)
    if config.samples and not task.answer.uses_samples:
        raise UserError(f"samples: {config.task!r} uses one reply per question; set samples=0")


def answer(
    config: GenerateConfig, reader: Reader, training: Training, examples: int, console: Console
) -> None:
    """Answer the examples that have no rows yet; `examples` is the count of the test file."""
    path = config.folder / "completions.jsonl"
    old_rows = load_rows(path)
    done = answered_ids(reader, config, training.labels, old_rows) if old_rows else set()
    if len(done) >= examples:
        console.print(f"{path}: all {examples} are answered already")
        return
    if old_rows:
        console.print(f"continuing: {len(done)} of {examples} are answered already")
    console.print(f"2/3 answering {examples - len(done)} cases", highlight=False)
    todo = (example for example in reader.read(config.test) if str(example.id) not in done)
    find_row = old_rows.get if old_rows else lambda _: None
    with (
        StopSignals(config.folder) as stop,
        start(config, reader.task, training, console) as (source, asker),
    ):
        stop.at_once = False
        calls = Calls(
            asker,
            todo,
            sampling_passes(config, decides=decides(config, training, reader.task)),
            find_row,
        )
        with closing(rows(source, calls, config.in_flight, stop.check)) as finished:
            append(path, finished, calls, len(done), examples)


@contextmanager
def start(
    config: GenerateConfig, task: Task, training: Training, console: Console
) -> Iterator[tuple[Engine | Endpoint, Asker | PlainAsker]]:
    """Start the engine or a client of the endpoint, and what makes its questions."""
    constrained, max_tokens = config.constrained, training.max_tokens
    asker: Asker | PlainAsker
    if training.folder is None:
        served, asker = None, PlainAsker(task, training.labels, max_tokens, constrained=constrained)
    else:
        adapter = "none" if config.endpoint else config.adapter
        served = served_model(training.folder, adapter, config.base)
        asker = Asker(task, training.labels, served.model, max_tokens, constrained=constrained)
    if config.endpoint:
        with closing(Endpoint(config.endpoint, config.sampling)) as endpoint:
            yield endpoint, asker
        return
    assert served, "without an endpoint, `find_training` returns a folder"
    began = time.monotonic()
    with ExitStack() as stack:
        with waiting(console, "starting the engine"):
            starting = engine(served, config.engine, max_tokens, config.seed)
            running = stack.enter_context(starting)
        console.print(f"the engine is ready after {time.monotonic() - began:.0f} s")
        yield running, asker


class MissingRow(Exception):
    """A call has no row yet."""


def decides(config: GenerateConfig, training: Training, task: Task) -> bool:
    """Say whether decoding will read alternative tokens: beside samples or a classifier."""
    answers = training.folder if config.adapter != "none" else None
    pools = answers is not None and not config.endpoint and has_classifier(answers)
    return bool(config.samples or (pools and task.answer.fields))


def sampling_passes(config: GenerateConfig, *, decides: bool) -> list[Sampling]:
    """Return the sampling settings of each request of one call; near ties need two tokens."""
    first = {"logprobs": ALTERNATIVES if decides else 2, **config.sampling}
    further = {**first, "n": config.samples, "temperature": 1.0}
    return [first, further] if config.samples else [first]


def load_rows(path: Path) -> Rows | None:
    """Return the rows of an earlier run, without an incomplete last line; None if there is none."""
    if not path.exists():
        return None
    with stream(path):
        pass  # opening it drops an incomplete last line
    return Rows(path, key=call_key)


def answered_ids(
    reader: Reader, config: GenerateConfig, labels: Labels, old_rows: Rows
) -> set[str]:
    """Return the ids of the examples whose calls all have rows."""
    task = reader.task
    if not isinstance(task.answer, Solve):
        return old_rows.ids()
    return {str(e.id) for e in reader.read(config.test) if is_answered(task, e, labels, old_rows)}


def is_answered(task: Task, example: Example, labels: Labels, old_rows: Rows) -> bool:
    """Say whether the existing rows are enough to compute an example's answer."""

    def reply(call: int, question: Example) -> Decoded:
        row = old_rows.get(call_key({"id": example.id, "call": call}))
        if row is None:
            raise MissingRow
        return task.ask.decode(first_reply(row), question, labels)

    try:
        run_steps(task.answer.solving(example), reply)
    except MissingRow:
        return False
    return True


def append(
    path: Path, finished: Iterator[dict[str, Any]], calls: Calls, done: int, total: int
) -> None:
    """Append each row as soon as it is finished, and show how many of `total` examples are done."""
    console = Console(soft_wrap=True)
    in_flight = 0
    with stream(path) as out, meter(console, total, done) as progress:
        for row in finished:
            out.write(dump(row) + "\n")
            out.flush()
            in_flight += calls.in_flight
            speed = f"{calls.tokens / progress.seconds:,.0f} tokens/s"
            details = (
                f", {calls.finished} calls, {calls.in_flight} in flight" if "call" in row else ""
            )
            progress.to(done + calls.solved, f"{progress.rate:.2f} cases/s, {speed}{details}")
    if calls.finished > calls.solved:
        mean = in_flight / calls.finished
        console.print(
            f"{calls.finished} calls, {mean:.1f} in flight on average, {speed}", highlight=False
        )
