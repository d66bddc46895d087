"""Read a file of examples: choose the rows, add the groups, handle bad rows, spare the inputs."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from panjue.prompts.example import UNKNOWN, Example, groups_of
from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.files import (
    atomic_write,
    dump,
    located,
    read_lines,
    read_object,
)
from panjue.prompts.plumbing.rows import format_hint
from panjue.prompts.task import Task

OnBadRow = Literal["stop", "skip"]
"""What to do with a bad row."""


@dataclass
class Skipped:
    """The skipped rows, (file, place) -> reason; a row counts once, however often it is read."""

    rows: dict[tuple[Path, int | str], str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the count and the first row; there must be at least one."""
        [(path, place), reason] = next(iter(self.rows.items()))
        return f"bad rows skipped: {len(self.rows)}; the first: {path}:{place}: {reason}"

    def show(self) -> None:
        if self.rows:
            print(self)

    def write(self, path: Path) -> None:
        """Write the rows to a JSONL file; without rows, delete the file."""
        if not self.rows:
            path.unlink(missing_ok=True)
            return
        with atomic_write(path) as out:
            for (file, place), reason in self.rows.items():
                out.write(dump({"file": str(file), "place": place, "reason": reason}) + "\n")


@contextmanager
def explained(skipped: Skipped, note: str = "") -> Iterator[None]:
    """Append to an error which rows were skipped, and `note` on how the files were read."""
    try:
        yield
    except UserError as error:
        was_read = not isinstance(error, Unreadable)
        how = note if was_read else ""
        rows = f"; {skipped}" if skipped.rows else ""
        raise UserError(f"{error}{how}{rows}") from None


def check_output(path: Path | None) -> None:
    """Refuse to write numbers to a file of something else, such as an input."""
    if path and not is_free(path):
        raise UserError(f"{path}: may be a file of something else; choose a new NAME.json")


def is_free(path: Path) -> bool:
    """Say whether a path is for results: a new NAME.json, or the numbers of an earlier score."""
    if path.suffix != ".json":
        return False
    if not path.exists():
        return True
    with suppress(UserError):
        return read_object(path).keys() >= {"examples", "missing"}
    return False


@dataclass(frozen=True)
class Reader:
    """Reads the files of a task with the options of one run.

    `side` has further groups by id; `held_out` reads only the tenth that training holds out.
    """

    task: Task
    side: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    held_out: bool = False
    on_bad_row: OnBadRow = "stop"
    skipped: Skipped = field(default_factory=Skipped)

    def read(self, path: Path) -> Iterator[Example]:
        """Yield the examples of a file, each id once."""
        first: dict[str, int | str] = {}  # id -> its place
        for place, load in self.task.data.rows(path):
            try:
                example = self._example(load())
                before = first.setdefault(str(example.id), place)
                if before != place:
                    raise UserError(f"id {example.id} is already used at {before}")
            except (UserError, KeyError) as error:
                reason = f"the row has no {error}" if isinstance(error, KeyError) else str(error)
                if self.on_bad_row == "stop":
                    hint = "" if first else format_hint(path, self.task.data.fields)
                    raise UserError(f"{path}:{place}: {reason}{hint}") from None
                self.skipped.rows[path, place] = reason
                continue
            if not self.held_out or is_held_out(example):
                yield example

    def _example(self, row: Mapping[str, Any]) -> Example:
        """Return the example of a row, with the groups of the row and of `side`."""
        example = self.task.data.read(row)
        groups = {**example.groups, **groups_of(row.get("groups") or {})}
        groups |= self.side.get(str(example.id), {})  # an unknown group of it counts too
        known = {name: group for name, group in groups.items() if group != UNKNOWN}
        return replace(example, groups=known)


def side_groups(path: Path | None) -> dict[str, dict[str, str]]:
    """Return id -> groups of a side file; they count more than those of the case."""
    side: dict[str, dict[str, str]] = {}
    if path is None:
        return side
    for number, row in read_lines(path):
        with located(f"{path}:{number}"):
            key = str(row.pop("id", ""))
            if not key:
                raise UserError("the row has no 'id'")
            if key in side:
                raise UserError(f"id {key} occurs twice")
            side[key] = groups_of(row)
    return side


def is_held_out(example: Example) -> bool:
    """Choose a tenth of all examples by the hash of their text, in whatever file they are."""
    return int(text_hash(example)[:8], 16) % 10 == 0


def text_hash(example: Example) -> str:
    """Return the hash that every selection of examples uses; id, order and label play no part."""
    return hashlib.sha256(example.text.encode()).hexdigest()
