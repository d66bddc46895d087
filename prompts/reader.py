"""How a file of examples is read: which rows count, with which groups, and what a bad row does."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Literal

from panjue.prompts.example import Example, groups_of
from panjue.prompts.plumbing.errors import BadRow, UserError
from panjue.prompts.plumbing.files import at, dump, lines, parse_case, whole_file
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

    def __call__(self, bad: BadRow) -> None:
        """Pass a row over."""
        self.rows[bad.path, bad.place] = bad.reason

    def __str__(self) -> str:
        """Say how many there are, of one or more, and which is the first."""
        [(path, place), reason] = next(iter(self.rows.items()))
        return f"bad rows skipped: {len(self.rows)}; the first: {path}:{place}: {reason}"

    def write(self, path: Path) -> None:
        """List them in a JSONL file; where there are none, there is none."""
        if not self.rows:
            path.unlink(missing_ok=True)
            return
        with whole_file(path) as out:
            for (file, place), reason in self.rows.items():
                out.write(dump({"file": str(file), "place": place, "reason": reason}) + "\n")


def reading(task: Task, on_bad_row: OnBadRow) -> tuple[Task, Skipped]:
    """Return the task as it reads files under this setting, and where skipped rows are noted."""
    skipped = Skipped()
    return (replace(task, bad=skipped) if on_bad_row == "skip" else task), skipped


def beside(task: Task, groups: Path | None) -> Task:
    """Return the task as it reads files with the side file `groups` beside them.

    Its rows have an `id` and groups; of an attribute that a line has as well, the side file's
    counts. The ids of all files that are read must be of one kind.

    Raises:
        UserError: That file is missing or broken, or has one id twice.
    """
    side: dict[str, dict[str, str]] = {}
    for number, raw in lines(groups) if groups else ():
        with at(f"{groups}:{number}"):
            row = parse_case(raw)
            key = str(row.pop("id", ""))
            if not key or key in side:
                raise UserError(f"id {key} stands there already" if key else "the row has no 'id'")
            side[key] = groups_of(row)
    return replace(task, side=side)


def is_held_out(example: Example) -> bool:
    """Choose a tenth of all examples by the hash of their text, whatever file they stand in."""
    return int(text_hash(example)[:8], 16) % 10 == 0


def text_hash(example: Example) -> str:
    """Return what every choice among examples goes by: no id, no order, no label."""
    return hashlib.sha256(example.text.encode()).hexdigest()
