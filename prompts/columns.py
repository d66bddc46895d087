"""Own names of columns: rename the keys of a user's row to those that the task reads."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.task import Data, load_task, task_folders

Columns = Mapping[str, str]
"""The task's name of a column -> its name in the user's file. `outcomes/charges` is a column of the
objects in the list `outcomes`."""

MOST_SHOWN = 20
"""Number of columns of a row that a message names."""

IN_EVERY_TASK = ("groups",)
"""Columns that rows of any task may have, even if the sample has not."""


class Missing(NamedTuple):
    """A column that the user has named, but that a row does not have."""

    name: str
    given: str
    columns: Sequence[str]  # columns of the row, or of the object in it
    has_ours: bool  # the row has the column under the task's name

    def __str__(self) -> str:
        found = (
            f"has no column {self.given!r} (columns.{self.name}), but {named_columns(self.columns)}"
        )
        if not self.has_ours:
            return found
        back = f"{self.name}={self.name.rpartition('/')[2]}"
        return f"{found}; columns.{back} (score and check: --columns {back}) is for our own name"


def renamed(row: Mapping[str, Any], columns: Columns) -> tuple[dict[str, Any], list[Missing]]:
    """Return a row with the task's names, and the named columns that it lacks.

    UserError: the row has a column under both names. Null under the task's name does not count.
    """
    missing: list[Missing] = []
    return _renamed(row, columns, missing, ""), missing


def _renamed(
    row: Mapping[str, Any], columns: Columns, missing: list[Missing], prefix: str
) -> dict[str, Any]:
    ours: dict[str, str] = {}
    inner: dict[str, dict[str, str]] = defaultdict(dict)
    for name, given in columns.items():
        outer, _, rest = name.partition("/")
        if rest:
            inner[outer][rest] = given
            continue
        ours[given] = outer
        if given not in row:
            has_ours = row.get(outer) is not None
            missing.append(Missing(f"{prefix}{name}", given, list(row), has_ours))
    result = {}
    for key, value in row.items():
        name = ours.get(key, key)
        if key not in ours and columns.get(key) in row:
            if value is not None:
                both = f"{columns[key]!r} (columns.{prefix}{key}) and {key!r}"
                raise UserError(f"has the columns {both}; leave out one of them")
            continue
        result[name] = value
    for outer, names in inner.items():
        items = result.get(outer)
        if isinstance(items, list):
            result[outer] = [
                _renamed(one, names, missing, f"{outer}/") if isinstance(one, dict) else one
                for one in items  # the task itself refuses one that is no object
            ]
    return result


def columns_of_words(words: Sequence[str]) -> dict[str, str]:
    """Return the names of columns from words such as `fact=content`."""
    columns = {}
    for word in words:
        name, _, given = word.partition("=")
        if not (name and given):
            raise UserError(f"--columns {word}: say NAME=COLUMN, e.g. --columns fact=content")
        columns[name] = given
    return columns


def check_columns(data: Data, columns: Columns) -> None:
    """Refuse a name that the task does not have, and a user's column that is named twice."""
    known = known_columns(data)
    for name in columns if known else ():
        if name not in known:
            hint = did_you_mean(name, known)
            shown = ", ".join(known)
            raise UserError(
                f"columns.{name}: the task has no such column{hint} (there are {shown})"
            )
    places = Counter((name.rpartition("/")[0], given) for name, given in columns.items())
    for (_, given), count in places.items():
        if count > 1:
            raise UserError(
                f"columns: {given!r} is named {count} times; one column has one meaning"
            )


@cache
def known_columns(data: Data) -> tuple[str, ...]:
    """Return the names of the columns in a task's sample; none without a sample."""
    names: dict[str, None] = {}
    for row in _sample(data):
        names |= dict.fromkeys(_names(row))
    return (*names, *IN_EVERY_TASK) if names else ()


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the columns of a row; after a list, those of its objects."""
    for name, value in row.items():
        yield name
        for item in value if isinstance(value, list) else ():
            if isinstance(item, dict):
                yield from (f"{name}/{inner}" for inner in _names(item))


@cache
def answer_column(data: Data) -> str:
    """Return the column with the gold answer: the sample's first row has no answer without it."""
    for row in islice(_sample(data), 1):
        for name in row:
            rest = {key: value for key, value in row.items() if key != name}
            with suppress(UserError, KeyError):
                if data.read(rest).answer is None:
                    return name
    return ""


def _sample(data: Data) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task's sample; a bundle has no samples."""
    for name, folder in task_folders().items():
        if load_task(name).data is data:
            for sample in sorted(folder.glob("sample.*")):
                for _, load in data.rows(sample):
                    yield load()


def named_columns(columns: Sequence[str]) -> str:
    """Return the names of columns, for a message."""
    shown = [json.dumps(name, ensure_ascii=False)[1:-1][:40] for name in columns[:MOST_SHOWN]]
    more = len(columns) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def about_columns(data: Data, row: Mapping[str, Any], columns: Sequence[str], reason: str) -> str:
    """Return the columns of a row if it was refused because it lacks one; else an empty text.

    `columns` are the names in the file; `row` has the task's names.
    """
    for name in known_columns(data):
        outer, _, inner = name.rpartition("/")
        owner = _first_object(row.get(outer)) if outer else row
        if repr(inner) in reason and owner is not None and inner not in owner:
            has = f"an object in {outer!r} has" if outer else "the row has"
            found = named_columns(list(owner) if outer else columns)
            way_out = f"columns.{name}=COLUMN (score and check: --columns {name}=COLUMN)"
            return f"; {has} {found}; say {way_out}"
    return ""


def _first_object(value: Any) -> Mapping[str, Any] | None:
    """Return the first object of a list of objects; None if it is not such a list."""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else None
