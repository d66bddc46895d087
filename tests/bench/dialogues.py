"""What is it worth to solve dialogues side by side? The same ones both ways, in one engine.

    python tests/bench/dialogues.py MODEL FOLDER [--dialogues 64] [--turns 20] [--reply 64]

MODEL is any model folder (runs/base/model), FOLDER has chat/ and emo/. Of each dialogue the first
`--turns` sentences are taken, and replies end after `--reply` tokens, so that both ways do the same
work whatever the model has learnt. Already one dialogue asks many things at once: its sentences.
"""

import argparse
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.reader import Reader
from panjue.prompts.task import configured, load_task
from panjue.serve.ask import Asker
from panjue.serve.engine import Engine, engine
from panjue.serve.rows import Calls, rows
from panjue.serve.trained import Served


def solve_all(llm: Engine, asker: Asker, examples: list[Example], reply: int) -> tuple[float, ...]:
    """Return seconds, calls, mean calls in flight and tokens of solving examples side by side."""
    turns = ({"logprobs": 2, "max_tokens": reply},)
    calls, in_flight, began = Calls(asker, iter(examples), turns), 0, time.perf_counter()
    for _ in rows(llm, calls, in_flight=256):
        in_flight += calls.in_flight
    return time.perf_counter() - began, calls.finished, in_flight, calls.tokens


def main() -> None:
    """Solve one after another, then side by side, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--reply", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=8192)
    args = parser.parse_args()
    task = configured(load_task("dialogue"), {"window": 8, "step": 4})
    found = (
        example for example in Reader(task).read(args.folder) if len(example.turns) >= args.turns
    )
    examples = [
        replace(example, turns=example.turns[: args.turns])
        for example in islice(found, args.dialogues)
    ]
    settings = {"enforce_eager": True, "max_num_seqs": 256, "enable_prefix_caching": False}
    table = Table(f"{len(examples)} dialogues", "seconds", "calls", "in flight", "tokens/s")
    with engine(Served(args.model), settings, args.max_tokens, seed=0) as llm:
        asker = Asker(task, Labels(), args.model, args.max_tokens)
        solve_all(llm, asker, examples[:1], args.reply)  # warm
        alone = [solve_all(llm, asker, [example], args.reply) for example in examples]
        ways = {
            "one after another": tuple(map(sum, zip(*alone, strict=True))),
            "side by side": solve_all(llm, asker, examples, args.reply),
        }
    for way, (seconds, calls, in_flight, tokens) in ways.items():
        table.add_row(
            way,
            f"{seconds:.1f}",
            f"{calls:.0f}",
            f"{in_flight / calls:.1f}",
            f"{tokens / seconds:,.0f}",
        )
    Console().print(table)
    ratio = ways["one after another"][0] / ways["side by side"][0]
    print(f"side by side takes 1/{ratio:.2f} of the time")


if __name__ == "__main__":
    main()
