"""Example -> question: a prompt that fits, and the schema that the reply must obey."""

import json
from pathlib import Path
from typing import Any

import llguidance.hf
from llguidance import LLMatcher

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.shorten import shortened_prompt
from panjue.prompts.task import Schema, Task
from panjue.serve.source import Question, Refusal


class Asker:
    """Turns examples into questions: fits and renders the prompt, builds and checks the schema."""

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
            Refusal: The prompt cannot be shortened enough, or the grammar library refuses both the
                schema and the looser one.
        """
        shortened, messages, prompt, room = shortened_prompt(
            self.task, example, self.labels, self.tokenizer, self.max_tokens
        )
        limit = f"max_tokens is {self.max_tokens}"
        if room >= self.max_tokens:
            raise Refusal(f"its reply alone needs {room} tokens; {limit}")
        if not shortened.fits:
            raise Refusal(f"the prompt needs {len(prompt)} tokens and the reply {room}; {limit}")
        max_reply = self.max_tokens - len(prompt)
        question = Question(prompt, None, max_reply, shortened.dropped, messages=messages)
        if not self._constrained:
            return question
        schema = self.task.ask.schema(example, self.labels)
        problem = self._problem(schema)
        if not problem:
            return question._replace(schema=schema)
        looser = loosened(schema)
        if self._problem(looser):
            raise Refusal(f"the grammar library refuses its schema: {problem}")
        return question._replace(schema=looser, loosened=True)

    def _problem(self, schema: Schema) -> str:
        """Return why the grammar library refuses a schema; empty if it does not.

        vLLM itself refuses a schema only when its grammar cannot be parsed. When a grammar fails
        later, at compilation, vLLM returns an empty reply and writes only a log line.
        """
        options = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        problem = LLMatcher(self._grammar_tokenizer, grammar, log_level=0).get_error()
        return problem.splitlines()[0] if problem else ""


def loosened(schema: Any) -> Any:
    """Return a looser JSON Schema: a `const` string becomes any string, enums stay closed.

    Array items that are then equal (defendants without their names) are described once.
    """
    if isinstance(schema, list):
        return [loosened(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("const"), str):
        return {"type": "string"}
    result = {key: loosened(value) for key, value in schema.items()}
    items = result.get("prefixItems", [])
    if items and all(item == items[0] for item in items):
        del result["prefixItems"]
        result |= {"items": items[0], "minItems": len(items), "maxItems": len(items)}
    return result
