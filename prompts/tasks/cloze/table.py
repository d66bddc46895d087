"""The submission of the contest: a table of `id` and `ret`, a JSON list; UTF-8 without a mark."""

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import FileRow, atomic_write, check_text, dump, open_bytes
from panjue.prompts.plumbing.submissions import SubmissionFormat, WriteRow, check_bom

COLUMNS = ["id", "ret"]


def _read_table(path: Path) -> Iterator[FileRow]:
    check_bom(path)
    with open_bytes(path) as file:
        rows = csv.reader((line.decode("utf-8") for line in file), strict=True)
        try:
            header = next(rows, [])
            if header != COLUMNS:
                found = ",".join(header)[:60]
                raise UserError(f"{path}:1: the header is not {','.join(COLUMNS)} but {found!r}")
            for cells in rows:
                yield rows.line_num, partial(_parse_cells, cells)
        except UnicodeDecodeError:
            place = f"{path}:{rows.line_num + 1}"
            raise UserError(f"{place}: not UTF-8; save the file as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path}:{rows.line_num}: not CSV: {error}") from None


def _parse_cells(cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(COLUMNS):
        raise UserError(f"{len(cells)} columns instead of {len(COLUMNS)}")
    [key, text] = cells
    try:
        ret = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"'ret' is not JSON such as [\"…\"]: {text[:40]!r}") from None
    check_text(ret)
    return {"id": key, "ret": ret}


@contextmanager
def _writing_table(path: Path) -> Iterator[WriteRow]:
    with atomic_write(path) as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(COLUMNS)

        def write(row: Mapping[str, Any]) -> None:
            table.writerow([row["id"], dump(row["ret"])])

        yield write


RET_TABLE = SubmissionFormat("submission.csv", _read_table, _writing_table)
