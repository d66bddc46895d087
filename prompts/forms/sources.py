"""Read the rows of a file, a folder or a compressed file: JSON in any layout, table, Parquet."""

import codecs
import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from panjue.prompts.forms.values import JSONP, json_values
from panjue.prompts.other_formats import BEGINNINGS
from panjue.prompts.plumbing.errors import NotSaid, Unreadable, UserError
from panjue.prompts.plumbing.files import BOM, open_bytes, refuse_pipe
from panjue.prompts.plumbing.rows import Faulty

RowPlace = int | str
"""The line of a row, or its number in a file without lines."""

SourceRow = tuple[RowPlace, dict[str, Any] | NotSaid]

GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
BEGINNING = 2**16
"""Number of the first bytes or characters of a file that show its form."""

DECODED_AT_ONCE = 2**20


@dataclass(frozen=True)
class SourceFile:
    """A file whose rows can be read as often as needed."""

    path: Path
    description: str  # such as "JSON, GB18030, gzip"
    encoding: str = ""
    delimiter: str = ""  # what separates the columns of a table in text
    is_parquet: bool = False

    @property
    def is_table(self) -> bool:
        """Say whether it is a table, so that a cell may have a list or number as a text."""
        return bool(self.delimiter) or self.is_parquet

    def rows(self) -> Iterator[SourceRow]:
        """Yield (place, row); in place of a row that cannot be read, yield the reason."""
        if self.path.is_dir():
            for path in sorted(self.path.rglob("*.json")):
                for place, row in source_of(path).rows():
                    yield f"{path.relative_to(self.path)}:{place}", row
        elif self.is_parquet:
            yield from _parquet_rows(self.path)
        else:
            with _text(self.path, self.encoding) as file:
                if self.delimiter:
                    yield from _table_rows(file, self.delimiter)
                else:
                    yield from _json_rows(file)


def source_of(path: Path) -> SourceFile:
    """Find out the compression, the encoding and the layout of a file."""
    if path.is_dir():
        if not any(path.rglob("*.json")):
            raise Unreadable(f"{path}: is a folder without .json files")
        return SourceFile(path, "a folder of JSON files")
    refuse_pipe(path)
    with open_bytes(path) as file:
        head = file.read(BEGINNING)
    if not head.strip():
        raise Unreadable(f"{path}: is empty")
    compression = ", gzip" if head.startswith(GZIP) else ""
    if compression:
        with _bytes(path) as unpacked:
            head = unpacked.read(BEGINNING)
    if head.startswith(PARQUET):
        if compression:
            raise Unreadable(f"{path}: is Parquet in gzip; gunzip it first")
        return SourceFile(path, "Parquet", is_parquet=True)
    for beginning, name in BEGINNINGS.items():
        if head.startswith(beginning):
            raise Unreadable(f"{path}: is {name}; give JSON, CSV, Parquet or gzip of them")
    encoding, name = _encoding(path, head)
    with _text(path, encoding) as text:
        delimiter = _delimiter(text.read(BEGINNING))
    layout = "a table" if delimiter else "JSON"
    return SourceFile(path, f"{layout}, {name}{compression}", encoding, delimiter)


@contextmanager
def _bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file; unpack it if it is gzip."""
    with open_bytes(path) as file:
        is_gzip = file.read(2) == GZIP
        file.seek(0)
        if not is_gzip:
            yield file
            return
        try:
            with gzip.open(file) as unpacked:
                yield cast(BinaryIO, unpacked)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise Unreadable(f"{path}: the gzip is broken: {error}") from None


@contextmanager
def _text(path: Path, encoding: str) -> Iterator[IO[str]]:
    """Open a file as text; a byte that is no UTF-8 becomes a character that UTF-8 cannot have.

    In UTF-16, it may be no character at all: then the file is unreadable.
    """
    with (
        _bytes(path) as file,
        io.TextIOWrapper(file, encoding, "surrogateescape", newline="") as text,
    ):
        try:
            yield text
        except UnicodeDecodeError as error:
            raise Unreadable(f"{path}: is no whole {encoding}: {error.reason}") from None


MARKS = {
    BOM: ("utf-8-sig", "UTF-8"),
    codecs.BOM_UTF16_LE: ("utf-16", "UTF-16"),
    codecs.BOM_UTF16_BE: ("utf-16", "UTF-16"),
}
WITHOUT_MARK = (("utf-16-le", 1), ("utf-16-be", 0))
"""Encoding -> which of the two bytes of an ASCII character is 0 in it."""

HAN = re.compile(r"[\u4e00-\u9fff]")
LEVEL_1 = range(0xB0, 0xD8)
"""First bytes of the 3,755 common characters in GB2312. They are over 95% of the characters of a
judgment, and only a third of the characters if a text of another encoding is read as GB2312."""


def _encoding(path: Path, head: bytes) -> tuple[str, str]:
    """Return Python's name of the encoding of a file, and the usual name."""
    for mark, names in MARKS.items():
        if head.startswith(mark):
            return names
    for encoding, zero in WITHOUT_MARK:
        zeros = head[zero:200:2].count(0)
        other_zeros = head[1 - zero : 200 : 2].count(0)
        # Of the two bytes of an ASCII character, one is 0; over 20 of the first 100 are ASCII.
        if zeros > 20 and not other_zeros:
            return encoding, "UTF-16"
    if _beginning(path, "utf-8") is not None:
        return "utf-8", "UTF-8"
    text = _beginning(path, "gb18030")
    if text and _has_common_characters(text):
        return "gb18030", "GB18030"
    valid = head.decode("utf-8", "ignore").encode()
    if 20 * len(valid) < 19 * len(head):  # over 5% is no UTF-8
        raise Unreadable(f"{path}: is neither UTF-8, UTF-16 nor GB18030; save it as UTF-8")
    return "utf-8", "UTF-8"  # with a few wrong bytes; rows with them are left out


