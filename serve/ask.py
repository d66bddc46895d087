"""Example -> question -> request: a prompt that fits, and the schema that the reply must obey."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import llguidance.hf
from llguidance import LLMatcher

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.shorten import ShortenedPrompt, shortened_prompt
from panjue.prompts.task import Messages, Schema, Task

Sampling = Mapping[str, Any]
"""Arguments of vLLM's SamplingParams, or of OpenAI; `temperature` is 0 by default."""

OnText = Callable[[str], None]  # callback that receives each new piece of a reply


def ignore_text(_: str) -> None:
    """Ignore a piece of a reply."""


class Refusal(Exception):
    """One example cannot be asked; the message says why."""


class Question(NamedTuple):
    """The prompt of one call, and the form of its reply."""

    prompt: list[int]  # token ids; empty for an endpoint with another tokenizer
    schema: Schema | None  # of the reply; None for free text
    room: int  # tokens left for the reply; 0 leaves the limit to the endpoint
    dropped: int  # sentences that were left out of the prompt
    messages: Messages = []  # noqa: RUF012  # the prompt for an endpoint; never mutated


@dataclass(frozen=True)
class Request:
    """One question and how to sample its reply."""

    id: int | str
    question: Question
    sampling: Sampling
    sampling_pass: int = 0  # number of this request among those that make up one row

    @property
    def is_greedy(self) -> bool:
        """Say whether decoding is greedy."""
        return not self.sampling.get("temperature")


def requests(key: int | str, question: Question, passes: Sequence[Sampling]) -> list[Request]:
    """Return the requests for one question, one for each of `passes`; greedy by default."""
    return [Request(key, question, sampling, number) for number, sampling in enumerate(passes)]


class Source(Protocol):
    """What answers requests: an engine or an endpoint."""

    runner: asyncio.Runner | None
    """The runner of its event loop; None if that loop is running already."""

    async def ask(self, request: Request, on_text: OnText = ignore_text) -> Any:
        """Return a RequestOutput of vLLM, or an object with its fields; when cancelled, abort it.

        An engine calls `on_text` with each new piece of the first reply.
        """
        ...


class Asker:
    """Turns examples into questions: shortens and renders prompts, builds and checks schemas."""

    def __init__(
        self, task: Task, labels: Labels, model: Path, max_tokens: int, *, constrained: bool = True
    ) -> None:
        """Load the tokenizer from the folder `model`, the model that will answer."""
        self.task, self.labels, self.max_tokens = task, labels, max_tokens
        self.longest = max_tokens  # what the engine takes: for cases that `max_tokens` cannot hold
        self.tokenizer = load_tokenizer(model)
        self._constrained = constrained
        self._grammar_tokenizer = llguidance.hf.from_tokenizer(self.tokenizer)

    def question(self, example: Example) -> Question:
        """Return the question for one example; raise Refusal if it cannot be asked."""
        limit, asked = self.max_tokens, self._shortened(example, self.max_tokens)
        for longer in (min(limit + asked.room, self.longest), self.longest):
            if longer > limit and not asked.shortened.fits:  # as little as the case needs
                limit, asked = longer, self._shortened(example, longer)
        shortened, messages, prompt, room = asked
        if not shortened.fits:
            raise Refusal(
                f"the prompt needs {len(prompt)} tokens and the reply {room}, and max_tokens is "
                f"{self.longest}; shorten the text, or give the engine more memory"
            )
        schema = self.task.ask.schema(example, self.labels) if self._constrained else None
        if schema and (problem := self._problem(schema)):
            raise Refusal(f"the grammar library refuses its schema: {problem}")
        return Question(prompt, schema, limit - len(prompt), shortened.dropped, messages)

    def _shortened(self, example: Example, limit: int) -> ShortenedPrompt:
        return shortened_prompt(self.task, example, self.labels, self.tokenizer, limit)

    def _problem(self, schema: Schema) -> str:
        """Return why the grammar library refuses a schema; empty if it does not.

        vLLM itself refuses a schema only when its grammar cannot be parsed. When a grammar fails
        later, at compilation, vLLM returns an empty reply and writes only a log line.
        """
        options = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        problem = LLMatcher(self._grammar_tokenizer, grammar, log_level=0).get_error()
        return problem.splitlines()[0] if problem else ""


class PlainAsker:
    """Makes questions for an endpoint with another tokenizer; prompts are not shortened."""

    tokenizer, longest = None, 0

    def __init__(self, task: Task, labels: Labels, *, constrained: bool) -> None:
        """Take the task and its labels; the endpoint limits the replies."""
        self.task, self.labels, self._constrained = task, labels, constrained

    def question(self, example: Example) -> Question:
        """Return the question for one example."""
        schema = self.task.ask.schema(example, self.labels) if self._constrained else None
        return Question([], schema, 0, 0, messages=self.task.ask.prompt(example))
