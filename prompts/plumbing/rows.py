"""Files of rows: JSON lines or one JSON list, read in order, or JSON lines read by id."""

import json
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    FileRow,
    Json,
    as_object,
    check_text,
    each_key_once,
    lines,
    located,
    open_bytes,
    parse_json,
    parse_row,
)


def case_rows(path: Path) -> Iterator[FileRow]:
    """Yield the rows of a file of cases: JSON lines, as `lines` reads them, or one JSON list."""
    numbered = lines(path)
    first_two = list(islice(numbered, 2))
    if _is_one_list([raw for _, raw in first_two]):
        yield from list_rows(path)
        return
    for number, raw in chain(first_two, numbered):
        yield number, partial(parse_row, raw)


def _is_one_list(first_two: Sequence[bytes]) -> bool:
    """Say whether a file is one JSON list, not lines with a list in the first."""
    if not first_two or not first_two[0].lstrip().startswith(b"["):
        return False
    try:
        parse_json(first_two[0])
    except UserError:
        return True  # the list does not end in its first line
    return len(first_two) == 1


def list_rows(path: Path) -> Iterator[FileRow]:
    """Yield (`row 3`, a function that checks and returns the row) for each item of a JSON list.

    The row is checked when the function is called, so that the caller can skip a bad row.
    """
    for number, item in enumerate(list_items(path), start=1):
        yield f"row {number}", partial(_checked_row, item)


def _checked_row(item: Json) -> dict[str, Json]:
    check_item(item)
    return as_object(item)


@dataclass(frozen=True)
class Faulty:
    """Takes the place of an object of a file that cannot be read."""

    reason: str


COMMENT = re.compile(rb"^[ \t]*//.*", re.MULTILINE)


def list_items(path: Path, key: str | None = None) -> list[Any]:
    """Return the items of a file's JSON list or, with `key`, of the list `key` in its object.

    Read the whole file into memory, as the official scorers do. Accept a byte order mark and `//`
    comments. `check_item` refuses errors within an item.
    """
    with open_bytes(path) as file, located(str(path)):
        raw = COMMENT.sub(b"", file.read().removeprefix(BOM))
        # A byte that is no UTF-8 becomes a character that UTF-8 cannot have.
        text = raw.decode("utf-8", "surrogateescape")
        try:
            value = json.loads(text, object_pairs_hook=object_or_faulty)
        except (ValueError, RecursionError) as error:
            whole = "a list is read whole, so no row of it can be skipped"
            raise UserError(f"not JSON: {error} ({whole})") from None
        if key is not None:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, list):
            raise UserError(f"has no list {key!r}" if key else "is no JSON list")
        return value


def object_or_faulty(pairs: list[tuple[str, Json]]) -> dict[str, Json] | Faulty:
    """Return an object of JSON; if it has a key twice, `Faulty`, for which its row is refused."""
    try:
        return each_key_once(pairs)
    except ValueError as error:
        return Faulty(f"not JSON: {error}")


NO_UTF8 = re.compile("[\udc80-\udcff]")


def check_item(item: Any) -> None:
    r"""Refuse an item of `list_items` if a part of it cannot be read.

    Such a part is a `Faulty` in place of an object, or a text with a byte that is no UTF-8 or with
    an escape such as `\ud83d`, half of a character.
    """
    try:
        text = json.dumps(item, ensure_ascii=False, default=_refuse)
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    if NO_UTF8.search(text):  # `list_items` made these characters of bytes
        raise UserError("not UTF-8; save the file as UTF-8")
    check_text(item)


def _refuse(faulty: Faulty) -> NoReturn:
    raise UserError(faulty.reason)


class Rows:
    """A JSONL file that is read by id in any order. Memory holds only the places of its rows.

    If several rows have the same id, the first one counts, or with `last_counts` the last one.
    `duplicates` lists all but the first as (line number, id).
    """

    def __init__(
        self,
        path: Path,
        *,
        name: Path | None = None,
        key: Callable[[Mapping[str, Json]], object] = itemgetter("id"),
        same: Callable[[object], str] = str,
        last_counts: bool = False,
    ) -> None:
        """Index the rows of `path` by `key`; error messages call the file `name`.

        `same` returns equal texts for ids that mean the same example.
        """
        self.path = name or path
        self._key = key
        self._normal_id = same
        self._last_counts = last_counts
        self.duplicates: list[tuple[int, str]] = []
        self._offsets: dict[str, int] = {}
        self._file = open_bytes(path)
        weakref.finalize(self, self._file.close)
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._add(number, line, offset)
            offset += len(line)

    def _add(self, number: int, line: bytes, offset: int) -> None:
        """Index the row in a line, which begins at `offset` of the file."""
        with located(f"{self.path}:{number}"):
            row = parse_row(line)
            if "id" not in row:
                raise UserError("the row has no 'id'")
            key = self._normal_id(self._key(row))
        is_known = key in self._offsets
        if is_known:
            self.duplicates.append((number, key))
        if self._last_counts or not is_known:  # else the first row with this id counts
            self._offsets[key] = offset

    def __len__(self) -> int:
        return len(self._offsets)

    def ids(self) -> set[str]:
        return set(self._offsets)

    def get(self, key: object) -> dict[str, Json] | None:
        offset = self._offsets.get(self._normal_id(key))
        if offset is None:
            return None
        self._file.seek(offset)
        with located(str(self.path)):
            return parse_row(self._file.readline())
