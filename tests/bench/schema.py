"""How long a case's schema takes to become a grammar: llguidance against xgrammar, in one run.

    python tests/bench/schema.py MODEL_FOLDER [--shared ../shared/data]

The label sets are the largest real ones: all 321 charges of CMDL, every article of the Criminal
Law and each of its paragraphs. Both build the same schema over the same tokenizer, in turn.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import llguidance.hf
import xgrammar
from llguidance import LLMatcher

from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.read import by_hand

DEFENDANTS = (1, 2, 5, 20, 63)
ROUNDS = 3

TASK = load_task("judgment")


def main() -> None:
    """Print a line per number of defendants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"))
    options = parser.parse_args()
    labels = largest(options.shared)
    tokenizer = load_tokenizer(options.model)
    guidance = llguidance.hf.from_tokenizer(tokenizer)
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(tokenizer), cache_enabled=False
    )

    def with_guidance(schema: str) -> None:
        grammar = LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_flexible": False}
        )
        matcher = LLMatcher(guidance, grammar)
        assert not matcher.get_error()

    def with_xgrammar(schema: str) -> None:
        compiler.compile_json_schema(schema, any_whitespace=False)

    for number in DEFENDANTS:
        example = by_hand("事实", [f"张某{i}" for i in range(number)])
        schema = json.dumps(TASK.ask.schema(example, labels), ensure_ascii=False)
        rounds = 1 if number > 20 else ROUNDS
        mine = median(seconds(with_guidance, schema) for _ in range(ROUNDS))
        theirs = median(seconds(with_xgrammar, schema) for _ in range(rounds))
        print(
            f"{number:3d} defendants, {len(schema):7,} characters: "
            f"llguidance {1000 * mine:7.1f} ms, "
            f"xgrammar {1000 * theirs:9.1f} ms, {theirs / mine:.0f} times as long"
        )


def largest(shared: Path) -> Labels:
    """Return all charges of CMDL, and the law's articles and paragraphs, as label sets."""
    charges = json.loads((shared / "drdz/charges_321.json").read_text("utf-8"))
    law = json.loads((shared / "criminal_law/articles_paragraphs.json").read_text("utf-8"))
    articles = [
        name
        for article, text in law.items()
        for name in (article, *(f"{article}-{i + 1}" for i in range(len(text["paragraphs"]))))
    ]
    counts = {"charges": dict.fromkeys(charges, 1), "articles": dict.fromkeys(articles, 1)}
    return Labels(counts, {"charges": 10, "articles": 20, "penalty": 1})


def seconds(build: Callable[[str], None], schema: str) -> float:
    """Return how long one build takes."""
    began = time.perf_counter()
    build(schema)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
