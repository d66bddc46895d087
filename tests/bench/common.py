"""What the scripts of this folder share."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.serve.ask import Asker, Question, Refusal

PANJUE = str(Path(sys.executable).with_name("panjue"))
ROUNDS = 3


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints the first lines of a script as they are."""
    form = argparse.RawTextHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form)


def spread(figures: Sequence[float]) -> str:
    """Return the median, the least and the most."""
    return f"{median(figures):.1f} ({min(figures):.1f} - {max(figures):.1f})"


def in_turns(ways: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure each way ROUNDS times, in turns, so that a drift of the machine hits all alike."""
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, measured in ways.items():
            rates[way].append(measured())
    return rates


def print_rates(rates: Mapping[str, Sequence[float]], unit: str, peer: str) -> None:
    """Print the rate of each way, and its ratio to that of `peer`."""
    table = Table("way", f"{unit}, median (least - most)", f"against {peer}", box=None)
    for way, each in rates.items():
        table.add_row(way, spread(each), f"{median(each) / median(rates[peer]):.3f}")
    Console(width=100).print(table)


def askable(asker: Asker, cases: Path, limit: int) -> list[tuple[Example, Question]]:
    """Return the first cases of a file that fit the model, with their questions."""
    pairs: list[tuple[Example, Question]] = []
    for example in Reader(asker.task).read(cases):
        if len(pairs) == limit:
            break
        with suppress(Refusal):
            pairs.append((example, asker.question(example)))
    return pairs
