"""Own names of columns: rename the keys of a user's row to those that the task reads.

With `columns.fact=content`, the task's column `fact` is called `content` in the user's file. `ours`
and "our own name" mean the task's name of a column, and `given` or `given_name` the user's.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.task import Data, folders_with

Columns = Mapping[str, str]
"""The task's name of a column -> its name in the user's file. `outcomes/charges` is a column of the
objects in the list `outcomes`."""

MOST_SHOWN = 20
"""Number of columns of a row that a message names."""

IN_EVERY_TASK = ("groups",)
"""Columns that rows of any task may have, even if the sample has not."""


class Missing(NamedTuple):
    """A column that the user has named, but that a row does not have."""

    name: str  # the task's name, with the list in which the object is: outcomes/charges
    given: str  # the user's name
    columns: Sequence[str]  # columns of the row, or of the object in it
    has_ours: bool  # the row has the column under the task's name

    def __str__(self) -> str:
        """Return `has no column 'content' (columns.fact), but id, fact`.

        If the row has the column under the task's name, add how to read it there: with
        `columns.fact=fact`, which undoes the renaming.
        """
        found = (
            f"has no column {self.given!r} (columns.{self.name}), but {named_columns(self.columns)}"
        )
        if not self.has_ours:
            return found
        column = self.name.rpartition("/")[2]  # outcomes/charges -> charges
        back = f"{self.name}={column}"
        return f"{found}; columns.{back} (score and check: --columns {back}) is for our own name"


def renamed(
    row: Mapping[str, Any], columns: Columns, prefix: str = ""
) -> tuple[dict[str, Any], list[Missing]]:
    """Return a row with the task's names, and the named columns that it lacks.

    An object in the list `outcomes` is renamed like a row, with the `prefix` `outcomes/` for
    messages. UserError: the row has a column under both names. Null under the task's name does not
    count.
    """
    missing: list[Missing] = []
    ours: dict[str, str] = {}  # the user's name -> the task's
    of_list: dict[str, dict[str, str]] = defaultdict(dict)  # list -> columns of its objects
    for name, given in columns.items():
        outer, _, inner = name.partition("/")
        if inner:
            of_list[outer][inner] = given
            continue
        ours[given] = outer
        if given not in row:
            has_ours = row.get(outer) is not None
            missing.append(Missing(f"{prefix}{name}", given, list(row), has_ours))
    result = {}
    for key, value in row.items():
        if key in ours:
            result[ours[key]] = value
            continue
        given_name = columns.get(key)  # None: the user has not renamed the column `key`
        if given_name not in row:
            result[key] = value
        elif value is not None:  # the column is there under both names
            both = f"{given_name!r} (columns.{prefix}{key}) and {key!r}"
            raise UserError(f"has the columns {both}; leave out one of them")
    for outer, names in of_list.items():
        items = result.get(outer)
        if not isinstance(items, list):
            continue
        new_items = []
        for item in items:
            if isinstance(item, dict):
                new_item, missing_here = renamed(item, names, f"{outer}/")
                missing += missing_here
                new_items.append(new_item)
            else:  # the task refuses it
                new_items.append(item)
        result[outer] = new_items
    return result, missing


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
    # Objects in the list `outcomes` have columns of their own: `outcomes/charges`.
    named = Counter((name.rpartition("/")[0], given) for name, given in columns.items())
    for (_, given), count in named.items():
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
    """Yield the rows of a task's sample; the code in a bundle (`panjue bundle`) has no samples."""
    for folder in folders_with(data):
        for sample in sorted(folder.glob("sample.*")):
            for _, load in data.rows(sample):
                yield load()


def named_columns(columns: Sequence[str]) -> str:
    """Return the names of columns, for a message: `id, content and 3 more`."""
    shown = [json.dumps(name, ensure_ascii=False)[1:-1][:40] for name in columns[:MOST_SHOWN]]
    more = len(columns) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def about_columns(data: Data, row: Mapping[str, Any], columns: Sequence[str], reason: str) -> str:
    """Return the end of an error about a row that lacks a column; empty for another error.

    It says which columns there are, and how to name one of them: `; the row has id, content; say
    columns.fact=COLUMN`. `columns` are the names in the file, `row` has the task's names, and
    `reason` is the error so far.
    """
    for name in known_columns(data):
        outer, _, inner = name.rpartition("/")
        objects = row.get(outer) if outer else [row]
        if not (isinstance(objects, list) and objects and isinstance(objects[0], Mapping)):
            continue
        # The errors of a task's `read` name a column in quotes: `the row has no 'fact'`.
        if repr(inner) in reason and inner not in objects[0]:
            has = f"an object in {outer!r} has" if outer else "the row has"
            found = named_columns(list(objects[0]) if outer else columns)
            way_out = f"columns.{name}=COLUMN (score and check: --columns {name}=COLUMN)"
            return f"; {has} {found}; say {way_out}"
    return ""
