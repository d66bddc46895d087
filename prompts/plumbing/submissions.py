"""The formats of submissions to contests, written and read row by row."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.files import (
    BOM,
    FileRow,
    atomic_write,
    dump,
    located,
    open_bytes,
    parse_row,
    refuse_pipe,
)
from panjue.prompts.plumbing.rows import Rows, list_rows

FIRST_BYTES = 64

WriteRow = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class SubmissionFormat:
    """The format of a submission: a file, or a folder of files."""

    name: str
    """Its file name in a run folder."""
    read: Callable[[Path], Iterator[FileRow]]
    writing: Callable[[Path], AbstractContextManager[WriteRow]]
    """Opens a submission and yields a function that writes a row. It appears if the block
    succeeds."""
    is_one: Callable[[Path], bool] = Path.is_file
    """Says whether a path is itself a submission in this format."""
    same: Callable[[object], str] = str
    """From an id to a text that is equal for all ids that the contest takes as the same."""
    last_counts: bool = False  # the last row with an id counts, not the first

    @property
    def _is_json_lines(self) -> bool:
        return self.read is _read_lines

    def find(self, path: Path) -> Path:
        """Return the submission in a run folder; return any other path unchanged."""
        refuse_pipe(path)
        found = path
        if path.is_dir() and not self.is_one(path):
            found = path / self.name
            if not found.exists():
                raise UserError(f"{path}: has no {self.name}; is --task right, is all generated?")
        if self._is_json_lines:
            refuse_other_form(found)
        return found

    def index(self, path: Path) -> Rows:
        """Return the rows by id. `Rows` reads JSON lines, so other formats are converted first."""
        if self._is_json_lines:
            return Rows(path, same=self.same, last_counts=self.last_counts)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".jsonl") as lines:
            for place, load in self.read(path):
                with located(f"{path}:{place}"):
                    row = load()
                    if "id" not in row:
                        raise UserError("the row has no 'id'")
                lines.write(dump(row) + "\n")
            lines.flush()
            made = Path(lines.name)  # deleted on return, but `Rows` keeps it open and reads it
            return Rows(made, name=path, same=self.same, last_counts=self.last_counts)


def refuse_other_form(path: Path) -> None:
    """Name a file that is packed, or one JSON list, where a submission has a JSON object a line."""
    if not path.is_file():
        return
    with open_bytes(path) as file:
        start = file.read(FIRST_BYTES).removeprefix(BOM).lstrip()
    if start.startswith((b"\x1f\x8b", b"PK\x03\x04")):
        raise Unreadable(f"{path}: is packed (gzip or ZIP); unpack it: a submission is JSON lines")
    if start.startswith(b"["):
        raise Unreadable(
            f"{path}: is one JSON list; write each of its objects on a line of its own"
        )


def _read_lines(path: Path) -> Iterator[FileRow]:
    """Yield (line number, function that parses the line), so that one bad line ends no reading."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            yield number, partial(_row_of_line, line)


def _row_of_line(line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise UserError("the line is empty")
    return parse_row(line)


@contextmanager
def _writing_lines(path: Path) -> Iterator[WriteRow]:
    with atomic_write(path) as out:
        yield lambda row: print(dump(row), file=out)


def _read_list(path: Path) -> Iterator[FileRow]:
    with open_bytes(path) as file:
        if file.read(len(BOM)) == BOM:
            raise UserError(f"{path}: starts with a byte order mark; save it as UTF-8 without BOM")
    return list_rows(path)


@contextmanager
def _writing_list(path: Path) -> Iterator[WriteRow]:
    separator = "["

    def write(row: Mapping[str, Any]) -> None:
        nonlocal separator
        out.write(f"{separator}\n{dump(row)}")
        separator = ","

    with atomic_write(path) as out:
        yield write
        out.write("[]\n" if separator == "[" else "\n]\n")


JSON_LINES = SubmissionFormat("submission.jsonl", _read_lines, _writing_lines)
JSON_LIST = SubmissionFormat("submission.json", _read_list, _writing_list)
