"""The loop that asks: a coroutine per example, each finished row written at once."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

from panjue.prompts.example import Decoded, Example, First, call_key, first_reply
from panjue.prompts.plumbing.errors import UserError
from panjue.serve.ask import Asker, Refusal, Row, Sampling, requests, row
from panjue.serve.endpoint import Endpoint
from panjue.serve.engine import Engine

T = TypeVar("T")

Write = Callable[[Row], None]
FindRow = Callable[[str], Row | None]
"""Key of a call (`prompts.example.call_key`) -> its row from an earlier run."""


def no_row(_: str) -> None:
    """Find no row: nothing was asked before."""


class Answerer:
    """Answers examples, with an engine or an endpoint."""

    def __init__(
        self,
        source: Engine | Endpoint,
        asker: Asker,
        slots: asyncio.Semaphore,
        passes: Sequence[Sampling] = ({},),
    ) -> None:
        """Take what answers and what makes questions; a call has one request for each pass."""
        self._source, self._asker, self._slots, self._passes = source, asker, slots, passes

    async def answer(self, example: Example, write: Write, find_row: FindRow = no_row) -> None:
        """Ask all questions of one example, and `write` the row of each call that has none yet."""
        answer = self._asker.task.answer
        solving, replies, number = answer.solving(example), None, 0
        while True:
            try:
                questions = solving.send(replies)  # type: ignore[arg-type]  # None starts it
            except StopIteration:
                return
            calls = [
                (key_fields(answer, example, call, question), question)
                for call, question in enumerate(questions, start=number)
            ]
            replies = await all_of(self._reply(*call, write, find_row) for call in calls)
            number += len(questions)

    async def _reply(self, key: Row, question: Example, write: Write, find_row: FindRow) -> Decoded:
        """Return the decoded reply to one call, from its old row if there is one."""
        result = find_row(call_key(key))
        if result is None:
            async with self._slots:
                result = {**key, **await self._ask(question)}
                write(result)
        elif result.get("question") != key.get("question"):
            raise UserError(
                f"id {key['id']}: call {key['call']} was {result.get('question')!r}, now it is "
                f"{key['question']!r}; name another folder with answers=NAME"
            )
        return self._asker.task.ask.decode(first_reply(result), question, self._asker.labels)

    async def _ask(self, question: Example) -> Row:
        """Return the row of one call, without its key."""
        try:
            asked = self._asker.question(question)
        except Refusal as refusal:
            return {"refused": str(refusal)}
        passes = requests(question.id, asked, self._passes)
        outputs = await all_of(self._source.ask(request) for request in passes)
        pairs = list(zip(passes, outputs, strict=True))
        return row(pairs)


def key_fields(answer: First, example: Example, number: int, question: Example) -> Row:
    """Return the fields that name a call in its row."""
    if not answer.several_calls:
        return {"id": example.id}
    return {"id": example.id, "call": number, "question": str(question.id)}


async def all_of(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order; wait for every coroutine before the first error is raised."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], results)


async def answer_all(
    examples: Iterable[Example],
    answer: Callable[[Example], Coroutine[Any, Any, None]],
    slots: asyncio.Semaphore,
) -> None:
    """Answer examples, each in a coroutine; one is drawn when all questions so far have a slot.

    So memory stays constant, and the next prompts are prepared while others are answered. After an
    error no example is drawn; those under way are finished first, so that their rows are kept.
    """
    running: set[asyncio.Task[None]] = set()
    errors: list[BaseException] = []

    def finished(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            errors.append(error)

    try:
        for example in examples:
            async with slots:
                pass  # questions wait in line, and so does the next example
            if errors:
                break
            task = asyncio.create_task(answer(example))
            running.add(task)
            task.add_done_callback(finished)
            await asyncio.sleep(0)  # it gets in line
        while running:
            await asyncio.wait(running)
    finally:
        for task in running:
            task.cancel()
        while running:
            await asyncio.wait(running)
    if errors:
        raise errors[0]
