"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from panjue.prompts.example import Decoded, Example, Solve, call_key, first_reply, run_steps
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.config import check_known, check_managed
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    delete,
    difference,
    dump,
    generation,
    manifest_diff,
    read_json,
    sha256,
    stream,
    write_json,
)
from panjue.prompts.plumbing.lock import exclusive_lock
from panjue.prompts.plumbing.model import model_sha256, prompt_sha256
from panjue.prompts.plumbing.progress import meter
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.render import RULES
from panjue.prompts.task import Task, configured, load_task, no_labels
from panjue.serve.alternatives import ALTERNATIVES
from panjue.serve.ask import Asker
from panjue.serve.endpoint import Endpoint, PlainAsker
from panjue.serve.engine import AsyncEngineArgs, Engine, check_sampling, engine
from panjue.serve.rows import Calls, rows
from panjue.serve.settings import (
    MANAGED_SETTINGS,
    RESOURCES,
    GenerateConfig,
    generate_settings,
    trained_folder,
)
from panjue.serve.source import Sampling
from panjue.serve.stop import StopSignals
from panjue.serve.trained import served_model

DECODED = ("decode.json", "confidence.jsonl", "scores.json", "report.html")
"""Files that are derived from completions, besides the submission."""


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
    check_managed("engine", config.engine, MANAGED_SETTINGS)
    check_known("engine", config.engine, (f.name for f in fields(AsyncEngineArgs)))
    check_sampling(config.sampling)
    if config.samples and not task.answer.uses_samples:
        raise UserError(f"samples: {config.task!r} uses one reply per question; set samples=0")


@dataclass(frozen=True)
class Training:
    """What generation takes from a training result.

    Attributes:
        folder: Folder of the training result; None for an endpoint without one.
        labels: The label sets of the training.
        max_tokens: Limit on prompt plus reply; 0 leaves the limit to the endpoint.
        solve: Settings of examples with several calls: those of training, then those of the config.
    """

    folder: Path | None
    labels: Labels
    max_tokens: int
    solve: dict[str, Any]


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
        calls = Calls(asker, todo, sampling_passes(config), find_row)
        with closing(rows(source, calls, config.in_flight, stop.check)) as finished:
            append(path, finished, calls, len(done), examples)


def find_training(config: GenerateConfig, task: Task) -> Training:
    """Find the training result, which an endpoint needs only for the labels.

    Raises:
        UserError: There is no training result, and the task or the engine needs one.
    """
    if config.endpoint and config.trained is None:
        if task.ask.labels is not no_labels:
            raise UserError(
                f"endpoint: {config.task!r} has labels, which training collects; "
                "set trained=FOLDER of an adapter"
            )
        return Training(None, Labels(), config.max_tokens or 0, config.solve)
    trained = trained_folder(config)
    manifest = read_json(trained / "manifest.json")
    solve = {**manifest.get("solve", {}), **config.solve}
    max_tokens = config.max_tokens or manifest["max_tokens"]
    return Training(trained, load_labels(trained / "labels.json"), max_tokens, solve)


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
    console.print("starting the engine …")
    began = time.monotonic()
    with engine(served, config.engine, max_tokens, config.seed) as running:
        console.print(f"the engine is ready after {time.monotonic() - began:.0f} s")
        yield running, asker


class MissingRow(Exception):
    """A call has no row yet."""


def sampling_passes(config: GenerateConfig) -> list[Sampling]:
    """Return the sampling settings of each request of one call."""
    first = {"logprobs": ALTERNATIVES if config.samples else 2, **config.sampling}
    further = {**first, "n": config.samples, "temperature": 1.0}
    return [first, further] if config.samples else [first]


def check_held_out(trained: Path | None, test_sha256: str) -> None:
    """Check that training held out a tenth of this test file.

    Raises:
        UserError: Training had a `dev` file or another training file, or there is no training.
    """
    if trained is None:
        raise UserError("held_out: needs a training; set trained=FOLDER")
    manifest = read_json(trained / "manifest.json")
    if manifest.get("dev_sha256"):
        raise UserError(f"held_out: {trained} was trained with a dev file; set test to that file")
    if test_sha256 != manifest["train_sha256"]:
        raise UserError(
            f"held_out: test must be the training file of {trained}: {manifest['train']}"
        )


def provenance(config: GenerateConfig, training: Training, task: Task) -> dict[str, Any]:
    """Return what the completions depend on; a run resumes only with the same values."""
    trained, recorded = training.folder, generation(config.folder).get("trained_sha256")
    return {
        "task": config.task,
        "test": str(config.test),
        "test_sha256": sha256(config.test),
        "trained": trained and str(trained),
        "trained_sha256": trained and model_sha256(trained, recorded),
        "labels_sha256": trained and sha256(trained / "labels.json"),
        "prompt_sha256": prompt_sha256(config.task),
        "adapter": config.adapter,
        "constrained": config.constrained,
        "max_tokens": training.max_tokens,
        "seed": config.seed,
        "engine": config.engine,
        "sampling": config.sampling,
        "samples": config.samples,
        "held_out": config.held_out,
        **({"endpoint": config.endpoint} if config.endpoint else {}),
        **task.answer.provenance(),
        **({"on_bad_row": "skip"} if config.on_bad_row == "skip" else {}),
        "versions": {
            "prompt rules": RULES,
            **{name: version(name) for name in ("llguidance", "transformers")},
        },
    }


def without_resources(record: dict[str, Any]) -> dict[str, Any]:
    """Return a provenance record without the engine's settings of memory and speed."""
    engine = {key: value for key, value in record.get("engine", {}).items() if key not in RESOURCES}
    return {**record, "engine": engine}


def claim(
    folder: Path, task: Task, record: dict[str, Any], labels: Labels, console: Console
) -> None:
    """Write the manifest and the labels of these completions to `folder`.

    Other library versions are allowed and printed. If the completions were deleted, the files
    derived from them are deleted too, and named.

    Raises:
        UserError: The folder has completions from other settings; names what differs.
    """
    path, completions = folder / "manifest.json", folder / "completions.jsonl"
    manifest = read_json(path) if path.exists() else {}
    old_record = manifest.get("generate", {})
    if completions.exists():
        changed = manifest_diff(without_resources(old_record), without_resources(record))
        if changed or not old_record:
            raise UserError(
                f"{folder}: has answers made with other settings "
                f"({changed or 'they were not recorded'}); they are kept: "
                "name another folder for these with answers=NAME (make: ANSWERS=NAME)"
            )
        if changed := difference(old_record["versions"], record["versions"]):
            console.print(f"resuming with other versions: {changed}", highlight=False, markup=False)
            record = {**record, "versions": old_record["versions"]}
    elif old_record:
        names = (task.data.submission.name, *DECODED)
        stale = [folder / name for name in names if (folder / name).exists()]
        for file in stale:
            delete(file)
        if stale:
            deleted = ", ".join(file.name for file in stale)
            console.print(f"{folder}: deleted {deleted}: their completions are gone", markup=False)
    labels.save(folder)
    write_json(path, {**manifest, "generate": record})


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
