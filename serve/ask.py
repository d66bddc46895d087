"""Example -> request: the model that answers, the prompt that fits, the schema it must obey."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llguidance.hf
from llguidance import LLMatcher

from panjue.prompts.config import check_settings
from panjue.prompts.errors import UserError
from panjue.prompts.files import read_json
from panjue.prompts.fit import fit_prompt
from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer, model_folder
from panjue.prompts.render import prompt_ids
from panjue.prompts.task import Example, Schema, Task
from panjue.serve.engine import (
    LoRARequest,
    Request,
    SamplingParams,
    VLLMValidationError,
    on_cpu,
)
from panjue.serve.engine import RequestOutputKind as OutputKind
from panjue.serve.engine import StructuredOutputsParams as Structured
from panjue.serve.merge import check_base, merge

WAYS = 10
"""Likeliest tokens that are looked at where a reply forks."""


class Refusal(Exception):
    """One example cannot be asked; its message says why."""


class Served(NamedTuple):
    """The folder of the model that is started, and that of the adapter beside it, if any."""

    model: Path
    adapter: Path | None = None


def served_model(trained: Path, adapter: str) -> Served:
    """Return what to serve of a training's result.

    Args:
        trained: Result of a training: an adapter, or a whole model.
        adapter: `merge`, `lora` or `none`; see `GenerateConfig.adapter`.
    """
    manifest = read_json(trained / "manifest.json")
    if not (trained / "adapter_config.json").exists():
        if adapter == "lora":
            raise UserError(f"{trained}: is a whole model, there is no adapter; use adapter=merge")
        return Served(model_folder(manifest["base"]) if adapter == "none" else trained)
    if adapter == "merge":
        return Served(merge(trained, trained.with_name("merged")))
    return Served(check_base(trained, manifest), trained if adapter == "lora" else None)


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Refuse sampling settings that vLLM does not have or does not survive.

    Raises:
        UserError: Names the setting and what is wrong with it.
    """
    ours = {"structured_outputs": "constrained", "output_kind": "nothing: rows are final"}
    check_settings("sampling", sampling, SamplingParams.__struct_fields__, ours)
    if "seed" in sampling and on_cpu():
        raise UserError(
            "sampling.seed: a seed per request kills vLLM on the CPU; set the top-level seed"
        )
    try:
        SamplingParams(**{"temperature": 0.0, **sampling})
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise UserError(f"sampling: {str(error).splitlines()[0]}") from None


class Asker:
    """Turns examples into requests: fits, renders, builds and checks the schema."""

    def __init__(
        self,
        task: Task,
        labels: Labels,
        served: Served,
        max_tokens: int,
        turns: Sequence[Mapping[str, Any]] = ({},),
        *,
        constrained: bool = True,
    ) -> None:
        """Load the model's tokenizer; `turns` has the sampling of each request per example.

        It was checked before and is greedy by default.
        """
        self.task, self.labels, self.max_tokens = task, labels, max_tokens
        self.tokenizer = load_tokenizer(served.model)
        adapter = served.adapter
        self.lora = LoRARequest("adapter", 1, str(adapter)) if adapter else None
        self.lora_rank = read_json(adapter / "adapter_config.json")["r"] if adapter else 0
        self._constrained = constrained
        self._turns = [{"temperature": 0.0, **turn} for turn in turns]
        self._grammar_tokenizer = llguidance.hf.from_tokenizer(self.tokenizer)

    @property
    def turns(self) -> int:
        """Return the number of requests that one example takes."""
        return len(self._turns)

    def requests(self, example: Example) -> list[Request]:
        """Return the requests for one example, one for each of `turns`.

        Raises:
            Refusal: Its prompt cannot be shortened enough, or its schema is none that works.
        """
        fitted = fit_prompt(self.task, example, self.labels, self.tokenizer, self.max_tokens)
        if not fitted.fits:
            raise Refusal(
                f"the prompt needs {fitted.tokens} tokens, max_tokens is {self.max_tokens}"
            )
        prompt = prompt_ids(self.tokenizer, self.task.prompt(fitted.example))
        schema = self.task.schema(example, self.labels) if self._constrained else None
        if schema:
            self._check(schema)
        return [
            Request(example.id, prompt, self._params(turn, schema, len(prompt)), fitted.dropped, i)
            for i, turn in enumerate(self._turns)
        ]

    def _params(self, turn: Mapping[str, Any], schema: Schema | None, used: int) -> SamplingParams:
        return SamplingParams(
            **{"max_tokens": self.max_tokens - used, **turn},
            structured_outputs=Structured(json=schema) if schema else None,
            output_kind=OutputKind.FINAL_ONLY,
        )

    def _check(self, schema: Schema) -> None:
        """Refuse a schema that vLLM would answer with an empty reply and only a log line."""
        options = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        problem = LLMatcher(self._grammar_tokenizer, grammar, log_level=0).get_error()
        if problem:
            raise Refusal(f"the grammar library refuses its schema: {problem.splitlines()[0]}")
