"""One JSON document of many items, read item by item.

Not by ijson: its fast parser takes half a surrogate pair for a question mark without a word, and
some kilobytes of brackets for a gigabyte.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from panjue.prompts.errors import UserError
from panjue.prompts.files import LARGEST_LINE, at

CHUNK = 2**16
"""Characters read at a time, at first; what is not enough for an item is doubled."""


def list_items(path: Path, key: str | None = None) -> Iterator[Any]:
    """Yield the items of a document that is a list, or of the list under `key` of an object.

    A byte order mark is accepted. In memory is one item at a time.

    Raises:
        UserError: The file cannot be opened, is no UTF-8, no JSON, or has no such list.
    """
    try:
        file = path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    with file, at(str(path)):
        text = _Text(file)
        if key is None:
            yield from _items(text)
        else:
            yield from _items_under(text, key)
        if text.peek():
            raise UserError(f"goes on behind its end with {text.peek()!r}")


def _items_under(text: "_Text", key: str) -> Iterator[Any]:
    text.expect("{")
    found = False
    more = text.peek() != "}"
    while more:
        name = text.value()
        text.expect(":")
        if name == key:
            found = True
            yield from _items(text)
        else:
            text.value()
        more = text.skip(",")
    text.expect("}")
    if not found:
        raise UserError(f"has no {key!r}")


def _items(text: "_Text") -> Iterator[Any]:
    text.expect("[")
    more = text.peek() != "]"
    while more:
        yield text.value()
        more = text.skip(",")
    text.expect("]")


class _Text:
    """The text of a document from where it has been read to."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._buffer, self._place, self._read = file, "", 0, 0
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """Return the next character that is no space; nothing at the end."""
        while True:
            while self._place < len(self._buffer) and self._buffer[self._place] in " \t\r\n":
                self._place += 1
            if self._place < len(self._buffer) or not self._more(CHUNK):
                return self._buffer[self._place : self._place + 1]

    def skip(self, character: str) -> bool:
        """Pass over `character` if it is next."""
        is_next = self.peek() == character
        self._place += is_next
        return is_next

    def expect(self, character: str) -> None:
        """Pass over `character`, which must be next."""
        if not self.skip(character):
            found = self.peek()
            what = f"found {found!r}" if found else "it ends"
            raise UserError(f"not JSON of the form asked for: {what} instead of {character!r}")

    def value(self) -> Any:
        """Read the next value."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self._buffer, self._place)
                behind = self._buffer[end : end + 1]
                problem = f"found {behind!r} behind a value" if behind else "it ends too early"
            except RecursionError:
                raise UserError("it is nested too deeply") from None
            except ValueError as error:
                value, end, behind, problem = None, 0, "", getattr(error, "msg", str(error))
            if behind and behind in " \t\r\n,:]}":  # else a number may go on
                self._place = end
                return value
            if not self._more(len(self._buffer) - self._place):
                raise UserError(f"not JSON: {problem}")

    def _more(self, size: int) -> bool:
        """Read on; say whether there was more. What has been passed over is let go."""
        if len(self._buffer) - self._place > LARGEST_LINE:
            raise UserError(f"an item is longer than {LARGEST_LINE >> 20} MiB, or is no JSON")
        try:
            chunk = self._file.read(max(CHUNK, size))
        except UnicodeDecodeError:
            raise UserError("not UTF-8; save the file as UTF-8") from None
        self._buffer, self._place = self._buffer[self._place :] + chunk, 0
        return bool(chunk)
