"""Example -> question: the prompt that fits, the schema that its reply must obey."""

import json
from pathlib import Path
from typing import NamedTuple

import llguidance.hf
from llguidance import LLMatcher

from panjue.prompts.fit import fit_prompt, reply_room
from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.render import prompt_ids
from panjue.prompts.task import Example, Schema, Task


class Refusal(Exception):
    """One example cannot be asked; its message says why."""


class Question(NamedTuple):
    """What an engine is asked.

    Attributes:
        prompt: Token ids up to where the reply begins.
        schema: Of the reply; None where it is free.
        room: Tokens left for the reply.
        dropped: Sentences that `fit` left out of the prompt.
    """

    prompt: list[int]
    schema: Schema | None
    room: int
    dropped: int


class Asker:
    """Makes questions of examples: fits, renders, builds and checks the schema."""

    def __init__(
        self, task: Task, labels: Labels, model: Path, max_tokens: int, *, constrained: bool = True
    ) -> None:
        """Load the tokenizer of the model folder that will answer."""
        self.task, self.labels, self.max_tokens = task, labels, max_tokens
        self.tokenizer = load_tokenizer(model)
        self._constrained = constrained
        self._grammar_tokenizer = llguidance.hf.from_tokenizer(self.tokenizer)

    def question(self, example: Example) -> Question:
        """Return what to ask for one example.

        Raises:
            Refusal: Its prompt cannot be shortened enough, or its schema is none that works.
        """
        room = reply_room(self.task, example, self.labels, self.tokenizer)
        if room >= self.max_tokens:  # found before a long text is shortened in vain
            raise Refusal(f"its reply alone needs {room} tokens; max_tokens is {self.max_tokens}")
        fitted = fit_prompt(self.task, example, self.labels, self.tokenizer, self.max_tokens)
        if not fitted.fits:
            raise Refusal(
                f"the prompt needs {fitted.tokens} tokens and the reply {room}; "
                f"max_tokens is {self.max_tokens}"
            )
        prompt = prompt_ids(self.tokenizer, self.task.prompt(fitted.example))
        schema = self.task.schema(example, self.labels) if self._constrained else None
        if schema:
            self._check(schema)
        return Question(prompt, schema, self.max_tokens - len(prompt), fitted.dropped)

    def _check(self, schema: Schema) -> None:
        """Refuse a schema that vLLM would answer with an empty reply and only a log line."""
        options = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        problem = LLMatcher(self._grammar_tokenizer, grammar, log_level=0).get_error()
        if problem:
            raise Refusal(f"the grammar library refuses its schema: {problem.splitlines()[0]}")
