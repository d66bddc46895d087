"""One way to ask: requests, what answers them, and one loop over any number of them."""

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.task import Messages, Schema

POLL_S = 0.5
"""How often, at the least, `complete` looks whether it is to end."""

Sampling = Mapping[str, Any]
"""How a reply is sampled, in the words of vLLM's SamplingParams and of OpenAI: `temperature`, 0
where it is left out, `n`, `max_tokens`, …"""

Grow = Callable[[str], None]
"""Is given each piece of a reply as it comes."""

Outcome_co = TypeVar("Outcome_co", covariant=True)


def quiet(_: str) -> None:
    """Do nothing with a piece of a reply."""


class Refusal(Exception):
    """One example cannot be asked; its message says why."""


class Question(NamedTuple):
    """What is asked.

    Attributes:
        prompt: Token ids up to where the reply begins.
        schema: Of the reply; None where it is free.
        room: Tokens left for the reply.
        dropped: Sentences that `fit` left out of the prompt.
        loosened: Whether the schema is a smaller one than the task's.
        messages: The prompt as an endpoint that has its own tokenizer takes it.
    """

    prompt: list[int]
    schema: Schema | None
    room: int
    dropped: int
    loosened: bool = False
    messages: Messages = []  # noqa: RUF012  # never changed


@dataclass(frozen=True)
class Request:
    """One question and how to sample its reply.

    Attributes:
        id: The example's id.
        question: What is asked.
        sampling: How the reply is sampled.
        sampling_pass: 0, 1, … of the requests that together make one example's row.
    """

    id: int | str
    question: Question
    sampling: Sampling
    sampling_pass: int = 0

    @property
    def is_greedy(self) -> bool:
        """Say whether the reply is the likeliest one."""
        return not self.sampling.get("temperature")


def requests(key: int | str, question: Question, passes: Sequence[Sampling]) -> list[Request]:
    """Return the requests that put one question, one for each of `passes`: greedy by default."""
    return [Request(key, question, sampling, number) for number, sampling in enumerate(passes)]


class Source(Protocol[Outcome_co]):
    """What answers requests."""

    @property
    def runner(self) -> asyncio.Runner | None:
        """Return the runner of its event loop; None where that runs already."""
        ...

    async def ask(self, request: Request, grow: Grow = quiet) -> Outcome_co:
        """Return what it answers; cancelled, it lets go of the request.

        Args:
            request: What is asked.
            grow: Is given the pieces of the first reply as they come.

        Raises:
            UserError: It can answer no more.
        """
        ...


class Pending:
    """Requests that are drawn as there is room for them.

    Attributes:
        exhausted: Whether no more will come.
    """

    def __init__(self, requests: Iterable[Request | None]) -> None:
        """Take the requests; None among them says that the next depends on an output to come."""
        self._requests, self.exhausted = iter(requests), False

    def draw(self, most: int) -> Iterator[Request]:
        """Yield the next requests, at most so many, as far as they depend on nothing to come."""
        end = object()
        while most > 0 and not self.exhausted:
            request = next(self._requests, end)
            self.exhausted = request is end
            if not isinstance(request, Request):
                return
            most -= 1
            yield request


def complete(
    source: Source[Outcome_co],
    requests: Iterable[Request | None],
    in_flight: int,
    check: Callable[[], None] = lambda: None,
) -> Generator[tuple[Request, Outcome_co], None, None]:
    """Yield every request with its outcome, in the order they finish.

    Requests are drawn one by one, at most `in_flight` run at once: memory stays flat and preparing
    the next prompts overlaps with decoding. None among them says that the next depends on an
    outcome that is still to come. `check` is called between outcomes, and twice a second.

    Raises:
        UserError: The source can answer no more; what runs is waited for and yielded first.
    """
    runner = source.runner
    assert runner, "a loop that runs already awaits `ask`"
    pending, failure = Pending(requests), None
    running: dict[asyncio.Task[Outcome_co], Request] = {}
    try:
        while running or not pending.exhausted:
            check()
            for request in pending.draw(in_flight - len(running)):
                task = runner.get_loop().create_task(source.ask(request))
                running[task] = request
            if not running:
                return  # the next depends on an outcome that nobody has handed on
            for task in runner.run(_some(running)):
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
        if running:  # else whoever asks this source next waits for their outcomes too
            runner.run(_cancelled(running))


async def _some(running: Iterable[asyncio.Task[Outcome_co]]) -> set[asyncio.Task[Outcome_co]]:
    """Return those that are done by now, of which there may be none."""
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait(running, timeout=POLL_S, return_when=first)
    return done


async def _cancelled(running: Iterable[asyncio.Task[Any]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.wait(running)
