"""Which examples are trained on, and which are held out to choose by."""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path

from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader, is_held_out, text_hash


def train_examples(reader: Reader, train: Path, dev: Path | None) -> Iterator[Example]:
    """Yield those of `train` that are trained on: all, less the held-out tenth without a `dev`."""
    for example in _answered(reader, train):
        if dev is not None or not is_held_out(example):
            yield example


def mixed_examples(
    reader: Reader, train: Path, dev: Path | None, mix: Path, ratio: float
) -> Iterator[Example]:
    """Yield examples of `mix`, `ratio` times as many as are trained on of `train`, or all it has.

    None whose text is held out: the same facts may stand in several files.
    """
    wanted = round(ratio * sum(1 for _ in train_examples(reader, train, dev)))
    # Hashes start evenly, so the lowest are a fair choice; only they are kept, not the texts.
    lowest = heapq.nsmallest(wanted, map(text_hash, _mixable(reader, dev, mix)))
    for example in _mixable(reader, dev, mix):
        if lowest and text_hash(example) <= lowest[-1]:
            yield example


def _mixable(reader: Reader, dev: Path | None, mix: Path) -> Iterator[Example]:
    if dev is None:
        return (example for example in _answered(reader, mix) if not is_held_out(example))
    held = {text_hash(example) for example in _answered(reader, dev)}
    return (example for example in _answered(reader, mix) if text_hash(example) not in held)


def held_out_examples(reader: Reader, train: Path, dev: Path | None) -> Iterator[Example]:
    """Yield what losses and scores are measured on: `dev`, else the held-out tenth of `train`."""
    for example in _answered(reader, train if dev is None else dev):
        if dev is not None or is_held_out(example):
            yield example


def check_side(reader: Reader, files: Sequence[Path]) -> None:
    """Refuse a side file of groups that may mean examples of several files.

    Raises:
        UserError: An id that it has stands in two of them.
    """
    found: dict[str, Path] = {}
    for path in files if reader.side and len(files) > 1 else ():
        for key in (str(example.id) for example in reader.read(path)):
            if key in reader.side and found.setdefault(key, path) != path:
                raise UserError(
                    f"groups: id {key} stands in {found[key]} and in {path}, which of them is "
                    "meant? Write `groups` into the lines, or give other ids"
                )


def _answered(reader: Reader, path: Path) -> Iterator[Example]:
    for example in reader.read(path):
        if example.answer is None:
            raise UserError(
                f"{path}: id {example.id} has no answer to learn from; this is a test file"
            )
        yield example
