"""One case, asked by hand: the question to what answers, replies decoded and decided as offline."""

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
    """Answers examples, any number at a time."""

    def __init__(self, asker: Asker, decider: Decider | None, source: Source[Any]) -> None:
        """Take what makes questions, what decides (None for tasks without), and what answers."""
        self.asker, self._decider, self._source = asker, decider, source
        self._numbers = count()

    @property
    def task(self) -> Task:
        """Return the task that is served."""
        return self.asker.task

    async def answer(
        self, example: Example, question: Question, samples: int, on_text: OnText = ignore_text
    ) -> dict[str, Any]:
        """Return the answer as the endpoint gives it; `on_text` gets the greedy reply as it comes.

        Raises:
            UserError: There is none: what answers has failed.
        """
        passes: list[dict[str, Any]] = [{"logprobs": ALTERNATIVES}]
        passes += [{"logprobs": ALTERNATIVES, "n": samples, "temperature": 1.0}] if samples else []
        first, *further = requests(next(self._numbers), question, passes)
        asked = (self._source.ask(first, on_text), *map(self._source.ask, further))
        outputs = await together(*asked)
        made = row(
            list(zip((first, *further), outputs, strict=True)),
            self.asker.tokenizer,
            with_alternatives=True,
        )
        if "refused" in made:
            raise UserError(made["refused"])
        usage = {name: made[name] for name in ("prompt_tokens", "completion_tokens")}
        return {
            **await asyncio.to_thread(self._judged, example, made),
            "finish": made["finish"][0],
            "dropped_sentences": question.dropped,
            "loosened_schema": question.loosened,
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }

    async def stream(
        self, example: Example, question: Question, samples: int
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield `delta` events as the greedy reply grows, and then the `result`.

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

    def _judged(self, example: Example, made: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, how sure it is, and what was mended in the first reply."""
        decoded = self.task.ask.decode(first_reply(made), example, self.asker.labels)
        answer, sure = decoded.answer, {}
        is_one = len(made["texts"]) == 1
        if self._decider and (
            made["alternatives"] or not is_one
        ):  # one reply of an endpoint says nothing
            decision = self._decider.decide(example, made, echo=is_one)
            answer = decision.answer
            sure = {"confidence": decision.confidence, "probabilities": decision.classes}
        submission = self.task.data.write(example, answer)
        del submission["id"]
        return {**submission, "answer": answer, **sure, "repairs": list(decoded.repairs)}


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Return what all of `work` returns; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
