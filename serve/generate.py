"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

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
"""What is made of completions, beside the submission."""


def main(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Generate as the config at `path` says, from where it stopped, and return the run folder."""
    return generate(generate_settings(path, overrides))


def generate(config: GenerateConfig) -> Path:
    """Write one row per example of `config.test` to `completions.jsonl`; return the run folder.

    A row has the raw replies (`texts`, the first by `sampling`, then the `samples`), why each ended
    (`finish`), its `alternatives`, token counts and how many sentences `fit` left out; greedy rows
    list their `near_ties`. An example that cannot be asked has `refused`, the reason, instead.
    Where an example takes several calls each has its row. Rows that are there are not made again.

    Raises:
        UserError: A file or setting is wrong, or the run folder holds rows made otherwise.
    """
    console = Console(soft_wrap=True)
    task = load_task(config.task)
    check_library_settings(config, task)
    reader = Reader(task, held_out=config.held_out, on_bad_row=config.on_bad_row)
    examples = sum(1 for _ in reader.read(config.test))
    if not examples:
        why = f"; {reader.skipped}" if reader.skipped.rows else ""
        raise UserError(f"{config.test}: has no cases{why}")
    source = answering(config, task)
    task = configured(task, source.solve, config.run)
    reader = replace(reader, task=task)
    made = provenance(config, source, task)
    if config.held_out:
        check_held_out(source.folder, made["test_sha256"])
    with exclusive_lock(config.run):
        claim(config.run, task, made, source.labels, console)
        reader.skipped.write(config.run / "skipped-test.jsonl")
        if reader.skipped.rows:
            console.print(str(reader.skipped), highlight=False, markup=False)
        answer(config, reader, source, examples, console)
    return config.run


def check_library_settings(config: GenerateConfig, task: Task) -> None:
    """Refuse what would fail only when the engine is up.

    Raises:
        UserError: A setting is unknown, or does nothing for the task.
    """
    check_managed("engine", config.engine, MANAGED_SETTINGS)
    check_known("engine", config.engine, (f.name for f in fields(AsyncEngineArgs)))
    check_sampling(config.sampling)
    if config.samples and not task.answer.uses_samples:
        raise UserError(
            f"samples: {config.task!r} decides nothing from further replies; set it to 0"
        )


@dataclass(frozen=True)
class Source:
    """What answers.

    Attributes:
        folder: Of the training result; None for an endpoint that needs none of ours.
        labels: The label sets of that training.
        max_tokens: Prompt plus reply; 0 where the endpoint sees to it.
        solve: How examples of several calls are solved: as in training but for what is set.
    """

    folder: Path | None
    labels: Labels
    max_tokens: int
    solve: dict[str, Any]


def answer(
    config: GenerateConfig, reader: Reader, source: Source, examples: int, console: Console
) -> None:
    """Answer those of the `examples` of the test file that have no rows yet."""
    place = config.run / "completions.jsonl"
    known = rows_of(place)
    done = answered(reader, config, source.labels, known) if known else set()
    if len(done) >= examples:
        console.print(f"{place}: all {examples} are answered already")
        return
    if known:
        console.print(f"continuing: {len(done)} of {examples} are answered already")
    todo = (example for example in reader.read(config.test) if str(example.id) not in done)
    with StopSignals(config.run) as signals, started(config, reader.task, source) as (asked, asker):
        signals.at_once = False
        calls = Calls(asker, todo, sampling_passes(config), known.get if known else lambda _: None)
        with closing(rows(asked, calls, config.in_flight, signals.check)) as finished:
            append(place, finished, calls, len(done), examples)


def answering(config: GenerateConfig, task: Task) -> Source:
    """Find what answers.

    Raises:
        UserError: There is nothing trained, and the task or the engine needs it.
    """
    if config.endpoint and config.trained is None:
        if task.ask.labels is not no_labels:
            raise UserError(
                f"endpoint: {config.task!r} has labels, which training collects; "
                "set trained=FOLDER of an adapter"
            )
        return Source(None, Labels(), config.max_tokens or 0, config.solve)
    trained = trained_folder(config)
    manifest = read_json(trained / "manifest.json")
    solve = {**manifest.get("solve", {}), **config.solve}
    max_tokens = config.max_tokens or manifest["max_tokens"]
    return Source(trained, load_labels(trained / "labels.json"), max_tokens, solve)


@contextmanager
def started(
    config: GenerateConfig, task: Task, source: Source
) -> Iterator[tuple[Engine | Endpoint, Asker | PlainAsker]]:
    """Start what answers: the engine or a client of the endpoint, with what makes questions."""
    constrained, max_tokens = config.constrained, source.max_tokens
    asker: Asker | PlainAsker
    if source.folder is None:
        served, asker = None, PlainAsker(task, source.labels, max_tokens, constrained=constrained)
    else:
        adapter = "none" if config.endpoint else config.adapter
        served = served_model(source.folder, adapter, config.base)
        asker = Asker(task, source.labels, served.model, max_tokens, constrained=constrained)
    if config.endpoint:
        with closing(Endpoint(config.endpoint, config.sampling)) as endpoint:
            yield endpoint, asker
        return
    assert served, "`answering` gives a folder where there is no endpoint"
    with engine(served, config.engine, max_tokens, config.seed) as started:
        yield started, asker


class Unanswered(Exception):
    """A call has no row yet."""


def sampling_passes(config: GenerateConfig) -> list[Sampling]:
    """Return the sampling of each request that one example takes."""
    first = {"logprobs": ALTERNATIVES if config.samples else 2, **config.sampling}
    return (
        [first, {**first, "n": config.samples, "temperature": 1.0}] if config.samples else [first]
    )


def check_held_out(trained: Path | None, test_sha256: str) -> None:
    """Refuse to call a tenth held out that training did not hold out.

    Raises:
        UserError: Training had a `dev` file, or another training file; or there was none.
    """
    if trained is None:
        raise UserError("held_out: an endpoint without trained=FOLDER held nothing out")
    made = read_json(trained / "manifest.json")
    if made.get("dev_sha256"):
        raise UserError(f"held_out: {trained} had a dev file; answer that instead: test=DEV")
    if test_sha256 != made["train_sha256"]:
        raise UserError(f"held_out: test must be what {trained} was trained on: {made['train']}")


def provenance(config: GenerateConfig, source: Source, task: Task) -> dict[str, Any]:
    """Say what the completions are made of; resuming under anything else is refused."""
    trained = source.folder
    return {
        "task": config.task,
        "test": str(config.test),
        "test_sha256": sha256(config.test),
        "trained": trained and str(trained),
        "trained_sha256": trained and model_sha256(trained),
        "labels_sha256": trained and sha256(trained / "labels.json"),
        "prompt_sha256": prompt_sha256(config.task),
        "adapter": config.adapter,
        "constrained": config.constrained,
        "max_tokens": source.max_tokens,
        "seed": config.seed,
        "engine": config.engine,
        "sampling": config.sampling,
        "samples": config.samples,
        "held_out": config.held_out,
        **({"endpoint": config.endpoint} if config.endpoint else {}),
        **({"solve": task.answer.settings.model_dump()} if task.answer.settings else {}),
        **({"on_bad_row": "skip"} if config.on_bad_row == "skip" else {}),
        "versions": {
            "prompt rules": RULES,
            **{name: version(name) for name in ("llguidance", "transformers")},
        },
    }


def shaping(made: dict[str, Any]) -> dict[str, Any]:
    """Return what shapes the output of how a run was made: not the engine's memory and speed."""
    engine = {key: value for key, value in made.get("engine", {}).items() if key not in RESOURCES}
    return {**made, "engine": engine}


def claim(run: Path, task: Task, made: dict[str, Any], labels: Labels, console: Console) -> None:
    """Make `run` the place of these completions: manifest and labels.

    Other versions of the libraries are told and do not hinder. Where no completions are left,
    what was once made of this run's is deleted, and told.

    Raises:
        UserError: Completions made otherwise are there; names what differs.
    """
    place, completions = run / "manifest.json", run / "completions.jsonl"
    manifest = read_json(place) if place.exists() else {}
    before = manifest.get("generate", {})
    if completions.exists():
        told = manifest_diff(shaping(before), shaping(made))
        if told or not before:
            raise UserError(
                f"{completions}: was made otherwise ({told or 'there is no record of how'}); "
                "choose another run=FOLDER, or delete that file: what was decoded from it goes too"
            )
        if told := difference(before["versions"], made["versions"]):
            console.print(f"going on with other versions: {told}", highlight=False, markup=False)
            made = {**made, "versions": before["versions"]}
    elif before:
        stale = [
            run / name for name in (task.data.submission.name, *DECODED) if (run / name).exists()
        ]
        for path in stale:
            delete(path)
        if stale:
            told = ", ".join(path.name for path in stale)
            console.print(f"{run}: deleted {told}, whose completions are gone", markup=False)
    labels.save(run)
    write_json(place, {**manifest, "generate": made})


def rows_of(path: Path) -> Rows | None:
    """Return the rows that are there, after dropping a torn last one."""
    if not path.exists():
        return None
    with stream(path):
        pass  # opening it drops a torn last line
    return Rows(path, key=call_key)


def answered(reader: Reader, config: GenerateConfig, labels: Labels, known: Rows) -> set[str]:
    """Return the ids of the examples all of whose calls have their rows."""
    task = reader.task
    if not isinstance(task.answer, Solve):
        return known.ids()
    return {str(e.id) for e in reader.read(config.test) if is_answered(task, e, labels, known)}


def is_answered(task: Task, example: Example, labels: Labels, known: Rows) -> bool:
    """Say whether the way to an example's answer comes to its end with the rows that are there."""

    def reply(call: int, question: Example) -> Decoded:
        row = known.get(call_key({"id": example.id, "call": call}))
        if row is None:
            raise Unanswered
        return task.ask.decode(first_reply(row), question, labels)

    try:
        run_steps(task.answer.solving(example), reply)
    except Unanswered:
        return False
    return True


def append(
    path: Path, finished: Iterator[dict[str, Any]], calls: Calls, done: int, total: int
) -> None:
    """Append every finished row at once, showing how many examples of `total` are there."""
    console = Console(soft_wrap=True)
    in_flight = 0
    with stream(path) as out, meter(console, total, done) as shown:
        for row in finished:
            out.write(dump(row) + "\n")
            out.flush()
            in_flight += calls.in_flight
            flow = f"{calls.tokens / shown.seconds:,.0f} tokens/s"
            many = f", {calls.made} calls, {calls.in_flight} in flight" if "call" in row else ""
            shown.to(done + calls.solved, f"{shown.rate:.2f} cases/s, {flow}{many}")
    if calls.made > calls.solved:
        mean = in_flight / calls.made
        console.print(
            f"{calls.made} calls, {mean:.1f} in flight on average, {flow}", highlight=False
        )
