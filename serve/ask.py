"""Example -> question: a prompt that fits, and the schema that the reply must obey."""

import json
from pathlib import Path

import llguidance.hf
from llguidance import LLMatcher

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.shorten import shortened_prompt
from panjue.prompts.task import Schema, Task
from panjue.serve.source import Question, Refusal


class Asker:
    """Turns examples into questions: shortens and renders prompts, builds and checks schemas."""

    def __init__(
        self, task: Task, labels: Labels, model: Path, max_tokens: int, *, constrained: bool = True
    ) -> None:
        """Load the tokenizer from the folder `model`, the model that will answer."""
        self.task, self.labels, self.max_tokens = task, labels, max_tokens
        self.tokenizer = load_tokenizer(model)
        self._constrained = constrained
        self._grammar_tokenizer = llguidance.hf.from_tokenizer(self.tokenizer)

    def question(self, example: Example) -> Question:
        """Return the question for one example.

        Raises:
            Refusal: The prompt cannot be shortened enough, or the grammar library refuses the
                schema.
        """
        shortened, messages, prompt, room = shortened_prompt(
            self.task, example, self.labels, self.tokenizer, self.max_tokens
        )
        limit = f"max_tokens is {self.max_tokens}"
        if room >= self.max_tokens:
            raise Refusal(f"its reply alone needs {room} tokens; {limit}")
        if not shortened.fits:
            raise Refusal(f"the prompt needs {len(prompt)} tokens and the reply {room}; {limit}")
        schema = self.task.ask.schema(example, self.labels) if self._constrained else None
        if schema and (problem := self._problem(schema)):
            raise Refusal(f"the grammar library refuses its schema: {problem}")
        return Question(prompt, schema, self.max_tokens - len(prompt), shortened.dropped, messages)

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

    tokenizer = None

    def __init__(self, task: Task, labels: Labels, *, constrained: bool) -> None:
        """Take the task and its labels; the endpoint limits the replies."""
        self.task, self.labels, self._constrained = task, labels, constrained

    def question(self, example: Example) -> Question:
        """Return the question for one example."""
        schema = self.task.ask.schema(example, self.labels) if self._constrained else None
        return Question([], schema, 0, 0, messages=self.task.ask.prompt(example))
