"""Decide whether panjue made a file or folder: panjue replaces and deletes only what it made.

A folder with our record is ours, and so are the files in it with our names. If the user names the
place, only the content counts: earlier scores, an earlier page, ZIP or base.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

from panjue.prompts.plumbing.errors import UserError

IsOurs = Callable[[Path], bool]
"""A function that says whether panjue made what is at a path."""

RECORD_KEYS = {
    "manifest.json": {"task", "prompt_sha256", "seed"},  # record of a training, a merge, or answers
    "start.json": {"shape", "seed", "train_sha256"},  # record of an untrained base
}
"""Record that makes its folder ours -> keys that it has in every version of panjue."""


def has_record(folder: Path) -> bool:
    """Say whether panjue made a folder: a file in it is one of our records, by name and keys.

    Only the keys count that the record has in every version of panjue.
    """
    return any(keys <= record_keys(folder / name) for name, keys in RECORD_KEYS.items())


def is_base(folder: Path) -> bool:
    """Say whether a folder has an untrained model of `panjue base`, which writes `start.json`."""
    return RECORD_KEYS["start.json"] <= record_keys(folder / "start.json")


def are_scores(path: Path) -> bool:
    """Say whether a file is a `scores.json`, which `panjue score` wrote."""
    return {"examples", "missing"} <= record_keys(path)


def lies_in_ours(path: Path) -> bool:
    """Say whether a folder around a path, or the path itself if it is a folder, has our record.

    For a link, its target counts, which may be outside of our folder.
    """
    if path.is_symlink():
        path = followed(path)
    place = Path(os.path.abspath(path))  # resolves `..`
    return any(map(has_record, (place, *place.parents)))


def followed(path: Path) -> Path:
    """Return the place that a path leads to; it need not exist."""
    return Path(os.path.realpath(path))


def refuse_foreign(path: Path, is_ours: IsOurs = lies_in_ours, other: str = "place") -> None:
    """Refuse to replace or delete what panjue did not make, unless it is an empty folder.

    `other` is the setting that chooses another place, such as `run=FOLDER`, for the error.
    """
    if not path.exists() or is_ours(path):
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    raise UserError(
        f"{path}: was not made by panjue, so it is kept; move it, or choose another {other}"
    )


def refuse_claim(folder: Path, names: Iterable[str], other: str) -> None:
    """Refuse a folder that panjue did not make if a file there has one of our `names`.

    Call it before a record is written there. With a record, the folder would count as ours, and
    panjue could replace this file of the user. `other` is the setting that chooses another folder,
    such as `run=FOLDER`, for the error.
    """
    if not has_record(folder):
        for name in names:
            refuse_foreign(folder / name, has_record, other)


def check_output(path: Path | None) -> None:
    """Refuse to write scores anywhere but to a new NAME.json, or over one with earlier scores."""
    if path is None:
        return
    other = "NAME.json"
    if path.suffix != ".json":
        raise UserError(f"{path}: does not end in .json; choose another {other}")
    refuse_foreign(path, are_scores, other)


def record_keys(path: Path) -> set[str]:
    """Return the keys of the JSON object in a file; empty if the file has anything else."""
    if not path.is_file():
        return set()
    try:
        value = json.loads(record_bytes(path))
    except (OSError, ValueError, RecursionError):
        return set()
    return set(value) if isinstance(value, dict) else set()


TICK_NS = 50_000_000
"""Upper limit of a tick of the clock that dates files."""


def record_bytes(path: Path) -> bytes:
    """Return the content of a record; read it only once as long as the file does not change.

    The date of a file (`ctime`) has the precision of a clock tick. A file that was changed within
    the last tick may change again and keep its date, so its content is not cached.
    """
    found = path.stat()
    if time.time_ns() - found.st_ctime_ns < TICK_NS:
        return path.read_bytes()
    return _bytes_of(os.path.abspath(path), found.st_ino, found.st_size, found.st_ctime_ns)


@lru_cache(maxsize=256)
def _bytes_of(path: str, *_inode_size_date: int) -> bytes:
    """Return the content of a file. With other numbers, it has changed and is read again."""
    return Path(path).read_bytes()
