"""Questions and requests, and the protocol of what answers them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from panjue.prompts.task import Messages, Schema

Sampling = Mapping[str, Any]
"""Sampling settings with the names of vLLM's SamplingParams and of OpenAI: `temperature` (0 by
default), `n`, `max_tokens`, …"""

OnText = Callable[[str], None]
"""Callback that receives each new piece of a reply."""


def ignore_text(_: str) -> None:
    """Ignore a piece of a reply."""


class Refusal(Exception):
    """One example cannot be asked; the message says why."""


class Question(NamedTuple):
    """The prompt of one call, and the form of its reply.

    Attributes:
        prompt: Token ids up to where the reply begins; empty for an endpoint's own tokenizer.
        schema: JSON Schema of the reply; None for free text.
        room: Tokens left for the reply; 0 leaves the limit to the endpoint.
        dropped: Number of sentences that were left out of the prompt.
        messages: The prompt as chat messages, for an endpoint.
    """

    prompt: list[int]
    schema: Schema | None
    room: int
    dropped: int
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


class Source(Protocol):
    """What answers requests: an engine or an endpoint.

    Attributes:
        runner: The runner of its event loop; None if that loop is running already.
    """

    runner: asyncio.Runner | None

    async def ask(self, request: Request, on_text: OnText = ignore_text) -> Any:
        """Return a RequestOutput of vLLM, or an object with its fields; when cancelled, abort it.

        An engine calls `on_text` with each new piece of the first reply.

        Raises:
            UserError: It can no longer answer.
        """
        ...
