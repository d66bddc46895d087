"""Files of cases: JSON lines, or one JSON document with a list of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    Record,
    check_text,
    lines,
    located,
    open_bytes,
    parse_case,
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
        raw = file.read().removeprefix(BOM)
        try:
            value = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError:
            raise UserError("not UTF-8; save the file as UTF-8") from None
        except RecursionError:
            raise UserError("it is nested too deeply") from None
        except ValueError as error:
            raise UserError(f"not JSON: {error}") from None
        if key is not None:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, list):
            raise UserError(f"has no list {key!r}" if key else "is no JSON list")
        return value


def _checked_row(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"expected a JSON object, found {type(row).__name__}")
    check_text(row)
    return row


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
        _, load = next(case_rows(path))
        row = load()
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
