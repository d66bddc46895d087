"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Self

from pydantic import Field
from rich.console import Console

from panjue.prompts.config import check_settings, load_config
from panjue.prompts.errors import Stopped, UserError
from panjue.prompts.files import Rows, difference, dump, read_json, sha256, stream, write_json
from panjue.prompts.labels import load_labels
from panjue.prompts.model import model_sha256, prompt_sha256
from panjue.prompts.progress import meter
from panjue.prompts.skip import OnBadRow, reading
from panjue.prompts.split import is_held_out
from panjue.prompts.task import Example, Task, load_task
from panjue.serve.ask import Asker, Refusal
from panjue.serve.engine import (
    LLM,
    CompletionOutput,
    EngineArgs,
    LoRARequest,
    Request,
    RequestOutput,
    Sampling,
    check_sampling,
    complete,
    engine,
    requests,
)
from panjue.serve.forks import WAYS, forks
from panjue.serve.settings import OURS, EngineConfig
from panjue.serve.trained import served_model, trained_folder

NEAR_TIE = 1e-4
"""Difference in log-probability under which two tokens count as equally likely (float32)."""


class GenerateConfig(EngineConfig):
    """Settings of one generation; completions and submission are written to `run`."""

    test: Path
    """Cases to answer."""
    constrained: bool = True
    """Decode under each case's schema. Without it replies are free text, repaired if need be."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM's SamplingParams as they are; greedy by default."""
    samples: int = Field(0, ge=0)
    """Further replies per case, drawn at temperature 1; with them, answers are decided."""
    on_bad_row: OnBadRow = "stop"
    """What a row of `test` does that is no case: stop the run, or be listed and left out."""
    held_out: bool = False
    """Answer only the tenth of `test` that training on it held out: `panjue tune` fits on that."""


