"""A training that judges: one case in, its answer out; over HTTP, or from Python with `load`."""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from panjue.eval.decide import Decider, decider_of
from panjue.eval.rule import Rule, read_fitted
from panjue.prompts.example import Example, first_reply
from panjue.prompts.labels import load_labels
from panjue.prompts.model import is_demo
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.run import Run
from panjue.prompts.task import load_task
from panjue.serve.ask import ALTERNATIVES, Asker, Question, Refusal, requests, row
from panjue.serve.engine import Engine, check_engine, running_engine
from panjue.serve.merge import served_model
from panjue.serve.names import MAX_DEFENDANTS, find_defendants
from panjue.serve.settings import NAME, ServeConfig, serve_settings

MAX_SAMPLES = 32
NUMBERS = count()  # a number for each case: vLLM wants every request under a name of its own

OnEvent = Callable[[str, dict[str, Any]], None]
"""Callback that receives the name and the data of a server-sent event."""


class CaseRequest(BaseModel):
    """Body of `POST /v1/judgments`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    fact: str
    # Their names, in order; by default they are found in the facts by rules.
    defendants: list[str] | None = Field(None, max_length=MAX_DEFENDANTS)
    model: str = NAME  # the training that answers, if the server has several
    samples: int = Field(0, ge=0, le=MAX_SAMPLES)  # besides the greedy reply, to decide from all
    stream: bool = False  # as events: `start`, several `delta`, then `result` or `error`


class BadCase(UserError):
    """A case that cannot be asked; the message says why."""


def case_request(fields: Mapping[str, Any]) -> CaseRequest:
    """Check the fields of a case; raise BadCase if one is missing, unknown or wrong."""
    try:
        return CaseRequest.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    # A misspelt field is missing too; its own name says more.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        raise BadCase(f"{place!r} is unknown; allowed are: {', '.join(CaseRequest.model_fields)}")
    raise BadCase(f"{place}: {first['msg']}")


class ServedRun:
    """The prompts, labels and decision rule of a training; the engine is not part of it."""

    def __init__(self, run: Run, config: ServeConfig) -> None:
        """Load all parts, and merge the adapter if needed."""
        trained, record = run.trained, run.record
        self.task, self.task_name = load_task(record.task), record.task
        if self.task.data.by_hand is None:
            raise UserError(
                f"{run.folder}: task {record.task!r} cannot be served: it does not define 'by_hand'"
            )
        labels = load_labels(trained / "labels.json")
        self.folders = served_model(trained, config.adapter, config.base)
        max_tokens = config.max_tokens or record.max_tokens
        self.asker = Asker(self.task, labels, self.folders.model, max_tokens)
        fitted = None if config.adapter == "none" else trained
        self._decider, rules = decider_of(self.task, labels, fitted), read_fitted(fitted)
        self._rules = rules.rules if rules else {}
        self.demo = is_demo(self.folders.model)

    def _prepare(self, case: CaseRequest) -> tuple[Example, Question]:
        """Return a case as an example, and its question; a long case takes tens of milliseconds."""
        names = find_defendants(case.fact) if case.defendants is None else case.defendants
        if case.defendants is None and case.fact.strip() and not names:
            raise BadCase("'fact' names no defendant after 被告人; list them in 'defendants'")
        assert self.task.data.by_hand is not None, "checked at start"
        try:
            example = self.task.data.by_hand(case.fact, names)
            return example, self.asker.question(example)
        except UserError as error:
            raise BadCase(str(error)) from None
        except Refusal as refusal:
            raise BadCase(f"this case cannot be asked: {refusal}") from None

    async def answer(
        self, engine: Engine, case: CaseRequest, on_event: OnEvent | None = None
    ) -> dict[str, Any]:
        """Return the body of `POST /v1/judgments`.

        `on_event` receives `start` when the engine is asked, and `delta` with each new piece of the
        greedy reply. A case that cannot be asked raises BadCase, an engine that failed UserError.
        """
        example, question = await asyncio.to_thread(self._prepare, case)
        sampling: dict[str, Any] = {"logprobs": ALTERNATIVES}
        more = {**sampling, "n": case.samples, "temperature": 1.0}
        passes = [sampling, more] if case.samples else [sampling]
        first, *further = requests(next(NUMBERS), question, passes)

        def on_text(text: str) -> None:
            if on_event:
                on_event("delta", {"text": text})

        if on_event:
            on_event("start", {"defendants": list(example.names)})
        first_output = engine.ask(first, on_text if on_event else None)
        outputs = await asyncio.gather(first_output, *map(engine.ask, further))
        pairs = list(zip((first, *further), outputs, strict=True))
        # In threads: the alternatives of many replies take seconds.
        make_row = partial(row, pairs, self.asker.tokenizer, with_alternatives=True)
        completion = await asyncio.to_thread(make_row)
        if "refused" in completion:
            raise UserError(completion["refused"])
        usage = {name: completion[name] for name in ("prompt_tokens", "completion_tokens")}
        rule = self._rules.get(case.samples, Rule())
        decider = self._decider.with_rule(rule) if self._decider else None
        decided = await asyncio.to_thread(decide, self.asker, decider, example, completion)
        return {
            "defendants": list(example.names),
            **decided,
            "finish": completion["finish"][0],
            "dropped_sentences": question.dropped,
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }


def decide(
    asker: Asker, decider: Decider | None, example: Example, completion: dict[str, Any]
) -> dict[str, Any]:
    """Return the answer, its confidence if it is decided, and the repairs of the first reply."""
    task, confidence = asker.task, {}
    decoded = task.ask.decode(first_reply(completion), example, asker.labels)
    answer = decoded.answer
    if decider:
        is_alone = len(completion["texts"]) == 1 and not decider.rule.uses_classifier
        decision = decider.decide(example, completion, keep_first=is_alone)
        answer = decision.answer
        confidence = {"confidence": decision.confidence, "probabilities": decision.classes}
    submission = task.data.write(example, answer)
    del submission["id"]
    return {**submission, "answer": answer, **confidence, "repairs": list(decoded.repairs)}


class Judge:
    """Judges cases with a running engine; `load` makes it."""

    def __init__(
        self, run: ServedRun, engine: Engine, in_flight: int, portal: BlockingPortal
    ) -> None:
        """Take an engine of the portal's event loop."""
        self._run, self._in_flight, self._portal = run, in_flight, portal
        self._engine: Engine | None = engine

    def __call__(
        self, fact: str, defendants: Sequence[str] | None = None, samples: int = 0
    ) -> dict[str, Any]:
        """Return the judgments of one case, as `POST /v1/judgments` does."""
        names = None if defendants is None else list(defendants)
        return self._submit({"fact": fact, "defendants": names, "samples": samples}).result()

    def many(self, cases: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the judgments of cases in their order, with many in the engine at once.

        A case has the fields of `CaseRequest`. After an error no case is answered.
        """
        waiting: deque[Future[dict[str, Any]]] = deque()
        try:
            for case in cases:
                waiting.append(self._submit(case))
                if len(waiting) == 2 * self._in_flight:  # although the first one may be slow
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Forget the engine: vLLM's object complains if it lives until Python exits."""
        self._engine = None

    def _submit(self, fields: Mapping[str, Any]) -> Future[dict[str, Any]]:
        if self._engine is None:
            raise UserError("the engine has stopped; call judge within the `with` block")
        case = case_request(fields)
        return self._portal.start_task_soon(self._run.answer, self._engine, case)


@contextmanager
def load(run: Path | str, settings: Mapping[str, Any] | None = None) -> Iterator[Judge]:
    """Start the engine of a run, and stop it at the end of the block.

    `settings` are settings of `ServeConfig`, in place of those in `run`/config.yaml.
    """
    words = [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
    config, runs = serve_settings(Path(run), words)
    check_engine(config.engine)
    served = ServedRun(runs[NAME], config)
    running = running_engine(served.folders, config.engine, served.asker.max_tokens, config.seed)
    # In a thread of its own: in a notebook, this one runs an event loop already.
    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(running) as engine:
            judge = Judge(served, engine, config.slots, portal)
            try:
                yield judge
            finally:
                judge.close()
        portal.call(portal.stop, True)  # else it would wait for requests that nobody awaits
