"""Rows of a JSON Lines file by id; only ids and byte offsets are in memory."""

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import Json, located, open_bytes, parse_line


def row_id(row: Mapping[str, Json]) -> str:
    """Return the id of a row as text."""
    return str(row["id"])


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
        key: Callable[[Mapping[str, Json]], str] = row_id,
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

    def __contains__(self, key: object) -> bool:
        """Return whether there is a row with this id."""
        return str(key) in self._offsets

    def get(self, key: object) -> dict[str, Json] | None:
        """Return the row with this id, or None."""
        offset = self._offsets.get(str(key))
        if offset is None:
            return None
        self._file.seek(offset)
        with located(str(self.path)):
            return parse_line(self._file.readline())
