"""What the scripts of this folder share."""

import argparse
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.serve.ask import Question, QuestionMaker, Refusal


def parser(description: str | None, *arguments: str) -> argparse.ArgumentParser:
    """Return a parser of paths; it prints the first lines of a script as they are."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in arguments:
        options.add_argument(name, type=Path)
    options.add_argument("--rounds", type=int, default=3)
    return options


def compare(ways: Mapping[str, Callable[[], float]], unit: str, peer: str, rounds: int) -> None:
    """Print the figure of each way, the median of all rounds, and its ratio to that of `peer`.

    The ways are measured in turns, so that a drift of the machine hits all alike.
    """
    figures: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, measured in ways.items():
            figures[way].append(measured())
    table = Table("way", f"{unit}, median (least - most)", f"against {peer}", box=None)
    for way, each in figures.items():
        middle = median(each)
        ratio = middle / median(figures[peer])
        table.add_row(way, f"{middle:.1f} ({min(each):.1f} - {max(each):.1f})", f"{ratio:.3f}")
    Console(width=100).print(table)


def askable(
    question_maker: QuestionMaker, cases: Path, limit: int
) -> list[tuple[Example, Question]]:
    """Return the first cases of a file that fit the model, with their questions."""
    pairs: list[tuple[Example, Question]] = []
    for example in Reader(question_maker.task).read(cases):
        if len(pairs) == limit:
            break
        with suppress(Refusal):
            pairs.append((example, question_maker.question(example)))
    return pairs
