"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from panjue.prompts.example import Decoded, Example, call_key, first_reply, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, stream
from panjue.prompts.plumbing.lock import exclusive_lock
from panjue.prompts.plumbing.progress import meter, waiting
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, configured, load_task
from panjue.serve.engine import check_engine, check_sampling
from panjue.serve.job import Job, make_job, start
from panjue.serve.record import Training, check_held_out, claim, find_training, provenance
from panjue.serve.rows import Calls, rows
from panjue.serve.settings import GenerateConfig, generate_settings
from panjue.serve.stop import StopSignals
from panjue.serve.work import Step, Work, batches


def main(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Generate with the config at `path`, resuming if possible; return the answers' folder."""
    return generate(generate_settings(path, overrides))


def generate(config: GenerateConfig) -> Path:
    """Write one row per example of `config.test` to `completions.jsonl`; return its folder.

    A row has the raw replies (`texts`: the first one uses `sampling`, then come the `samples`), why
    each ended (`finish`), its `alternatives`, token counts and how many sentences were left out;
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
    task = configured(task, training.solve)
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
    work = Work(todo, examples - len(done), old_rows)
    make = partial(make_job, config, reader.task, training, examples)
    answering = (
        in_cluster(config, make, work, console) if config.ray else here(make(), work, console)
    )
    with answering as steps:
        append(path, steps, len(done), examples)


@contextmanager
def here(job: Job, work: Work, console: Console) -> Iterator[Iterator[Step]]:
    """Start one engine, or a client of an endpoint, in this process; yield what it finishes."""
    task, config = job.task, job.config
    say_if_quick(job, console)
    with StopSignals(config.folder) as stop, ExitStack() as stack:
        with nullcontext() if config.endpoint else starting(console, "the engine"):
            source, asker = stack.enter_context(start(job, task))
        stop.at_once = False
        calls = Calls(asker, work.examples, job.passes, work.find_row)
        with closing(rows(source, calls, config.in_flight, stop.check)) as finished:
            yield (calls.step([row]) for row in finished)


@contextmanager
def in_cluster(
    config: GenerateConfig, make: Callable[[], Job], work: Work, console: Console
) -> Iterator[Iterator[Step]]:
    """Start replicas of the engine in a Ray cluster; yield what they finish.

    The job is made, and the adapter merged, only when there is a cluster.
    """
    from panjue.serve.fleet import Fleet, cluster
    from panjue.serve.replicas import capacity, check_build, replicas, resources

    assert config.ray
    with cluster(config.ray), StopSignals(config.folder) as stop:
        check_build()
        job = make()
        say_if_quick(job, console)
        stop.at_once = False  # Ray would take the exception for its own
        count, takes = config.replicas, resources(config)
        fleet = Fleet(replicas(job, takes), batches(work, count, config.in_flight), stop.check)
        with starting(console, f"the first of {count} replicas", lambda: f" ({capacity(takes)})"):
            fleet.wait_for_first()
        yield fleet.steps()


def say_if_quick(job: Job, console: Console) -> None:
    """Say that the engine is not compiled, if the number of replies has decided that."""
    if job.is_quick_start:
        note = "few replies: the engine is not compiled (engine.enforce_eager=false compiles it)"
        console.print(note, highlight=False)


@contextmanager
def starting(console: Console, what: str, more: Callable[[], str] = str) -> Iterator[None]:
    """Say that `what` is starting while the block runs, and how long it took."""
    began = time.monotonic()
    with waiting(console, f"starting {what}", more):
        yield
    console.print(f"{what} is ready after {time.monotonic() - began:.0f} s", highlight=False)


class MissingRow(Exception):
    """A call has no row yet."""


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
    if not task.answer.several_calls:
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


def append(path: Path, steps: Iterator[Step], done: int, total: int) -> None:
    """Append rows as soon as they are finished, and show how many of `total` examples are done."""
    console = Console(soft_wrap=True)
    step, in_flight, speed = Step([]), 0, ""
    with stream(path) as out, meter(console, total, done) as progress:
        for step in steps:
            out.write("".join(dump(row) + "\n" for row in step.rows))
            out.flush()
            in_flight += step.in_flight * len(step.rows)
            speed = f"{step.tokens / progress.seconds:,.0f} tokens/s"
            calls = f"{step.calls} calls, {step.in_flight} in flight"
            by_call = any("call" in row for row in step.rows)
            details = [
                f"{progress.rate:.2f} cases/s",
                speed,
                calls if by_call else "",
                step.replicas,
            ]
            if step.rows or done + step.solved < total:
                progress.to(done + step.solved, ", ".join(filter(None, details)))
    if step.calls > step.solved:
        mean = in_flight / step.calls
        console.print(
            f"{step.calls} calls, {mean:.1f} in flight on average, {speed}", highlight=False
        )
    if step.replicas:
        console.print(step.replicas, highlight=False)
