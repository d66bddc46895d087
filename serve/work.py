"""What a run has to do, in batches, and what of it is finished."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

from panjue.prompts.example import Example, call_key
from panjue.prompts.plumbing.rows import Rows

LARGEST = 8
"""The largest batch is so many times `in_flight`."""

Row = dict[str, Any]
"""A row of `completions.jsonl`."""


class Step(NamedTuple):
    """Rows that are new, and counts so far: of the run, or of a batch.

    Attributes:
        rows: The new rows.
        solved: Number of examples that have their answer.
        calls: Number of calls that have a new row, refused calls included.
        tokens: Number of tokens in their replies.
        in_flight: Number of calls that were sent and are not answered.
        replicas: What there is to say about replicas of the engine.
    """

    rows: list[Row]
    solved: int = 0
    calls: int = 0
    tokens: int = 0
    in_flight: int = 0
    replicas: str = ""


@dataclass
class Work:
    """The examples of a run that are not answered yet.

    Attributes:
        examples: These examples, drawn one by one.
        count: Their number.
        rows: The rows of an earlier run, if any, by the key of their call.
    """

    examples: Iterator[Example]
    count: int
    rows: Rows | None

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


@dataclass
class Batch:
    """Examples for one replica.

    Attributes:
        examples: The examples.
        rows: The rows that they have already, by the key of their call.
        solved: How many of the examples have been counted as solved.
    """

    examples: list[Example]
    rows: dict[str, Row]
    solved: int = 0
    _answered: set[str] = field(default_factory=set)

    def add(self, row: Row) -> None:
        """Remember a new row; of a task of one call only its id, since the example is solved."""
        if "call" in row:
            self.rows[call_key(row)] = row
        else:
            self._answered.add(str(row["id"]))

    def again(self) -> "Batch":
        """Return the batch for another replica, without the examples that have their one row."""
        left = [example for example in self.examples if str(example.id) not in self._answered]
        return Batch(left, self.rows, self.solved - len(self._answered))


def batches(work: Work, replicas: int, in_flight: int) -> Iterator[Batch]:
    """Yield the examples in batches: large ones first, and smaller ones so that all end together.

    A replica starts a batch when the one before has ended, so that a larger batch leaves its engine
    idle less often.
    """
    left, share = work.count, 2 * replicas
    smallest = min(in_flight, ceil(left / share))
    while True:
        size = min(max(left // share, smallest), LARGEST * in_flight)
        examples = list(islice(work.examples, size))
        if not examples:
            return
        left -= len(examples)
        yield Batch(examples, {k: row for e in examples for k, row in work.rows_of(e).items()})
