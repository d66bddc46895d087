"""Files of rows: JSON lines or one JSON list, read in their order; JSON lines read by id."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    Json,
    Record,
    check_text,
    lines,
    load,
    located,
    open_bytes,
    parse_case,
    parse_line,
    with_whole_id,
)


def case_rows(path: Path) -> Iterator[Record]:
    """Yield the rows of a file of cases: JSON lines, as `lines` reads them, or one JSON list."""
    with open_bytes(path) as file:
        is_list = file.read(64).removeprefix(BOM).lstrip().startswith(b"[")
    if is_list:
        yield from list_rows(path)
    else:
        for number, raw in lines(path):
            yield number, partial(parse_case, raw)


def list_rows(path: Path) -> Iterator[Record]:
    """Yield the rows of a JSON list."""
    for number, row in enumerate(list_items(path), start=1):
        yield f"row {number}", partial(_checked_row, row)


def list_items(path: Path, key: str | None = None) -> list[Any]:
    """Return the items of a file's JSON list or, with `key`, of the list `key` in its object.

    The whole file is read into memory, as the official scorers do. A byte order mark is accepted.
    """
    with open_bytes(path) as file, located(str(path)):
        value = load(file.read().removeprefix(BOM))
        if key is not None:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, list):
            raise UserError(f"has no list {key!r}" if key else "is no JSON list")
        return value


def _checked_row(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"expected a JSON object, found {type(row).__name__}")
    check_text(row)
    checked: dict[str, Any] = with_whole_id(row)
    return checked


OTHER_FORMATS = {
    "CAIL2018": {"fact", "meta"},
    "Alpaca": {"instruction", "output"},
    "ShareGPT": {"conversations"},
    "OpenAI messages": {"messages"},
}
"""Format of another program or contest -> the fields by which its rows are known."""


def format_of(row: Mapping[str, Any]) -> str | None:
    """Return the name of the format that has such rows, or None."""
    return next((name for name, known in OTHER_FORMATS.items() if known <= row.keys()), None)


def format_hint(path: Path, fields: Sequence[str], convertible: Sequence[str] = ()) -> str:
    """Return the end of a message about a file whose first row is no case; it may be empty.

    The last of the `fields` is the answer; `convertible` are the formats that `convert` reads.
    """
    if path.suffix.lower() == ".csv":
        return "; the file looks like CSV; convert it to the format in README.md"
    with suppress(UserError, StopIteration):
        _, load_row = next(case_rows(path))
        row = load_row()
        name = format_of(row)
        if not name and {*fields[:-1]} <= row.keys():
            return ""  # a field has a wrong value
        looks = f"the file looks like {name}, its" if name else "its"
        wanted = f"; a case has {', '.join(fields)}" if fields else ""
        hint = f"; {looks} fields are {', '.join(row)}{wanted}"
        if name in convertible:
            return f"{hint}; `panjue convert {quote(str(path))} OUT.jsonl` converts it"
        return f"{hint}; convert it to the format in README.md" if name else hint
    return ""


class Rows:
    """A JSONL file that is read by id in any order.

    If several rows have the same id, the first one is used; `duplicates` lists the others as
    (line number, id).
    """

    def __init__(
        self,
        path: Path,
        *,
        name: Path | None = None,
        key: Callable[[Mapping[str, Json]], str] = lambda row: str(row["id"]),
    ) -> None:
        """Index the rows of `path` by `key`; error messages call the file `name`."""
        self.path, self._key = name or path, key
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
        with located(f"{self.path}:{number}"):
            row = parse_line(line)
            if "id" not in row:
                raise UserError("the row has no 'id'")
            key = self._key(row)
        if key in self._offsets:
            self.duplicates.append((number, key))
        else:
            self._offsets[key] = offset

    def __len__(self) -> int:
        """Return the number of distinct ids."""
        return len(self._offsets)

    def ids(self) -> set[str]:
        """Return all ids, as text."""
        return set(self._offsets)

    def get(self, key: object) -> dict[str, Json] | None:
        """Return the row with this id, or None."""
        offset = self._offsets.get(str(key))
        if offset is None:
            return None
        self._file.seek(offset)
        with located(str(self.path)):
            return parse_line(self._file.readline())