def _beginning(path: Path, encoding: str) -> str | None:
    """Return the first text of a file; None if not the whole file is in this encoding."""
    decoder = codecs.getincrementaldecoder(encoding)()
    beginning = ""
    try:
        with _bytes(path) as file:
            while block := file.read(DECODED_AT_ONCE):
                text = decoder.decode(block)
                beginning = beginning or text[:BEGINNING]
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    return beginning


def _has_common_characters(text: str) -> bool:
    """Say whether over 80% of the Chinese characters are common; a wrong decoding has rare ones."""
    characters = HAN.findall(text)
    common = 0
    for character in characters:
        try:
            common += character.encode("gb2312")[0] in LEVEL_1
        except UnicodeEncodeError:
            continue
    return bool(characters) and common > 0.8 * len(characters)


DELIMITERS = "\t,;|"


def _delimiter(text: str) -> str:
    """Return the separator of the columns of a table; empty for JSON."""
    start = text.lstrip("\ufeff \t\r\n")
    if start[:1] in tuple("{[") or start.startswith("//") or JSONP.match(text):
        return ""
    header = next((line for line in start.splitlines() if line.strip()), "")
    if named := re.fullmatch("sep=(.)", header, re.IGNORECASE):
        return named[1]
    columns = {sign: len(next(csv.reader([header], delimiter=sign))) for sign in DELIMITERS}
    best = max(columns, key=lambda sign: columns[sign])
    return best if columns[best] > 1 else ""


def _json_rows(file: IO[str]) -> Iterator[SourceRow]:
    """Yield (place, row) of a JSON text; of a single object, the rows that it wraps, if it does."""
    values = json_values(file.read)
    first_two = list(islice(values, 2))
    if len(first_two) == 1:
        [(_, only)] = first_two
        rows = _rows_within(only) if isinstance(only, dict) else []
        if rows:
            first_two = [(f"row {number}", row) for number, row in enumerate(rows, start=1)]
    for place, value in chain(first_two, values):
        yield place, _as_row(value)


ROWS_OF = ("data", "rows", "items", "records", "cases", "examples", "train", "list", "RECORDS")


def _rows_within(value: dict[str, Any]) -> list[Any]:
    """Return the rows that an object wraps: `{"data": [{…}, {…}], "meta": {…}}`.

    Empty if it wraps none: it may be a row itself, with a list of objects among its fields.
    """
    inner = {key: item for key, item in value.items() if isinstance(item, dict | list) and item}
    wrapped: dict[str, list[Any]] = {}
    for key, item in inner.items():
        if key in ROWS_OF and isinstance(item, list) and isinstance(item[0], dict):
            wrapped[key] = item
    if len(wrapped) == 1 and inner.keys() <= {*wrapped, "meta", "metadata", "info"}:
        [rows] = wrapped.values()
        return rows
    return []


SURROGATE = re.compile("[\ud800-\udfff]")


def _as_row(value: Any) -> dict[str, Any] | NotSaid:
    """Return a row if it is one that can be written as JSON in UTF-8, else the reason."""
    if isinstance(value, NotSaid):
        return value
    if not isinstance(value, dict):
        return NotSaid("not a JSON object", str(value))
    try:
        _check_within(value)
    except RecursionError:
        return NotSaid("not JSON", "it is nested too deeply")
    except NotSaid as reason:
        return reason
    return value


def _check_within(value: Any) -> None:
    """Raise NotSaid for a text that is no UTF-8, and for an object with a key twice (`Faulty`)."""
    if isinstance(value, str):
        if SURROGATE.search(value):
            raise NotSaid("not UTF-8")
    elif isinstance(value, Faulty):
        raise NotSaid("not JSON", value.reason)
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            _check_within(item)
    elif isinstance(value, list):
        for item in value:
            _check_within(item)


def _table_rows(file: IO[str], delimiter: str) -> Iterator[SourceRow]:
    """Yield (line, row) of a table whose first line names the columns.

    A line `sep=;` above that one is skipped: it tells Excel the delimiter.
    """
    csv.field_size_limit(sys.maxsize)  # a judgment may be longer than the usual 131,072 characters
    reader = csv.reader(file, delimiter=delimiter)
    header: list[str] = []
    while True:
        place = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield place, NotSaid("not a row of the table", str(error))
            continue
        if cells is None:
            return
        if not any(map(str.strip, cells)) or (place == 1 and cells[0].lower().startswith("sep=")):
            continue
        if not header:
            header = [column.strip().lstrip("\ufeff") for column in cells]
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise UserError(f"line {place}: two columns are called {twice!r}")
        elif len(cells) != len(header):
            told = f"{len(cells)} cells, the header has {len(header)}"
            yield place, NotSaid("another number of cells than the header", told)
        else:
            yield place, _as_row(dict(zip(header, cells, strict=True)))


def _parquet_rows(path: Path) -> Iterator[SourceRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise UserError(f"{path}: to read Parquet, pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=256)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"row {number}", _as_row(row)
    except (ArrowException, OSError) as error:
        raise Unreadable(f"{path}: is no Parquet that can be read: {error}") from None
