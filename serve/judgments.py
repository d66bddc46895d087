"""The routes that panjue adds to OpenAI's: judgments, labels and readiness."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.serve.engine import VLLMError, with_cancellation
from panjue.serve.guard import Problem, sse
from panjue.serve.judge import Judge
from panjue.serve.names import MAX_DEFENDANTS, find_defendants
from panjue.serve.source import Question, Refusal

MAX_SAMPLES = 32
STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Case(BaseModel):
    """Body of `POST /v1/judgments`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    fact: str
    """The facts."""
    defendants: list[str] | None = Field(None, max_length=MAX_DEFENDANTS)
    """Their names, in order; by default they are found in the facts by rules."""
    task: str | None = None
    """The expected task; another one than the server's is refused."""
    samples: int = Field(0, ge=0, le=MAX_SAMPLES)
    """Samples besides the greedy reply; with them the answer is decided by expected score."""
    stream: bool = False
    """Reply with server-sent events: `start`, several `delta`, then `result` or `error`."""


class Judgments:
    """The handlers of these routes."""

    def __init__(
        self, judge: Judge, task: str, law: Mapping[str, str], in_flight: int, *, demo: bool
    ) -> None:
        """Take the judge of a task, and the texts of articles to show with answers.

        A case may take at most `in_flight` replies. `demo` says that the demo's tiny model answers.
        """
        self._judge, self._task, self._law, self._in_flight = judge, task, law, in_flight
        self._demo = demo

    def attach(self, app: FastAPI) -> None:
        """Add the routes to an app."""
        app.post("/v1/judgments")(with_cancellation(self.judgments))
        app.get("/v1/labels")(self.labels)
        app.get("/readyz")(self.ready)

    async def judgments(self, raw_request: Request, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        """Answer one case.

        Raises:
            VLLMError: Too many requests run at once; vLLM's handlers turn this into a response.
        """
        try:
            return await self._respond(Case.model_validate(body))
        except ValidationError as error:
            problem = Problem(400, validation_message(error))
        except Problem as error:
            problem = error
        return JSONResponse(problem.body, problem.status)

    async def _respond(self, case: Case) -> Response:
        if not case.stream:
            return JSONResponse(await self.answer(case))
        events = self._events(*await self._prepare(case), case.samples)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM)

    async def answer(self, case: Case) -> dict[str, Any]:
        """Return the answer to one case.

        Raises:
            Problem: The case cannot be asked, or the engine is shutting down.
        """
        example, question = await self._prepare(case)
        try:
            result = await self._judge.answer(example, question, case.samples)
        except UserError as error:
            raise Problem(503, str(error)) from None
        return {"defendants": list(example.names), **result}

    async def _prepare(self, case: Case) -> tuple[Example, Question]:
        if 1 + case.samples > self._in_flight:
            raise Problem(400, f"samples: at most {self._in_flight - 1} on this server")
        # In a thread: shortening a long case takes time.
        return await asyncio.to_thread(self._question, case)

    def _question(self, case: Case) -> tuple[Example, Question]:
        example = self._example(case)
        try:
            return example, self._judge.asker.question(example)
        except Refusal as refusal:
            raise Problem(400, f"this case cannot be asked: {refusal}") from None

    def _example(self, case: Case) -> Example:
        if case.task not in (None, self._task):
            raise Problem(400, f"task: this server answers {self._task!r} only")
        names = find_defendants(case.fact) if case.defendants is None else case.defendants
        if case.defendants is None and case.fact.strip() and not names:
            raise Problem(400, "'fact' names no defendant after 被告人; list them in 'defendants'")
        by_hand = self._judge.task.data.by_hand
        assert by_hand is not None, "checked at start"
        try:
            return by_hand(case.fact, names)
        except UserError as error:
            raise Problem(400, str(error)) from None

    async def _events(
        self, example: Example, question: Question, samples: int
    ) -> AsyncIterator[bytes]:
        defendants = {"defendants": list(example.names)}
        yield sse("start", defendants)
        try:
            async with aclosing(self._judge.stream(example, question, samples)) as events:
                async for event, data in events:
                    yield sse(event, {**defendants, **data} if event == "result" else data)
        except (UserError, VLLMError) as error:
            yield sse("error", Problem(503, f"the engine failed during the reply: {error}").body)

    async def labels(self) -> dict[str, Any]:
        """Return the label sets, with the count of each label in training, and what answers."""
        labels = self._judge.asker.labels
        return {
            "task": self._task,
            "labels": labels.counts,
            "most": labels.most,
            "law": self._law,
            "demo": self._demo,
        }

    async def ready(self) -> dict[str, str]:
        """Report that the server is ready; until then the guard replies instead."""
        return {"status": "ready"}


def validation_message(error: ValidationError) -> str:
    """Return the first error of a request body, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{place!r} is unknown; allowed are: {', '.join(Case.model_fields)}"
    return f"{place}: {first['msg']}"
