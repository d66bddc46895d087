"""Files in the formats of other programs and contests: name them, and convert them to ours."""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from panjue.prompts.plumbing.documents import case_rows
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    LARGEST_LINE,
    Record,
    atomic_write,
    check_text,
    dump,
    open_bytes,
)
from panjue.prompts.task import Data

OTHER_FORMATS = {
    "CAIL2018": {"fact", "meta"},
    "CAIL2018 without meta": {"fact", "accusation"},
    "Alpaca": {"instruction", "output"},
    "ShareGPT": {"conversations"},
    "OpenAI messages": {"messages"},
}
"""Format of another program or contest -> the fields by which its rows are known."""


def csv_columns(path: Path) -> list[str]:
    """Return the columns of a file that looks like CSV, by its name or its header; else none."""
    with open_bytes(path) as file:
        first = file.readline(LARGEST_LINE).removeprefix(BOM).strip()
    if first[:1] in b"{[/":  # JSON, or a comment before it
        return []
    columns = next(csv.reader([first.decode("utf-8", "replace")]))
    return columns if path.suffix.lower() == ".csv" or {"fact", "text"} & {*columns} else []


def rows_of(path: Path) -> Iterator[Record]:
    """Yield the rows of a file in another format: JSON lines, a JSON list, or CSV."""
    return _csv_rows(path) if csv_columns(path) else case_rows(path)


def _csv_rows(path: Path) -> Iterator[Record]:
    csv.field_size_limit(LARGEST_LINE)
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file)
        try:
            for number, row in enumerate(table, start=1):
                yield f"row {number}", partial(_csv_row, row)
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path}:{table.line_num}: not CSV: {error}") from None


def _csv_row(row: dict[str, Any]) -> dict[str, Any]:
    if None in row or None in row.values():
        raise UserError("it has more or fewer cells than the header")
    return row


def format_of(row: Mapping[str, Any]) -> str | None:
    """Return the name of the format that has such rows, or None."""
    return next((name for name, known in OTHER_FORMATS.items() if known <= row.keys()), None)


def format_hint(data: Data, path: Path) -> str:
    """Return the end of a message about a file whose first row is no case; it may be empty.

    It has the fields found and wanted, the format that the file looks like, and the way out.
    """
    with suppress(UserError):
        for _, load in rows_of(path):
            row = load()
            name = format_of(row)
            kind = "CSV" if csv_columns(path) else name
            if not kind and {*data.fields[:-1]} <= row.keys():
                return ""  # a field has a wrong value
            found = f"the file looks like {kind}, its" if kind else "its"
            wanted = f"; a case has {', '.join(data.fields)}" if data.fields else ""
            hint = f"; {found} fields are {', '.join(row)}{wanted}"
            if name in data.converters:
                return f"{hint}; `panjue convert {quote(str(path))} OUT.jsonl` converts it"
            return f"{hint}; convert it to the format in README.md" if kind else hint
    return ""


@dataclass
class Conversion:
    """The counts of a conversion.

    Attributes:
        rows: Rows of the file.
        converted: Rows that were written.
        notes: What the format does not tell -> the number of written rows that this concerns.
    """

    rows: int = 0
    converted: int = 0
    notes: Counter[str] = field(default_factory=Counter)


def convert(data: Data, path: Path, out: Path, report: Callable[[str], None]) -> Conversion:
    """Write the rows of a file in another format to `out` as cases; a row's number is its id.

    `report` gets one line for each row that cannot be converted, with its place and the reason. Of
    JSON lines and of CSV, only one row is in memory.

    Raises:
        UserError: The file cannot be read, or none of its rows can be converted.
    """
    result, faults = Conversion(), list[tuple[int | str, str]]()
    with atomic_write(out) as file:
        for place, load in rows_of(path):
            result.rows += 1
            try:
                case, notes = _converted(data, load())
                case = {"id": result.rows, **case}
                check_text(case)
                data.read(case)  # what is written can be read
            except (UserError, KeyError) as error:
                reason = f"the row has no {error}" if isinstance(error, KeyError) else str(error)
                faults.append((place, reason))
            else:
                result.converted += 1
                result.notes.update(notes)
                file.write(dump(case) + "\n")
            if result.converted:  # before the first success, they may be all there is
                _report(path, faults, report)
        if faults:
            place, reason = faults[0]
            raise UserError(f"{path}: no row can be converted; the first, {place}: {reason}")
        if not result.rows:
            raise UserError(f"{path}: has no rows")
    return result


def _report(path: Path, faults: list[tuple[int | str, str]], report: Callable[[str], None]) -> None:
    for place, reason in faults:
        report(f"{path}:{place}: not converted: {reason}")
    faults.clear()


def _converted(data: Data, row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a row as a case without its id, and notes on what its format does not tell."""
    name = format_of(row)
    if name is None or name not in data.converters:
        known = (f"{name} ({', '.join(sorted(OTHER_FORMATS[name]))})" for name in data.converters)
        raise UserError(
            f"its fields are {', '.join(row) or 'none'}; the formats that can be converted are "
            f"{', '.join(known)}, as JSON lines, a JSON list or CSV"
        )
    return data.converters[name](row)
