"""Answer one case at a time: ask, decode and decide as in offline generation."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from itertools import count
from typing import Any, TypeVar

from panjue.eval.decide import Decider
from panjue.prompts.example import Example, first_reply
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.task import Task
from panjue.serve.alternatives import ALTERNATIVES
from panjue.serve.ask import Asker
from panjue.serve.rows import row
from panjue.serve.source import OnText, Question, Source, ignore_text, requests

T = TypeVar("T")


class Judge:
    """Answers examples, many at once."""

    def __init__(self, asker: Asker, decider: Decider | None, source: Source[Any]) -> None:
        """Take an asker, a decider (None if the task has none) and an engine or endpoint."""
        self.asker, self._decider, self._source = asker, decider, source
        self._numbers = count()

    @property
    def task(self) -> Task:
        """Return the task of the server."""
        return self.asker.task

    async def answer(
        self, example: Example, question: Question, samples: int, on_text: OnText = ignore_text
    ) -> dict[str, Any]:
        """Return the body of `POST /v1/judgments`; `on_text` receives the greedy reply in pieces.

        Raises:
            UserError: The engine or the endpoint has failed.
        """
        passes: list[dict[str, Any]] = [{"logprobs": ALTERNATIVES}]
        passes += [{"logprobs": ALTERNATIVES, "n": samples, "temperature": 1.0}] if samples else []
        first, *further = requests(next(self._numbers), question, passes)
        outputs = await gather_or_cancel(
            self._source.ask(first, on_text), *map(self._source.ask, further)
        )
        pairs = list(zip((first, *further), outputs, strict=True))
        completion = row(pairs, self.asker.tokenizer, with_alternatives=True)
        if "refused" in completion:
            raise UserError(completion["refused"])
        usage = {name: completion[name] for name in ("prompt_tokens", "completion_tokens")}
        return {
            **await asyncio.to_thread(self._decide, example, completion),
            "finish": completion["finish"][0],
            "dropped_sentences": question.dropped,
            "loosened_schema": question.loosened,
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }

    async def stream(
        self, example: Example, question: Question, samples: int
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield a `delta` event for each piece of the greedy reply, then the `result`.

        Raises:
            UserError: As for `answer`.
        """
        pieces: asyncio.Queue[str] = asyncio.Queue()
        answering = asyncio.create_task(
            self.answer(example, question, samples, on_text=pieces.put_nowait)
        )
        answering.add_done_callback(lambda _: pieces.put_nowait(""))
        try:
            while not answering.done() or not pieces.empty():
                if piece := await pieces.get():
                    yield "delta", {"text": piece}
            yield "result", await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _decide(self, example: Example, completion: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, its confidence, and the repairs of the first reply."""
        decoded = self.task.ask.decode(first_reply(completion), example, self.asker.labels)
        answer, confidence = decoded.answer, {}
        is_alone = len(completion["texts"]) == 1 and not (self._decider and self._decider.pool)
        # A single reply without alternatives (from an endpoint) gives no probabilities.
        if self._decider and (completion["alternatives"] or not is_alone):
            decision = self._decider.decide(example, completion, echo=is_alone)
            answer = decision.answer
            confidence = {"confidence": decision.confidence, "probabilities": decision.classes}
        submission = self.task.data.write(example, answer)
        del submission["id"]
        return {**submission, "answer": answer, **confidence, "repairs": list(decoded.repairs)}


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Return the results of all coroutines; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
