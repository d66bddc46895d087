"""The cases that a training has seen, by the hashes of their texts."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from panjue.prompts.example import Example
from panjue.prompts.reader import text_hash

SEEN = "seen.bin"
"""File in a run folder with a 64-bit hash of each case that its training saw."""


def write_seen(run: Path, examples: Iterable[Example]) -> None:
    """Write the hashes of the training cases."""
    keys = np.fromiter(map(_key, examples), np.uint64)
    (run / SEEN).write_bytes(keys.tobytes())


def seen_by(trained: Path | None) -> Callable[[Example], bool]:
    """Return a function that says whether the training of an adapter or model saw a case."""
    path = trained.parent / SEEN if trained else None
    keys = set(np.fromfile(path, np.uint64).tolist()) if path and path.is_file() else set()
    return lambda example: _key(example) in keys


def _key(example: Example) -> int:
    return int(text_hash(example)[:16], 16)
