"""What panjue answers beside OpenAI's routes: judgments, labels, and whether it is ready."""

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
    """Their names, in order; found in the facts by rule where they are not given."""
    task: str | None = None
    """The task that is meant, if the client wants to be sure."""
    samples: int = Field(0, ge=0, le=MAX_SAMPLES)
    """Replies drawn beside the greedy one; with them the answer is decided by expected score."""
    stream: bool = False
    """Answer with server-sent events: `start`, `delta`s, then `result` or `error`."""


class Judgments:
    """The routes."""

    def __init__(self, judge: Judge, task: str, law: Mapping[str, str], in_flight: int) -> None:
        """Take what answers cases of a task, and the texts of articles to show beside them.

        No case takes more than `in_flight` replies.
        """
        self._judge, self._task, self._law, self._in_flight = judge, task, law, in_flight

    def attach(self, app: FastAPI) -> None:
        """Add the routes to an app."""
        app.post("/v1/judgments")(with_cancellation(self.judgments))
        app.get("/v1/labels")(self.labels)
        app.get("/readyz")(self.ready)

    async def judgments(self, raw_request: Request, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        """Answer one case.

        Raises:
            VLLMError: There are too many requests at once; vLLM's handlers answer that.
        """
        try:
            return await self._answer(Case.model_validate(body))
        except ValidationError as error:
            problem = Problem(400, complaint(error))
        except Problem as error:
            problem = error
        return JSONResponse(problem.body, problem.status)

    async def _answer(self, case: Case) -> Response:
        """Return the answer to one case, whole or as it grows.

        Raises:
            Problem: It cannot be asked, or the engine is ending.
        """
        if 1 + case.samples > self._in_flight:
            raise Problem(400, f"samples: this server writes {self._in_flight} replies at once")
        # In a thread, since a long case takes a while to fit.
        example, question = await asyncio.to_thread(self._question, case)
        if case.stream:
            events = self._events(example, question, case.samples)
            return StreamingResponse(events, media_type="text/event-stream", headers=STREAM)
        try:
            result = await self._judge.answer(example, question, case.samples)
        except UserError as error:
            raise Problem(503, str(error)) from None
        return JSONResponse({"defendants": list(example.names), **result})

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
            raise Problem(
                400, "no defendant is found behind 被告人 in 'fact'; list them in 'defendants'"
            )
        by_hand = self._judge.task.data.by_hand
        assert by_hand is not None, "checked at start"
        try:
            return by_hand(case.fact, names)
        except UserError as error:
            raise Problem(400, str(error)) from None

    async def _events(
        self, example: Example, question: Question, samples: int
    ) -> AsyncIterator[bytes]:
        named = {"defendants": list(example.names)}
        yield sse("start", named)
        try:
            async with aclosing(self._judge.stream(example, question, samples)) as events:
                async for event, data in events:
                    yield sse(event, {**named, **data} if event == "result" else data)
        except (UserError, VLLMError) as error:
            yield sse("error", Problem(503, f"the engine failed half way: {error}").body)

    async def labels(self) -> dict[str, Any]:
        """Return the label sets that answers are made of, with their counts in training."""
        labels = self._judge.asker.labels
        return {
            "task": self._task,
            "labels": labels.counts,
            "most": labels.most,
            "law": self._law,
        }

    async def ready(self) -> dict[str, str]:
        """Say that requests can be answered: before that, the guard answers."""
        return {"status": "ready"}


def complaint(error: ValidationError) -> str:
    """Return the first thing that is wrong with a body, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{place!r} is not taken here; what is: {', '.join(Case.model_fields)}"
    return f"{place}: {first['msg']}"
