"""Requests, the protocol of what answers them, and the loop that runs many of them at once."""

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.task import Messages, Schema

POLL_S = 0.5
"""Longest time between two calls of the `check` of `complete`."""

Sampling = Mapping[str, Any]
"""Sampling settings with the names of vLLM's SamplingParams and of OpenAI: `temperature` (0 by
default), `n`, `max_tokens`, …"""

OnText = Callable[[str], None]
"""Callback that receives each new piece of a reply."""

Outcome_co = TypeVar("Outcome_co", covariant=True)


def ignore_text(_: str) -> None:
    """Ignore a piece of a reply."""


class Refusal(Exception):
    """One example cannot be asked; the message says why."""


class Question(NamedTuple):
    """The prompt of one call, and the form of its reply.

    Attributes:
        prompt: Token ids up to where the reply begins.
        schema: JSON Schema of the reply; None for free text.
        room: Tokens left for the reply.
        dropped: Number of sentences that `shorten` left out of the prompt.
        loosened: Whether the schema is looser than the task's.
        messages: The prompt as chat messages, for an endpoint with its own tokenizer.
    """

    prompt: list[int]
    schema: Schema | None
    room: int
    dropped: int
    loosened: bool = False
    messages: Messages = []  # noqa: RUF012  # never mutated


@dataclass(frozen=True)
class Request:
    """One question and how to sample its reply.

    Attributes:
        id: The example's id.
        question: The prompt and the schema.
        sampling: How the reply is sampled.
        sampling_pass: Number of this request, from 0, among those that make up one row.
    """

    id: int | str
    question: Question
    sampling: Sampling
    sampling_pass: int = 0

    @property
    def is_greedy(self) -> bool:
        """Say whether decoding is greedy."""
        return not self.sampling.get("temperature")


def requests(key: int | str, question: Question, passes: Sequence[Sampling]) -> list[Request]:
    """Return the requests for one question, one for each of `passes`; greedy by default."""
    return [Request(key, question, sampling, number) for number, sampling in enumerate(passes)]


class Source(Protocol[Outcome_co]):
    """What answers requests: an engine or an endpoint."""

    @property
    def runner(self) -> asyncio.Runner | None:
        """Return the runner of its event loop; None if that loop is running already."""
        ...

    async def ask(self, request: Request, on_text: OnText = ignore_text) -> Outcome_co:
        """Return the outcome of a request; when cancelled, it aborts the request.

        Args:
            request: The request.
            on_text: Receives each new piece of the first reply.

        Raises:
            UserError: It can no longer answer.
        """
        ...


class Pending:
    """Requests that are not sent yet.

    Attributes:
        exhausted: Whether no requests are left.
    """

    def __init__(self, requests: Iterable[Request | None]) -> None:
        """Take the requests; None means that the next one needs a missing outcome."""
        self._requests, self.exhausted = iter(requests), False

    def draw(self, count: int) -> Iterator[Request]:
        """Yield at most `count` requests, and stop at one that needs a missing outcome."""
        end = object()
        while count > 0 and not self.exhausted:
            request = next(self._requests, end)
            self.exhausted = request is end
            if not isinstance(request, Request):
                return
            count -= 1
            yield request


def complete(
    source: Source[Outcome_co],
    requests: Iterable[Request | None],
    in_flight: int,
    check: Callable[[], None] = lambda: None,
) -> Generator[tuple[Request, Outcome_co], None, None]:
    """Yield every request with its outcome, in the order they finish.

    Requests are drawn one by one and at most `in_flight` run at once: memory use stays constant,
    and the next prompts are prepared during decoding. None among the requests means that the next
    one needs an outcome that is still missing. `check` is called between outcomes and at least
    twice a second; it may raise.

    Raises:
        UserError: The source can no longer answer; running requests are awaited and yielded first.
    """
    runner = source.runner
    assert runner, "in a running event loop, await `ask` instead"
    pending, failure = Pending(requests), None
    running: dict[asyncio.Task[Outcome_co], Request] = {}
    try:
        while running or not pending.exhausted:
            check()
            for request in pending.draw(in_flight - len(running)):
                task = runner.get_loop().create_task(source.ask(request))
                running[task] = request
            if not running:
                return  # the next request needs an outcome that the caller did not use
            first = asyncio.FIRST_COMPLETED
            done, _ = runner.run(asyncio.wait(running, timeout=POLL_S, return_when=first))
            for task in done:
                request = running.pop(task)
                error = task.exception()
                if error is None:
                    yield request, task.result()
                elif isinstance(error, UserError):
                    failure, pending.exhausted = failure or error, True
                else:
                    raise error
        if failure:
            raise failure
    finally:
        if running:  # else the next `complete` on this source would wait for them too
            runner.run(_cancel(running))


async def _cancel(running: Iterable[asyncio.Task[Any]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.wait(running)
