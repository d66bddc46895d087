"""One case, asked by hand: question to the engine, replies decoded and decided as offline."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from panjue.eval.decide import Decider
from panjue.prompts.task import Example, Task
from panjue.serve.ask import Asker, Question
from panjue.serve.backend import Backend, Unavailable
from panjue.serve.forks import WAYS, forks
from panjue.serve.settings import NAME

T = TypeVar("T")


@dataclass
class Reply:
    """One completion as it comes, in pieces or whole."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    options: list[dict[int, float]] = field(default_factory=list)
    finish: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """Take a piece of vLLM's answer; tokens are told by id, as `token_id:123`.

        Raises:
            Unavailable: The engine was told to end, and its replies with it.
        """
        self.text += choice["text"]
        self.finish = choice.get("finish_reason") or self.finish
        if self.finish == "abort":
            raise Unavailable("the engine is ending")
        told = choice.get("logprobs") or {"tokens": [], "top_logprobs": []}
        self.tokens += map(_id, told["tokens"])
        self.options += [
            {_id(token): p for token, p in (here or {}).items()} for here in told["top_logprobs"]
        ]


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


class Judge:
    """Answers examples through an engine's completions endpoint."""

    def __init__(self, asker: Asker, decider: Decider | None, backend: Backend) -> None:
        """Take what makes questions, what decides (None for tasks without), and the engine."""
        self.asker, self._decider, self._backend = asker, decider, backend

    @property
    def task(self) -> Task:
        """Return the task that is served."""
        return self.asker.task

    async def question(self, example: Example) -> Question:
        """Return what to ask; made in a thread, since a long case takes a while to fit.

        Raises:
            Refusal: The example cannot be asked.
        """
        return await asyncio.to_thread(self.asker.question, example)

    async def answer(self, example: Example, question: Question, samples: int) -> dict[str, Any]:
        """Return the answer as the endpoint gives it."""
        turns = [self._first(question)]
        turns += [self._further(question, samples)] if samples else []
        wholes = await together(*(self._whole(turn) for turn in turns))
        replies = [reply for of_turn, _ in wholes for reply in of_turn]
        return await self._result(example, question, replies, [usage for _, usage in wholes])

    async def stream(
        self, example: Example, question: Question, samples: int
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield `delta` events as the greedy reply grows, and then the `result`."""
        further = None
        if samples:
            further = asyncio.create_task(self._whole(self._further(question, samples)))
        try:
            reply, usage = Reply(), dict[str, Any]()
            first = {**self._first(question), "stream": True}
            first["stream_options"] = {"include_usage": True}
            async with aclosing(self._backend.events("/v1/completions", first)) as pieces:
                async for piece in pieces:
                    usage = piece.get("usage") or usage
                    for choice in piece["choices"]:
                        reply.add(choice)
                        yield "delta", {"text": choice["text"]}
            replies, usages = [reply], [usage]
            if further:
                more, used = await further
                replies, usages = [reply, *more], [usage, used]
            yield "result", await self._result(example, question, replies, usages)
        finally:
            if further:
                further.cancel()
                await asyncio.gather(further, return_exceptions=True)

    def _first(self, question: Question) -> dict[str, Any]:
        return {
            "model": NAME,  # an adapter beside its base is asked by its own name
            "prompt": question.prompt,
            "max_tokens": question.room,
            "temperature": 0.0,
            "logprobs": WAYS,
            "return_tokens_as_token_ids": True,
            "structured_outputs": {"json": question.schema} if question.schema else None,
        }

    def _further(self, question: Question, samples: int) -> dict[str, Any]:
        return {**self._first(question), "n": samples, "temperature": 1.0}

    async def _whole(self, turn: dict[str, Any]) -> tuple[list[Reply], dict[str, Any]]:
        # Many samples with their probabilities are megabytes: not for the event loop.
        return await asyncio.to_thread(_read, await self._backend.whole("/v1/completions", turn))

    async def _result(
        self,
        example: Example,
        question: Question,
        replies: Sequence[Reply],
        usages: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        judged = await asyncio.to_thread(self._judged, example, replies)
        counted = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = {name: sum(used.get(name, 0) for used in usages) for name in counted}
        return {
            **judged,
            "finish": replies[0].finish,
            "dropped_sentences": question.dropped,
            "loosened_schema": question.loosened,
            "usage": usage,
        }

    def _judged(self, example: Example, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the answer, how sure it is, and what was mended in the first reply."""
        decoded = self.task.decode(replies[0].text, example, self.asker.labels)
        row = {
            "texts": [reply.text for reply in replies],
            "forks": [forks(r.tokens, r.options, self.asker.tokenizer) for r in replies],
        }
        answer, sure = decoded.answer, {}
        if self._decider:
            decision = self._decider.decide(example, row, echo=len(replies) == 1)
            answer = decision.answer
            sure = {"confidence": decision.confidence, "probabilities": decision.classes}
        submission = self.task.submission(example, answer)
        del submission["id"]
        return {**submission, "answer": answer, **sure, "repairs": list(decoded.repairs)}


def _read(body: bytes) -> tuple[list[Reply], dict[str, Any]]:
    """Return the replies and the usage of a completion."""
    answered = json.loads(body)
    replies = []
    for choice in sorted(answered["choices"], key=lambda choice: choice["index"]):
        replies.append(Reply())
        replies[-1].add(choice)
    return replies, answered["usage"]


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Return what all of `work` returns; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def sse(event: str, data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"event: {event}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
