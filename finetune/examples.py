"""The choice of training examples and held-out examples."""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path

from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader, is_held_out, text_hash


def train_examples(reader: Reader, train: Path, dev: Path | None) -> Iterator[Example]:
    """Yield the training examples of `train`: all if `dev` is given, else without a tenth."""
    for example in _answered(reader, train):
        if dev is not None or not is_held_out(example):
            yield example


def mixed_examples(
    reader: Reader, train: Path, dev: Path | None, mix: Path, ratio: float
) -> Iterator[Example]:
    """Yield examples of `mix`: `ratio` per training example of `train`, or all if it has fewer.

    Examples with a held-out text are left out: several files may have the same facts.
    """
    count = round(ratio * sum(1 for _ in train_examples(reader, train, dev)))
    # Hashes are uniform, so the lowest are a random choice; memory holds hashes, not texts.
    lowest = heapq.nsmallest(count, map(text_hash, mixable_examples(reader, dev, mix)))
    for example in mixable_examples(reader, dev, mix):
        if lowest and text_hash(example) <= lowest[-1]:
            yield example


def mixable_examples(reader: Reader, dev: Path | None, mix: Path) -> Iterator[Example]:
    """Return the examples of `mix` whose text is not held out."""
    if dev is None:
        return (example for example in _answered(reader, mix) if not is_held_out(example))
    held = {text_hash(example) for example in _answered(reader, dev)}
    return (example for example in _answered(reader, mix) if text_hash(example) not in held)


def held_out_examples(reader: Reader, train: Path, dev: Path | None) -> Iterator[Example]:
    """Yield the held-out examples: `dev` if it is given, else a tenth of `train`."""
    for example in _answered(reader, train if dev is None else dev):
        if dev is not None or is_held_out(example):
            yield example


def check_side(reader: Reader, files: Sequence[Path]) -> None:
    """Refuse a side file of groups if one of its ids is ambiguous.

    Raises:
        UserError: Two of `files` have the same id, and the side file has it too.
    """
    file_of_id: dict[str, Path] = {}
    for path in files if reader.side and len(files) > 1 else ():
        for key in (str(example.id) for example in reader.read(path)):
            if key in reader.side and file_of_id.setdefault(key, path) != path:
                raise UserError(
                    f"groups: id {key} is in {file_of_id[key]} and in {path}, so its groups are "
                    "ambiguous; write `groups` into the lines, or change the ids"
                )


def _answered(reader: Reader, path: Path) -> Iterator[Example]:
    for example in reader.read(path):
        if example.answer is None:
            raise UserError(
                f"{path}: id {example.id} has no answer to learn from; use a training file"
            )
        yield example
