"""Example -> question: the prompt that fits, the schema that its reply must obey."""

import json
from pathlib import Path
from typing import Any

import llguidance.hf
from llguidance import LLMatcher

from panjue.prompts.example import Example
from panjue.prompts.fit import fit_prompt
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.model import load_tokenizer
from panjue.prompts.task import Schema, Task
from panjue.serve.source import Question, Refusal


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
            Refusal: Its prompt cannot be shortened enough, or the grammar library takes neither
                its schema nor a smaller one.
        """
        fitted, messages, prompt, room = fit_prompt(
            self.task, example, self.labels, self.tokenizer, self.max_tokens
        )
        limit = f"max_tokens is {self.max_tokens}"
        if room >= self.max_tokens:
            raise Refusal(f"its reply alone needs {room} tokens; {limit}")
        if not fitted.fits:
            raise Refusal(f"the prompt needs {len(prompt)} tokens and the reply {room}; {limit}")
        space = self.max_tokens - len(prompt)
        free = Question(prompt, None, space, fitted.dropped, messages=messages)
        if not self._constrained:
            return free
        schema = self.task.ask.schema(example, self.labels)
        problem = self._problem(schema)
        if not problem:
            return free._replace(schema=schema)
        smaller = loosened(schema)
        if self._problem(smaller):
            raise Refusal(f"the grammar library refuses its schema: {problem}")
        return free._replace(schema=smaller, loosened=True)

    def _problem(self, schema: Schema) -> str:
        """Return why the grammar library refuses a schema, or nothing.

        vLLM refuses some such requests itself, and others it answers with an empty reply and only
        a log line: those whose grammar fails not when it is read, but when it is made ready.
        """
        options = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        problem = LLMatcher(self._grammar_tokenizer, grammar, log_level=0).get_error()
        return problem.splitlines()[0] if problem else ""


def loosened(schema: Any) -> Any:
    """Return a smaller JSON Schema: texts that were given are free, enums stay closed.

    Items that are alike then (defendants without their names) are described once.
    """
    if isinstance(schema, list):
        return [loosened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("const"), str):
        return {"type": "string"}
    made = {key: loosened(part) for key, part in schema.items()}
    items = made.get("prefixItems", [])
    if items and all(item == items[0] for item in items):
        del made["prefixItems"]
        made |= {"items": items[0], "minItems": len(items), "maxItems": len(items)}
    return made
