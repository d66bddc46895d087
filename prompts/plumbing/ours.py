"""Whose a file or folder is: panjue replaces and deletes only what panjue made.

A folder with our record is ours, and so is what lies in it under the names that we give. Where the
user names the place, only its content counts: earlier scores, an earlier page, ZIP or base.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

from panjue.prompts.plumbing.errors import UserError

IsOurs = Callable[[Path], bool]
"""Says whether panjue made what is at a path."""

RECORD_KEYS = {
    "manifest.json": {"task", "prompt_sha256", "seed"},  # of a training, a merge, or answers
    "start.json": {"shape", "seed", "train_sha256"},  # of an untrained base
}
"""File that makes its folder ours -> keys that it has in every version of panjue."""


def has_record(folder: Path) -> bool:
    return any(keys <= record_keys(folder / name) for name, keys in RECORD_KEYS.items())


def is_base(folder: Path) -> bool:
    """Say whether a folder has an untrained model that `panjue base` made."""
    return RECORD_KEYS["start.json"] <= record_keys(folder / "start.json")


def are_scores(path: Path) -> bool:
    return {"examples", "missing"} <= record_keys(path)


def lies_in_ours(path: Path) -> bool:
    """Say whether a folder around a path has our record, or the path itself, if it is a folder.

    Of a link the place that it leads to counts: it may be outside of our folder.
    """
    if path.is_symlink():
        path = followed(path)
    place = Path(os.path.abspath(path))  # without `..`
    return any(map(has_record, (place, *place.parents)))


def followed(path: Path) -> Path:
    """Return the place that a path leads to; nothing needs to be there."""
    return Path(os.path.realpath(path))


def refuse_foreign(path: Path, is_ours: IsOurs = lies_in_ours, other: str = "place") -> None:
    """Refuse to replace or delete what panjue did not make; an empty folder is no loss.

    `other` is what chooses another place, such as `run=FOLDER`, for the error.
    """
    if not path.exists() or is_ours(path):
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    raise UserError(
        f"{path}: was not made by panjue, so it is kept; move it, or choose another {other}"
    )


def refuse_claim(folder: Path, names: Iterable[str], other: str) -> None:
    """Refuse to put our record into a folder where something else has one of our `names`."""
    if not has_record(folder):
        for name in names:
            refuse_foreign(folder / name, has_record, other)


def check_output(path: Path | None) -> None:
    """Refuse to write numbers to anything but a new NAME.json, or one with earlier numbers."""
    if path is None:
        return
    other = "NAME.json"
    if path.suffix != ".json":
        raise UserError(f"{path}: does not end in .json; choose another {other}")
    refuse_foreign(path, are_scores, other)


def record_keys(path: Path) -> set[str]:
    """Return the keys of the JSON object in a file; none if it is anything else."""
    if not path.is_file():
        return set()
    try:
        value = json.loads(record_bytes(path))
    except (OSError, ValueError, RecursionError):
        return set()
    return set(value) if isinstance(value, dict) else set()


TICK_NS = 50_000_000
"""Within one tick of the clock that dates files (4 to 10 ms) a file may be written twice."""


def record_bytes(path: Path) -> bytes:
    """Return the content of a record; as long as the file stays the same it is read once."""
    found = path.stat()
    if time.time_ns() - found.st_ctime_ns < TICK_NS:
        return path.read_bytes()
    return _bytes_of(os.path.abspath(path), found.st_ino, found.st_size, found.st_ctime_ns)


@lru_cache(maxsize=256)
def _bytes_of(path: str, *_file: int) -> bytes:
    """Return the content of the file that these numbers describe."""
    return Path(path).read_bytes()
