"""What schema and alternatives cost, and what the engine gains: five ways on the same cases.

    python tests/bench/generate.py TRAINED_FOLDER CASES.jsonl [--limit 64]

TRAINED_FOLDER is an adapter or model folder of a run (it has labels.json). Prints, on the same
prompts: the engine without a schema, with one schema per case, the same with the alternatives of
each reply's fields (which a run with a text classifier keeps to decide from both), and with one
schema for all (names free), then transformers' generate. The runs without a schema are made to
write exactly as many tokens per case as the run with one, so that the figures compare speed and not
lengths.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from panjue.prompts.example import Example
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.files import read_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import Schema, load_task
from panjue.serve.ask import ALTERNATIVES, Asker, Refusal, Request, requests, row
from panjue.serve.engine import Engine, RequestOutput, engine
from panjue.serve.merge import Served, served_model

HF_BATCH = 16
ROUNDS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Run all ways and print the table."""
    options = arguments()
    task = load_task("judgment")
    served = served_model(options.trained, "merge")
    labels = load_labels(options.trained / "labels.json")
    max_tokens = read_json(options.trained / "manifest.json")["max_tokens"]
    asker = Asker(task, labels, served.model, max_tokens)
    examples = list(islice(askable(asker, Reader(task).read(options.cases)), options.limit))
    with quiet_engine(served.model, options.dtype, max_tokens) as llm:
        own = [
            request
            for example in examples
            for request in requests(example.id, asker.question(example), [{"logprobs": 2}])
        ]
        lengths = run(llm, asker, own)[1]  # also warms up
        free = [without_schema(request, lengths[str(request.id)]) for request in own]
        shared = [
            with_schema(request, schema_for_all(task.ask.schema(examples[0], labels)))
            for request in own
        ]
        both = [replace(r, sampling={**r.sampling, "logprobs": ALTERNATIVES}) for r in own]
        ways = {
            "no schema": free,
            "a schema per case": own,
            "the same, alternatives": both,
            "one schema for all": shared,
        }
        rates: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):  # in turn, so that a drift of the machine hits all alike
            for name, put in ways.items():
                rates[name].append(timed(partial(run, llm, asker, put)))
    rates["transformers.generate"] = [
        timed(lambda: transformers_generate(served.model, options.dtype, free))
    ]
    report(rates, len(examples))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trained", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--dtype", default="auto" if DEVICE == "cuda" else "bfloat16")
    return parser.parse_args()


def askable(asker: Asker, examples: Iterator[Example]) -> Iterator[Example]:
    """Yield the examples that fit the model."""
    for example in examples:
        try:
            asker.question(example)
        except Refusal:
            continue
        yield example


def quiet_engine(model: Path, dtype: str, max_tokens: int) -> AbstractContextManager[Engine]:
    """Start the engine without prefix cache: every round must do all the work again."""
    settings: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False}
    settings |= {} if DEVICE == "cuda" else {"max_num_seqs": 32}
    return engine(Served(model), settings, max_tokens, seed=0)


def run(llm: Engine, asker: Asker, requests: list[Request]) -> tuple[int, dict[str, int]]:
    """Make the row of every reply, as `generate` does; return all output tokens and each case's."""

    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*map(llm.ask, requests))

    lengths = {}
    assert llm.runner
    for request, output in zip(requests, llm.runner.run(ask()), strict=True):
        wanted = request.sampling.get("logprobs") == ALTERNATIVES
        row([(request, output)], asker.tokenizer, with_alternatives=wanted)
        lengths[str(request.id)] = len(output.outputs[0].token_ids)
    return sum(lengths.values()), lengths


def without_schema(request: Request, tokens: int) -> Request:
    """Return the request for free text of exactly `tokens` tokens."""
    longer = {**request.sampling, "ignore_eos": True, "max_tokens": tokens}
    return replace(request, question=request.question._replace(schema=None), sampling=longer)


def with_schema(request: Request, schema: Schema) -> Request:
    """Return the request under another schema."""
    return replace(request, question=request.question._replace(schema=schema))


def schema_for_all(schema: Schema) -> Schema:
    """Open the names and their number: the one schema that fits every case."""
    every = deepcopy(schema)
    judgments = every["properties"]["judgments"]
    [item, *_] = judgments.pop("prefixItems")
    item["properties"]["name"] = {"type": "string", "maxLength": 12}
    judgments.update(items=item, minItems=1, maxItems=8)
    return every


def timed(work: Callable[[], tuple[int, object]]) -> tuple[float, int]:
    """Return the seconds and the output tokens of one round."""
    start = time.perf_counter()
    tokens, _ = work()
    return time.perf_counter() - start, tokens


def transformers_generate(model: Path, dtype: str, requests: list[Request]) -> tuple[int, None]:
    """Decode the same prompts to the same lengths in batches, left-padded."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map=DEVICE).eval()
    tokens = 0
    for start in range(0, len(requests), HF_BATCH):
        batch = requests[start : start + HF_BATCH]
        width = max(len(request.question.prompt) for request in batch)
        pads = [width - len(request.question.prompt) for request in batch]
        ids = [[0] * n + r.question.prompt for n, r in zip(pads, batch, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in pads]
        wanted = [request.sampling["max_tokens"] for request in batch]
        with torch.inference_mode():
            network.generate(
                torch.tensor(ids, device=DEVICE),
                attention_mask=torch.tensor(mask, device=DEVICE),
                do_sample=False,
                max_new_tokens=max(wanted),
                min_new_tokens=max(wanted),
            )
        tokens += sum(wanted)  # what a batch pads is waste
    return tokens, None


def report(rates: dict[str, list[tuple[float, int]]], cases: int) -> None:
    """Print each way's median rate, the least and the most, and its ratio to no schema."""
    print(f"{cases} cases, {len(rates['no schema'])} rounds in turns, medians (least - most)")
    print(f"{'way':24s} {'cases/s':>8s} {'tokens/s':>22s} {'tokens':>8s}  against no schema")
    per_second = {name: [t / s for s, t in rounds] for name, rounds in rates.items()}
    base = median(per_second["no schema"])
    for name, each in per_second.items():
        middle, tokens = median(each), rates[name][0][1]
        spread = f"{middle:.1f} ({min(each):.1f} - {max(each):.1f})"
        print(
            f"{name:24s} {middle * cases / tokens:8.2f} {spread:>22s} {tokens:8d}"
            f"   {middle / base:.3f}"
        )


if __name__ == "__main__":
    main()
