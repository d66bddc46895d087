"""Files of cases: JSON lines, or one JSON document with a list of them."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    Record,
    at,
    check_text,
    lines,
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

    Raises:
        UserError: The file cannot be opened, is not UTF-8 or not JSON, or has no such list.
    """
    with open_bytes(path) as file, at(str(path)):
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
