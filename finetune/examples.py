"""Which examples are trained on, and which are held out to choose by."""

import heapq
from collections.abc import Iterator
from pathlib import Path

from panjue.prompts.errors import UserError
from panjue.prompts.split import is_held_out, text_hash
from panjue.prompts.task import Example, Task


def train_examples(
    task: Task, train: Path, dev: Path | None, mix: Path | None, ratio: float
) -> Iterator[Example]:
    """Yield what is trained on: `train`, then `ratio` times as many of `mix` as far as it goes.

    Where there is no `dev` file the held-out tenth is left out, of `mix` as well: the same facts
    may stand in both files.
    """
    own = 0
    for example in _answered(task, train):
        if dev is not None or not is_held_out(example):
            own += 1
            yield example
    if mix is None or not (wanted := round(own * ratio)):
        return
    # Hashes start evenly, so the lowest are a fair choice; only they are kept, not the texts.
    lowest = heapq.nsmallest(wanted, map(text_hash, _mixable(task, mix, dev)))
    for example in _mixable(task, mix, dev):
        if text_hash(example) <= lowest[-1]:
            yield example


def _mixable(task: Task, mix: Path, dev: Path | None) -> Iterator[Example]:
    return (e for e in _answered(task, mix) if dev is not None or not is_held_out(e))


def held_out_examples(task: Task, train: Path, dev: Path | None) -> Iterator[Example]:
    """Yield what losses and scores are measured on: `dev`, else the held-out tenth of `train`."""
    for example in _answered(task, train if dev is None else dev):
        if dev is not None or is_held_out(example):
            yield example


def _answered(task: Task, path: Path) -> Iterator[Example]:
    for example in task.read(path):
        if example.answer is None:
            raise UserError(
                f"{path}: id {example.id} has no answer to learn from; this is a test file"
            )
        yield example
