"""`on_bad_row: skip`: rows that are no examples are passed over, listed and counted."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from panjue.prompts.errors import BadRow
from panjue.prompts.files import dump, whole_file
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
