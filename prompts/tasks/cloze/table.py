"""The submission of the contest: a table with `id` and `ret`, a JSON list.

It is read in the way of the contest's script, which uses pandas, and written plainly.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import BOM, FileRow, atomic_write, check_text, dump, open_bytes
from panjue.prompts.plumbing.submissions import SubmissionFormat, WriteRow

COLUMNS = ["id", "ret"]

NO_SCORE = "the contest gives no score to such a file"

WHOLE_NUMBER = re.compile(r"\s*0*([0-9]+?)(?:\.0)?\s*")


def _read_table(path: Path) -> Iterator[FileRow]:
    """Yield the rows of a table with their line numbers; refuse what pandas would not read."""
    with open_bytes(path) as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        rows = csv.reader((line.decode("utf-8") for line in file), strict=True)
        try:
            header = next(rows, [])
            if not {*COLUMNS} <= {*header}:
                found = ",".join(header)[:60]
                problem = f"the header has no {' and '.join(COLUMNS)} but {found!r}; {NO_SCORE}"
                raise UserError(f"{path}:1: {problem}")
            for cells in filter(None, rows):  # pandas ignores empty lines
                yield rows.line_num, partial(_parse_cells, header, cells)
        except UnicodeDecodeError:
            place = f"{path}:{rows.line_num + 1}"
            raise UserError(f"{place}: not UTF-8; save the file as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path}:{rows.line_num}: not CSV: {error}") from None


def _parse_cells(header: list[str], cells: list[str]) -> dict[str, Any]:
    """Return the row of a line: `1,"[""five""]"` -> id `1` and ret `["five"]`."""
    if len(cells) != len(header):
        raise UserError(f"{len(cells)} columns instead of {len(header)}; {NO_SCORE}")
    values = dict(zip(header, cells, strict=True))
    for column, value in values.items():
        if not value:  # in any column: its row is dropped, and then a row is missing
            raise UserError(f"nothing in column {column!r}; {NO_SCORE}")
    text = values["ret"]
    try:
        ret = json.loads(text)
    except (ValueError, RecursionError):
        problem = f"'ret' is not JSON such as [\"…\"]: {text[:40]!r}"
        raise UserError(f"{problem}; {NO_SCORE}") from None
    check_text(ret)
    return {"id": values["id"], "ret": ret}


def same_id(value: object) -> str:
    """Return an id as pandas reads it: `007` and `7.0` -> `7`."""
    number = WHOLE_NUMBER.fullmatch(str(value))
    return number[1] if number else str(value)


@contextmanager
def _writing_table(path: Path) -> Iterator[WriteRow]:
    """Open a table, and yield the function that writes a row to it."""
    with atomic_write(path) as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(COLUMNS)

        def write(row: Mapping[str, Any]) -> None:
            table.writerow([row["id"], dump(row["ret"])])

        yield write


RET_TABLE = SubmissionFormat("submission.csv", _read_table, _writing_table, same=same_id)
