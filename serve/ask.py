"""Example -> question -> request, and the replies to it -> a row of `completions.jsonl`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import llguidance.hf
from llguidance import LLMatcher

from panjue.eval.opinions import Advisor, Opinion
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.shorten import ShortenedPrompt, shortened_prompt
from panjue.prompts.task import Messages, Schema, Task

Sampling = Mapping[str, Any]
"""Arguments of vLLM's SamplingParams, or of OpenAI; `temperature` is 0 by default."""

OnText = Callable[[str], None]  # callback that receives each new piece of a reply

Row = dict[str, Any]  # a row of `completions.jsonl`

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes an incomplete character to


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


class Asker:
    """Turns examples into questions: shortens and renders prompts, builds and checks schemas."""

    def __init__(
        self,
        task: Task,
        labels: Labels,
        model: Path | None = None,
        max_tokens: int = 0,
        *,
        constrained: bool = True,
        advisor: Advisor | None = None,
    ) -> None:
        """Load the tokenizer from the folder `model`, the model that will answer.

        Without it, for an endpoint with another tokenizer, prompts are not shortened, and the
        endpoint limits the replies. With an `advisor` prompts show its opinions.
        """
        self.task, self.labels, self.max_tokens = task, labels, max_tokens
        self.longest = max_tokens  # what the engine takes: for cases that `max_tokens` cannot hold
        self.tokenizer: Any = load_tokenizer(model) if model else None
        self._grammar_tokenizer = model and llguidance.hf.from_tokenizer(self.tokenizer)
        self._constrained = constrained
        self._advisor = advisor

    def question(self, example: Example, opinions: Sequence[Opinion] | None = None) -> Question:
        """Return the question for one example; raise Refusal if it cannot be asked.

        `opinions` are the advisor's on this example, if they are known already.
        """
        if self._advisor:
            example = self._advisor.show(example, opinions)
        schema = self.task.ask.schema(example, self.labels) if self._constrained else None
        if self.tokenizer is None:
            return Question([], schema, 0, 0, self.task.ask.prompt(example))
        limit, asked = self.max_tokens, self._shortened(example, self.max_tokens)
        for longer in (min(limit + asked.room, self.longest), self.longest):
            if longer > limit and not asked.shortened.fits:  # as little as the case needs
                limit, asked = longer, self._shortened(example, longer)
        shortened, messages, prompt, room = asked
        if not shortened.fits:
            opinions = ", or train with opinions=false" if self._advisor else ""
            raise Refusal(
                f"the prompt needs {len(prompt)} tokens and the reply {room}, and max_tokens is "
                f"{self.longest}; shorten the text, give the engine more memory{opinions}"
            )
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


def row(passes: Sequence[tuple[Request, Any]]) -> Row:
    """Return the row of one call, from the outputs of its requests; the first reply comes first."""
    request, _ = passes[0]
    refused = next((o.refused for _, o in passes if getattr(o, "refused", "")), "")
    if refused:
        return {"refused": refused}
    replies = [reply for _, output in passes for reply in output.outputs]
    if replies[0].finish_reason == "error" and not replies[0].text:
        return {"refused": "the engine failed on this request"}
    replies = replies[:1] + [reply for reply in replies[1:] if reply.finish_reason != "error"]
    return {
        "texts": [reply.text for reply in replies],
        "finish": [reply.finish_reason for reply in replies],
        # An endpoint counts them; the engine gets our own prompt.
        "prompt_tokens": sum(
            getattr(output, "prompt_tokens", len(asked.question.prompt)) for asked, output in passes
        ),
        "cached_tokens": sum(output.num_cached_tokens or 0 for _, output in passes),
        "completion_tokens": sum(len(reply.token_ids) for reply in replies),
        "dropped_sentences": request.question.dropped,
    }