def main(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Generate as the config at `path` says, from where it stopped, and return the run folder."""
    config = load_config(GenerateConfig, path, overrides)
    generate(config)
    return config.run


def generate(config: GenerateConfig) -> None:
    """Write one row per example of `config.test` to `completions.jsonl`.

    A row has the raw replies (`texts`, the first by `sampling`, then the `samples`), why each ended
    (`finish`), its `forks`, token counts and how many sentences `fit` left out; greedy rows list
    their `near_ties`. An example that cannot
    be asked at all has `refused`, the reason, instead. Rows that are there are not made again.

    Raises:
        UserError: A file or setting is wrong, or the run folder holds rows made otherwise.
    """
    console = Console(soft_wrap=True)
    task, skipped = reading(load_task(config.task), config.on_bad_row)
    if not config.test.is_file():
        raise UserError(f"test: no file {config.test}")
    check_settings("engine", config.engine, (f.name for f in fields(EngineArgs)), OURS)
    check_sampling(config.sampling)
    if config.samples and not (task.decides or task.ranks):
        raise UserError(
            f"samples: {config.task!r} decides nothing from further replies; set it to 0"
        )
    examples = sum(1 for _ in asked(task, config))
    if not examples:
        why = f"; {skipped}" if skipped.rows else ""
        raise UserError(f"{config.test}: has no cases{why}")
    trained = trained_folder(config)
    labels = load_labels(trained / "labels.json")
    max_tokens = config.max_tokens or read_json(trained / "manifest.json")["max_tokens"]
    made = provenance(config, trained, max_tokens)
    if config.held_out:
        check_held_out(trained, made["test_sha256"])
    claim(config.run, made, trained)
    skipped.write(config.run / "skipped-test.jsonl")
    if skipped.rows:
        console.print(str(skipped), highlight=False, markup=False)
    done = finished_ids(config.run / "completions.jsonl")
    if len(done) >= examples:
        console.print(f"{config.run / 'completions.jsonl'}: all {examples} are answered already")
        return
    if done:
        console.print(f"continuing: {len(done)} of {examples} are answered already")
    todo = (example for example in asked(task, config) if str(example.id) not in done)
    served = served_model(trained, config.adapter)
    asker = Asker(task, labels, served.model, max_tokens, constrained=config.constrained)
    run = engine(served.model, config.engine, max_tokens, config.seed, served.lora_rank)
    with StopSignals(config.run) as signals, run as llm:
        signals.at_once = False
        finished = rows(
            llm, asker, todo, config.in_flight, turns(config), served.adapter, check=signals.check
        )
        append(config.run / "completions.jsonl", finished, len(done), examples)


class StopSignals:
    """While the block runs, SIGTERM and Ctrl-C end it with a word on how to go on.

    Attributes:
        at_once: Whether a signal ends the block where it is; else `check` does. vLLM survives the
            first while it starts, and not while it works.
    """

    def __init__(self, run: Path) -> None:
        """Say of `run` that it can be gone on with."""
        self._word = (
            f"stopped; {run / 'completions.jsonl'} has what is answered, "
            "the same command goes on from there"
        )
        self._received, self.at_once = 0, True

    def __enter__(self) -> Self:
        """Take the signals."""
        both = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._receive) for number in both}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the signals back; an engine that a Ctrl-C reached too has failed for that reason."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is not None and issubclass(kind, Exception):
            self.check()

    def _receive(self, number: int, _: FrameType | None) -> None:
        for one in self._before:
            signal.signal(one, signal.SIG_IGN)  # a second one must not break the engine's end
        self._received = number
        if self.at_once:
            self.check()

    def check(self) -> None:
        """End the block if there was a signal."""
        if self._received:
            raise Stopped(self._word, self._received) from None


def turns(config: GenerateConfig) -> list[Sampling]:
    """Return the sampling of each request that one example takes."""
    first = {"logprobs": WAYS if config.samples else 2, **config.sampling}
    return (
        [first, {**first, "n": config.samples, "temperature": 1.0}] if config.samples else [first]
    )


def asked(task: Task, config: GenerateConfig) -> Iterator[Example]:
    """Yield the examples of the test file that are to be answered."""
    return (e for e in task.read(config.test) if not config.held_out or is_held_out(e))


def check_held_out(trained: Path, test_sha256: str) -> None:
    """Refuse to call a tenth held out that training did not hold out.

    Raises:
        UserError: Training had a `dev` file, or another training file.
    """
    made = read_json(trained / "manifest.json")
    if made.get("dev_sha256"):
        raise UserError(f"held_out: {trained} had a dev file; answer that instead: test=DEV")
    if test_sha256 != made["train_sha256"]:
        raise UserError(f"held_out: test must be what {trained} was trained on: {made['train']}")


def provenance(config: GenerateConfig, trained: Path, max_tokens: int) -> dict[str, Any]:
    """Say what the completions are made of; resuming under anything else is refused."""
    return {
        "task": config.task,
        "test": str(config.test),
        "test_sha256": sha256(config.test),
        "trained": str(trained),
        "trained_sha256": model_sha256(trained),
        "labels_sha256": sha256(trained / "labels.json"),
        "prompt_sha256": prompt_sha256(config.task),
        "adapter": config.adapter,
        "constrained": config.constrained,
        "max_tokens": max_tokens,
        "seed": config.seed,
        "engine": config.engine,
        "sampling": config.sampling,
        "samples": config.samples,
        "held_out": config.held_out,
        **({"on_bad_row": "skip"} if config.on_bad_row == "skip" else {}),
        "versions": {name: version(name) for name in ("llguidance", "transformers")},
    }


def claim(run: Path, made: dict[str, Any], trained: Path) -> None:
    """Make `run` the place of these completions: manifest and labels.

    Raises:
        UserError: Completions made otherwise are there; names what differs.
    """
    place = run / "manifest.json"
    manifest = read_json(place) if place.exists() else {}
    before = manifest.get("generate")
    what = difference(before, made) if before else "there is no record of how"
    if what and (run / "completions.jsonl").exists():
        raise UserError(
            f"{run}/completions.jsonl: was made otherwise ({what}); "
            "choose another run=FOLDER or delete that file"
        )
    run.mkdir(parents=True, exist_ok=True)
    load_labels(trained / "labels.json").save(run)
    write_json(place, {**manifest, "generate": made})


def finished_ids(path: Path) -> set[str]:
    """Return the ids of the rows that are there, after dropping a torn last one."""
    if not path.exists():
        return set()
    with stream(path):
        pass  # opening it drops a torn last line
    return Rows(path).ids()


def append(path: Path, finished: Iterator[dict[str, Any]], done: int, total: int) -> None:
    """Append every finished row at once, showing how many of `total` are there."""
    with stream(path) as out, meter(Console(soft_wrap=True), total, done) as shown:
        for row in finished:
            out.write(dump(row) + "\n")
            out.flush()
            shown.to(shown.done + 1, f"{shown.rate:.2f} cases/s")


def rows(  # noqa: PLR0913  # each is used by somebody
    llm: LLM,
    asker: Asker,
    examples: Iterator[Example],
    in_flight: int,
    turns: Sequence[Sampling] = ({"logprobs": 2},),
    adapter: Path | None = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Yield one row of `completions.jsonl` per example, in the order they finish.

    `check` is called between the engine's steps, and may end it all.
    """
    lora = LoRARequest("adapter", 1, str(adapter)) if adapter else None
    refused: list[dict[str, Any]] = []
    waiting: dict[str, list[tuple[Request, RequestOutput]]] = {}

    def asked() -> Iterator[Request]:
        for example in examples:
            try:
                yield from requests(example.id, asker.question(example), turns)
            except Refusal as refusal:
                refused.append({"id": example.id, "refused": str(refusal)})

    for finished in complete(llm, asked(), in_flight, lora, check):
        key = str(finished[0].id)
        answered = waiting.setdefault(key, [])
        answered.append(finished)
        if len(answered) == len(turns):
            yield row(sorted(waiting.pop(key), key=lambda turn: turn[0].turn), asker.tokenizer)
    yield from refused


def row(turns: Sequence[tuple[Request, RequestOutput]], tokenizer: Any) -> dict[str, Any]:
    """Return the row of one example from its requests, the first reply first."""
    request, first = turns[0]
    replies = [reply for _, output in turns for reply in output.outputs]
    greedy = request.params.temperature == 0
    return {
        "id": request.id,
        "texts": [reply.text for reply in replies],
        "finish": [reply.finish_reason for reply in replies],
        "forks": [_forks(reply, tokenizer) for reply in replies] if len(turns) > 1 else [],
        "prompt_tokens": sum(len(request.question.prompt) for request, _ in turns),
        "cached_tokens": sum(output.num_cached_tokens or 0 for _, output in turns),
        "completion_tokens": sum(len(reply.token_ids) for reply in replies),
        "dropped_sentences": request.question.dropped,
        "loosened_schema": request.question.loosened,
        "near_ties": near_ties(first.outputs[0]) if greedy else [],
    }


def _forks(reply: CompletionOutput, tokenizer: Any) -> list[Any]:
    options = [{token: o.logprob for token, o in here.items()} for here in reply.logprobs or ()]
    return forks(list(reply.token_ids), options, tokenizer)


def near_ties(reply: CompletionOutput) -> list[int]:
    """Return the positions of a greedy reply where the two best tokens lie within `NEAR_TIE`.

    There, and only there, may another batch or machine continue differently: sums of floats
    depend on their order.
    """
    best_two = (
        sorted(t.logprob for t in options.values())[-2:] for options in reply.logprobs or ()
    )
    return [i for i, two in enumerate(best_two) if len(two) == 2 and two[1] - two[0] < NEAR_TIE]
