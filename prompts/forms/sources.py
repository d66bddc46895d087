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

RowPlace = int | str
"""The line of a row, or its number in a file without lines."""

SourceRow = tuple[RowPlace, dict[str, Any] | NotSaid]

GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
BEGINNING_BYTES = 2**16
DECODED_AT_ONCE = 2**20


@dataclass(frozen=True)
class SourceFile:
    """A file whose rows can be read as often as needed."""

    path: Path
    description: str  # such as "JSON, GB18030, gzip"
    encoding: str = ""
    delimiter: str = ""  # names of the columns of a table

    @property
    def is_table(self) -> bool:
        """Say whether the cells are texts, even if they mean numbers or lists."""
        return bool(self.delimiter) or self.description == "Parquet"

    def rows(self) -> Iterator[SourceRow]:
        """Yield (place, row); in place of a row that cannot be read, yield the reason."""
        if self.path.is_dir():
            for path in sorted(self.path.rglob("*.json")):
                for place, row in source_of(path).rows():
                    yield f"{path.relative_to(self.path)}:{place}", row
        elif self.description.startswith("Parquet"):
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
        head = file.read(BEGINNING_BYTES)
    if not head.strip():
        raise Unreadable(f"{path}: is empty")
    compression = ", gzip" if head.startswith(GZIP) else ""
    if compression:
        with _bytes(path) as unpacked:
            head = unpacked.read(BEGINNING_BYTES)
    if head.startswith(PARQUET):
        if compression:
            raise Unreadable(f"{path}: is Parquet in gzip; gunzip it first")
        return SourceFile(path, "Parquet")
    for beginning, name in BEGINNINGS.items():
        if head.startswith(beginning):
            raise Unreadable(f"{path}: is {name}; give JSON, CSV, Parquet or gzip of them")
    encoding, name = _encoding(path, head)
    with _text(path, encoding) as text:
        delimiter = _delimiter(text.read(BEGINNING_BYTES))
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
    """Open a file as text; a byte that is no UTF-8 becomes a character that UTF-8 cannot have."""
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
        if head[zero:200:2].count(0) > 20 and not head[1 - zero : 200 : 2].count(0):
            return encoding, "UTF-16"
    if _decodes(path, "utf-8"):
        return "utf-8", "UTF-8"
    sample = _decodes(path, "gb18030")
    if sample and _is_usual(sample):
        return "gb18030", "GB18030"
    wrong = head.decode("utf-8", "ignore")
    if 20 * len(wrong.encode()) < 19 * len(head):
        raise Unreadable(f"{path}: is neither UTF-8, UTF-16 nor GB18030; save it as UTF-8")
    return "utf-8", "UTF-8"  # with a few wrong bytes; rows with them are left out


def _decodes(path: Path, encoding: str) -> str:
    """Return the first text of a file if the whole file is in this encoding; else an empty text."""
    decoder = codecs.getincrementaldecoder(encoding)()
    sample = ""
    with _bytes(path) as file:
        while block := file.read(DECODED_AT_ONCE):
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError:
                return ""
            sample = sample or text[:BEGINNING_BYTES]
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return ""
    return sample or " "


def _is_usual(text: str) -> bool:
    """Say whether most Chinese characters of a text are common ones."""
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
    lines = [line for line in start.splitlines() if line.strip()]
    if named := re.fullmatch("sep=(.)", lines[0] if lines else "", re.IGNORECASE):
        return named[1]
    header = lines[0] if lines else ""
    columns = {sign: len(next(csv.reader([header], delimiter=sign))) for sign in DELIMITERS}
    best = max(columns, key=lambda sign: columns[sign])
    return best if columns[best] > 1 else ""


def _json_rows(file: IO[str]) -> Iterator[SourceRow]:
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
    """Return the rows in an object that has a list of them: `{"data": [...]}`."""
    lists = [key for key, item in value.items() if isinstance(item, list) and item]
    names = [key for key in lists if key in ROWS_OF and isinstance(value[key][0], dict)]
    others = [key for key, item in value.items() if isinstance(item, dict | list) and item]
    if len(names) == 1 and set(others) <= {*names, "meta", "metadata", "info"}:
        return cast(list[Any], value[names[0]])
    return []


SURROGATE = re.compile("[\ud800-\udfff]")


def _as_row(value: Any) -> dict[str, Any] | NotSaid:
    if isinstance(value, NotSaid):
        return value
    if not isinstance(value, dict):
        return NotSaid("not a JSON object", str(value))
    try:
        return value if is_writable(value) else NotSaid("not UTF-8")
    except RecursionError:
        return NotSaid("not JSON", "it is nested too deeply")
    except UserError as error:  # a key is given twice, deeper in the row
        return NotSaid("not JSON", str(error))


def is_writable(value: Any) -> bool:
    """Say whether all texts of a value can be written as UTF-8; UserError: a key is given twice."""
    if isinstance(value, str):
        return not SURROGATE.search(value)
    if isinstance(value, dict):
        return all(map(is_writable, (*value, *value.values())))
    if isinstance(value, list):
        return all(map(is_writable, value))
    reason = getattr(value, "reason", None)  # a `Faulty`
    if reason:
        raise UserError(reason)
    return True


def _table_rows(file: IO[str], delimiter: str) -> Iterator[SourceRow]:
    csv.field_size_limit(sys.maxsize)
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
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _as_row(row)
    except (ArrowException, OSError) as error:
        raise Unreadable(f"{path}: is no Parquet that can be read: {error}") from None
