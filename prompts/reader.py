"""How a file of examples is read: which rows count, with which groups, and what a bad row does."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from panjue.prompts.example import Example, groups_of
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import at, atomic_write, dump, lines, parse_case
from panjue.prompts.task import Task

OnBadRow = Literal["stop", "skip"]
"""What becomes of a row that is no example."""


class Skipped:
    """The rows that were passed over, each once, however often its file was read.

    Attributes:
        rows: (file, place in it) -> what is wrong there.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.rows: dict[tuple[Path, int | str], str] = {}

    def add(self, path: Path, place: int | str, reason: str) -> None:
        """Pass a row over."""
        self.rows[path, place] = reason

    def __str__(self) -> str:
        """Say how many there are, of one or more, and which is the first."""
        [(path, place), reason] = next(iter(self.rows.items()))
        return f"bad rows skipped: {len(self.rows)}; the first: {path}:{place}: {reason}"

    def write(self, path: Path) -> None:
        """List them in a JSONL file; where there are none, there is none."""
        if not self.rows:
            path.unlink(missing_ok=True)
            return
        with atomic_write(path) as out:
            for (file, place), reason in self.rows.items():
                out.write(dump({"file": str(file), "place": place, "reason": reason}) + "\n")


@dataclass(frozen=True)
class Reader:
    """Reads the files of a task as one run wants it.

    Attributes:
        task: Whose files they are.
        side: Id -> further groups of an example; see `side_groups`.
        held_out: Whether only the tenth is read that training holds out.
        on_bad_row: Whether a row that is no example ends the work, or is noted in `skipped`.
    """

    task: Task
    side: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    held_out: bool = False
    on_bad_row: OnBadRow = "stop"
    skipped: Skipped = field(default_factory=Skipped)

    def read(self, path: Path) -> Iterator[Example]:
        """Yield the examples of a file, each id once.

        Raises:
            UserError: The file cannot be read; or a row is bad, and bad rows are not skipped.
        """
        first: dict[str, int | str] = {}
        for place, load in self.task.data.rows(path):
            try:
                row = load()
                example = self.task.data.read(row)
                groups = {**example.groups, **self._further_groups(example, row)}
                before = first.setdefault(str(example.id), place)
                if before != place:
                    raise UserError(f"id {example.id} stands already at {before}")
            except UserError as error:
                if self.on_bad_row == "stop":
                    raise UserError(f"{path}:{place}: {error}") from None
                self.skipped.add(path, place, str(error))
                continue
            if not self.held_out or is_held_out(example):
                yield replace(example, groups=groups)

    def _further_groups(self, example: Example, row: Mapping[str, Any]) -> dict[str, str]:
        """Return groups beside those the task reads: of the row's `groups`, of the side file."""
        return {**groups_of(row.get("groups") or {}), **self.side.get(str(example.id), {})}


def side_groups(path: Path | None) -> dict[str, dict[str, str]]:
    """Return id -> groups of a side file, whose rows have an `id` and groups.

    Of an attribute that a line of the cases has as well, the side file's counts. The ids of all
    files that are read must be of one kind.

    Raises:
        UserError: The file is missing or broken, or has one id twice.
    """
    side: dict[str, dict[str, str]] = {}
    for number, raw in lines(path) if path else ():
        with at(f"{path}:{number}"):
            row = parse_case(raw)
            key = str(row.pop("id", ""))
            if not key or key in side:
                raise UserError(f"id {key} stands there already" if key else "the row has no 'id'")
            side[key] = groups_of(row)
    return side


def is_held_out(example: Example) -> bool:
    """Choose a tenth of all examples by the hash of their text, whatever file they stand in."""
    return int(text_hash(example)[:8], 16) % 10 == 0


def text_hash(example: Example) -> str:
    """Return what every choice among examples goes by: no id, no order, no label."""
    return hashlib.sha256(example.text.encode()).hexdigest()
