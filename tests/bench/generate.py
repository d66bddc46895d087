"""What the schema costs, and what the engine gains: four ways on the same cases.

    python -m tests.bench.generate TRAINED_FOLDER CASES.jsonl [--limit 64]

TRAINED_FOLDER is an adapter or model folder of a run (it has labels.json). Prints, on the same
prompts: the engine without a schema, with one schema per case, and with one schema for all (names
free), then transformers' generate. The runs without a schema are made to write exactly as many
tokens per case as the run with one, so that the figures compare speed and not lengths.
"""

import asyncio
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from panjue.prompts.plumbing.run import Run
from panjue.prompts.task import Schema
from panjue.serve.ask import Budget, Request, row
from panjue.serve.engine import Engine, RequestOutput, engine
from panjue.serve.job import make_job
from panjue.serve.settings import GenerateConfig
from tests.bench.common import askable, in_turns, parser, print_rates

HF_BATCH = 16
IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"


def main() -> None:
    """Run all ways and print the table."""
    options = parser(__doc__)
    options.add_argument("trained", type=Path)
    options.add_argument("cases", type=Path)
    options.add_argument("--limit", type=int, default=64)
    options.add_argument("--dtype", default="auto" if IS_GPU else "bfloat16")
    given = options.parse_args()
    job = make_job(Run(given.trained), GenerateConfig.model_validate({})).with_model()
    assert job.served
    pairs = askable(job.asker(), given.cases, given.limit)
    own = [Request(example.id, question, {}) for example, question in pairs]
    # Without prefix cache: every round must do all the work again.
    settings: dict[str, Any] = {"dtype": given.dtype, "enable_prefix_caching": False}
    settings |= {} if IS_GPU else {"max_num_seqs": 32}
    with engine(job.served, settings, Budget(job.budget.usual, job.budget.usual), seed=0) as llm:
        lengths = answer(llm, own)  # also warms up
        ways = all_ways(own, lengths)
        rates = in_turns({way: partial(rate, llm, ways[way]) for way in ways})
    free = ways["no schema"]
    rates["transformers.generate"] = [transformers_rate(job.served.model, given.dtype, free)]
    print(f"{len(own)} cases, {sum(lengths)} tokens")
    print_rates(rates, "tokens/s", "no schema")


def rate(llm: Engine, requests: list[Request]) -> float:
    """Return the tokens a second of one round."""
    began = time.perf_counter()
    return sum(answer(llm, requests)) / (time.perf_counter() - began)


def answer(llm: Engine, requests: list[Request]) -> list[int]:
    """Make the row of every reply, as `generate` does; return how many tokens each has."""

    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*map(llm.ask, requests))

    outputs = llm.runner.run(ask())
    for request, output in zip(requests, outputs, strict=True):
        row(request.question, [output])
    return [len(output.outputs[0].token_ids) for output in outputs]


def all_ways(own: list[Request], lengths: list[int]) -> dict[str, list[Request]]:
    """Return the requests of each way of the engine, from those with a schema per case."""
    free = [
        replace(
            request,
            question=request.question._replace(schema=None),
            sampling={**request.sampling, "ignore_eos": True, "max_tokens": tokens},
        )
        for request, tokens in zip(own, lengths, strict=True)
    ]
    schema = schema_for_all(own[0].question.schema or {})
    return {
        "no schema": free,
        "a schema per case": own,
        "one schema for all": [
            replace(request, question=request.question._replace(schema=schema)) for request in own
        ],
    }


def schema_for_all(schema: Schema) -> Schema:
    """Open the names and their number: the one schema that fits every case."""
    every = deepcopy(schema)
    judgments = every["properties"]["judgments"]
    [item, *_] = judgments.pop("prefixItems")
    item["properties"]["name"] = {"type": "string", "maxLength": 12}
    judgments.update(items=item, minItems=1, maxItems=8)
    return every


def transformers_rate(model: Path, dtype: str, requests: list[Request]) -> float:
    """Return the tokens a second of the same prompts and lengths in batches, left-padded."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map=DEVICE).eval()
    began, tokens = time.perf_counter(), 0
    for start in range(0, len(requests), HF_BATCH):
        batch = requests[start : start + HF_BATCH]
        prompts = [torch.tensor(request.question.prompt) for request in batch]
        ids = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")
        wanted = [request.sampling["max_tokens"] for request in batch]
        with torch.inference_mode():
            network.generate(
                ids.clamp(min=0).to(DEVICE),
                attention_mask=(ids >= 0).long().to(DEVICE),
                do_sample=False,
                max_new_tokens=max(wanted),
                min_new_tokens=max(wanted),
            )
        tokens += sum(wanted)  # what a batch pads is waste
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
