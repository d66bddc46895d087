"""What a schema per case and log-probabilities cost: the engine with and without, on equal prompts.

    python -m tests.bench.generate TRAINED_FOLDER CASES.jsonl [--limit 64]

TRAINED_FOLDER is an adapter or model folder of a run (it has labels.json). Without a schema the
engine writes exactly as many tokens per case as with one, so that speed is compared, not length.
"""

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from panjue.prompts.example import LabelFields
from panjue.serve.ask import Budget, CompletionRow, Request, ask
from panjue.serve.engine import Engine, engine
from tests.bench.common import askable, compare, parser
from tests.opened import job_of

# Without prefix cache: every round must do all the work again.
SETTINGS: dict[str, Any] = {"enable_prefix_caching": False}
if not torch.cuda.is_available():
    SETTINGS |= {"dtype": "bfloat16", "max_num_seqs": 32}


def main() -> None:
    """Ask both ways and print the table."""
    options = parser(__doc__, "trained", "cases")
    options.add_argument("--limit", type=int, default=64)
    given = options.parse_args()
    job = job_of(given.trained).with_model()
    assert job.served
    pairs = askable(job.question_maker(), given.cases, given.limit)
    own = [Request(example.id, question, {}) for example, question in pairs]
    fields = job.task.answer
    nothing = LabelFields()
    with engine(job.served, SETTINGS, Budget(job.budget.usual, job.budget.usual), seed=0) as llm:
        lengths = answer(llm, own, fields)  # also warms up
        print(f"{len(own)} cases, {sum(lengths)} tokens")
        free = [without_schema(*each) for each in zip(own, lengths, strict=True)]
        ways = {
            "no schema": partial(rate, llm, free, nothing),
            "a schema per case": partial(rate, llm, own, nothing),
            "the same with log-probabilities": partial(rate, llm, own, fields),
        }
        compare(ways, "tokens/s", "a schema per case", given.rounds)


def without_schema(request: Request, tokens: int) -> Request:
    question = request.question._replace(schema=None)
    return replace(request, question=question, sampling={"ignore_eos": True, "max_tokens": tokens})


def rate(llm: Engine, requests: list[Request], fields: LabelFields) -> float:
    """Return the tokens a second of one round."""
    began = time.perf_counter()
    return sum(answer(llm, requests, fields)) / (time.perf_counter() - began)


def answer(llm: Engine, requests: list[Request], fields: LabelFields) -> list[int]:
    """Make the row of every reply, as `generate` does; return how many tokens each has.

    The rows have the log-probabilities of `fields`.
    """

    async def rows() -> list[CompletionRow]:
        asked = [ask(llm, each.question, each.id, fields, [each.sampling]) for each in requests]
        return await asyncio.gather(*asked)

    return [row["completion_tokens"] for row in llm.runner.run(rows())]


if __name__ == "__main__":
    main()
