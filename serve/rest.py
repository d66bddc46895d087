"""What earlier runs have answered, and the rest."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from panjue.prompts.example import Decoded, Example, call_key, first_reply, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import stream
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.serve.rows import Row


@dataclass
class Rest:
    """The examples of a run that have no answer yet.

    Attributes:
        examples: These examples, drawn one by one.
        rows: The rows of an earlier run, if any; an example of several calls may have some.
        done: Number of examples that have their answer.
        total: Number of all examples.
    """

    examples: Iterator[Example]
    rows: Rows | None
    done: int
    total: int

    def find_row(self, key: str) -> Row | None:
        """Return the row of a call from an earlier run, if there is one."""
        return self.rows.get(key) if self.rows else None

    def rows_of(self, example: Example) -> dict[str, Row]:
        """Return all rows of an example from an earlier run, by the key of their call."""
        keys = self._keys.get(str(example.id), ())
        return {key: row for key in keys if (row := self.find_row(key))}

    @cached_property
    def _keys(self) -> dict[str, list[str]]:
        """Id -> keys, for tasks of several calls."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key in self.rows.ids() if self.rows else ():
            if " " in key:
                keys[key.rpartition(" ")[0]].append(key)
        return keys


def load_rows(path: Path) -> Rows | None:
    """Return the rows of an earlier run, without an incomplete last line; None if there is none."""
    if not path.exists():
        return None
    with stream(path):
        pass  # opening it drops an incomplete last line
    return Rows(path, key=call_key)


def answered_ids(reader: Reader, test: Path, labels: Labels, rows: Rows) -> set[str]:
    """Return the ids of the examples whose calls all have rows."""
    task = reader.task
    if not task.answer.several_calls:
        return rows.ids()
    return {str(e.id) for e in reader.read(test) if is_answered(task, e, labels, rows)}


class MissingRow(Exception):
    """A call has no row yet."""


def is_answered(task: Task, example: Example, labels: Labels, rows: Rows) -> bool:
    """Say whether the rows are enough to compute an example's answer."""

    def reply(call: int, question: Example) -> Decoded:
        row = rows.get(call_key({"id": example.id, "call": call}))
        if row is None:
            raise MissingRow
        return task.ask.decode(first_reply(row), question, labels)

    try:
        run_steps(task.answer.solving(example), reply)
    except MissingRow:
        return False
    return True
