"""Read a file of examples: choose the rows, add the groups, handle bad rows.

The hash of its text says whether an example is held out from training, whether it is among the
held-out examples that are asked (those up to `highest_hash`), and to which half of them it belongs.
One half (`choosing`) chooses among adapters, and the `other` decides who answers each field, since
an adapter's score is too good on the examples that chose it. `split_by` says what of a text is
hashed: "normal text" is the text without white space, with half-width characters.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from panjue.prompts.columns import Columns, about_columns, renamed
from panjue.prompts.example import Example, groups_of, known_groups
from panjue.prompts.other_formats import DATA_PAGE, SUBMISSION, example_of, other_format
from panjue.prompts.plumbing.decode import flatten_forms
from panjue.prompts.plumbing.errors import Unreadable, UserError, printable
from panjue.prompts.plumbing.files import (
    atomic_write,
    delete,
    dump,
    located,
    read_lines,
    refuse_pipe,
)
from panjue.prompts.plumbing.records import Half, SplitBy
from panjue.prompts.task import Task, id_of

OnBadRow = Literal["stop", "skip"]


@dataclass
class Skipped:
    """The skipped rows: (file, place) -> reason. A row counts once, however often it is read."""

    rows: dict[tuple[Path, int | str], str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the count and the first row. Call it only if a row was skipped."""
        [(path, place), reason] = next(iter(self.rows.items()))
        return f"bad rows skipped: {len(self.rows)}; the first: {path}:{place}: {reason}"

    def show(self) -> None:
        """Print a line if rows were skipped."""
        if self.rows:
            print(printable(self))

    def write(self, path: Path) -> None:
        """Write the rows to a JSONL file; delete the file if there are none."""
        if not self.rows:
            delete(path)
            return
        with atomic_write(path) as out:
            for (file, place), reason in self.rows.items():
                row = dump({"file": str(file), "place": place, "reason": reason})
                out.write(row.encode("utf-8", "replace").decode() + "\n")  # names may be no UTF-8


@dataclass(frozen=True)
class Reader:
    """Reads the files of a task with the settings of one run."""

    task: Task
    side: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Id -> attribute -> group, for groups from a separate file (`side_groups`)."""
    held_out: bool = False  # read only the tenth that training holds out
    highest_hash: str = ""  # read only texts whose hash is not above this one
    split_by: SplitBy = "normal text"
    half: Half = ""  # read only this half of the texts
    columns: Columns = field(default_factory=dict)  # the files' own names of columns
    limit: int | None = None  # read only the first so many of the examples (of the held-out ones)
    on_bad_row: OnBadRow = "stop"
    skipped: Skipped = field(default_factory=Skipped)
    task_is_guessed: bool = False  # nobody named the task: errors ask whether it is right

    def read(self, path: Path) -> Iterator[Example]:
        """Yield the examples of a file, each id once."""
        refuse_pipe(path)
        is_known = False  # an example was read, so the file is of the task
        n_read = 0
        try:
            for example in self._read(path):
                is_known = True
                if self.held_out and not is_held_out(example, self.split_by):
                    continue
                n_read += 1  # `limit` also counts examples that are not chosen
                if self._is_chosen(example):
                    yield example
                if n_read == self.limit:
                    return
        except UserError as error:
            if not (is_known or isinstance(error, Unreadable)):
                self._refuse_other_format(path)
            raise
        if not is_known and self.skipped.rows:
            self._refuse_other_format(path)

    def _is_chosen(self, example: Example) -> bool:
        """Say whether an example is in the part of the file that this reader is to read.

        Its hash must not be above `highest_hash`, and it must be in `half`; if empty, all are.
        """
        if self.highest_hash and self.hash_of(example) > self.highest_hash:
            return False
        return not self.half or half_of(example) == self.half

    def hash_of(self, example: Example) -> str:
        """Return the hash by which an example is held out and chosen."""
        return hash_by(example, self.split_by)

    def _refuse_other_format(self, path: Path) -> None:
        """Raise Unreadable if the file seems to have another form than the task's files."""
        if name := other_format(path, self.task):
            reason = f"{path}: is no file of cases: it looks like {name}"
            if name == SUBMISSION:
                raise Unreadable(reason) from None
            way_out = f"panjue convert FILE OUT makes cases of many forms ({DATA_PAGE})"
            raise Unreadable("; ".join((reason, way_out, *example_of(self.task)))) from None

    def _read(self, path: Path) -> Iterator[Example]:
        """Yield all examples of a file; stop at a bad row, or skip it and record why."""
        place_of_id: dict[str, int | str] = {}
        for place, load in self.task.data.rows(path):
            try:
                example = self._example(place, load())
                first_place = place_of_id.setdefault(str(example.id), place)
                if first_place != place:
                    raise UserError(f"id {example.id} is already used at {first_place}")
            except UserError as error:
                if self.on_bad_row == "stop":
                    raise UserError(f"{path}:{place}: {error}") from None
                self.skipped.rows[path, place] = str(error)
                continue
            yield example

    def columns_of(self, path: Path, key: int | str) -> list[str]:
        """Return the columns of an example's row by the file's own names."""
        for place, load in self.task.data.rows(path):
            with suppress(UserError):
                row = load()
                if self._example(place, row).id == key:
                    return list(row)
        return []

    def _example(self, place: int | str, given: Mapping[str, Any]) -> Example:
        """Return the example of a row with its known groups; groups in `side` count more.

        A group that `side` calls unknown stays unknown, whatever the row says. A column that the
        user has named may be missing only in a row without an answer, as in test files.
        """
        row, missing = renamed(given, self.columns) if self.columns else (given, [])
        if self.task.data.numbered:
            number = int(str(place).removeprefix("row "))  # `place` is 3, or `row 3` of a table
            row = {"id": number, **row}
        try:
            example = self.task.data.read(row)
        except (UserError, KeyError) as error:
            reason = f"the row has no {error}" if isinstance(error, KeyError) else str(error)
            # If the error is about a column that the user has named, `Missing` explains more.
            # Errors quote the name without its list: 'charges' for `outcomes/charges`.
            for column in missing:
                if repr(column.name.rpartition("/")[2]) in reason:
                    raise UserError(str(column)) from None
            about = about_columns(self.task.data, row, list(given), reason)
            raise UserError(reason + about) from None
        for column in missing:
            # `has_ours`: the row has the column under the task's name, so the user's is a mistake.
            if column.has_ours or example.answer is not None:
                raise UserError(str(column))
        groups = {**example.groups, **groups_of(row.get("groups") or {})}
        groups |= self.side.get(str(example.id), {})
        return replace(example, groups=known_groups(groups))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Add to an error in the block which rows were skipped, and whether the task is certain."""
        try:
            yield
        except UserError as error:
            problem = str(error)
            if self.task_is_guessed and not isinstance(error, Unreadable):
                problem += " (read as a file of judgment; if it is none, name its --task)"
            if self.skipped.rows:
                problem += f"; {self.skipped}"
            raise UserError(problem) from None


def side_groups(path: Path | None) -> dict[str, dict[str, str]]:
    """Return id -> attribute -> group from a JSONL file of groups, for `Reader.side`."""
    side: dict[str, dict[str, str]] = {}
    if path is None:
        return side
    if path.suffix in (".csv", ".tsv"):
        raise UserError(
            f'{path}: is a table; groups are JSON lines, e.g. {{"id": 7, "court": "甲"}}'
        )
    for number, row in read_lines(path):
        with located(f"{path}:{number}"):
            key = str(id_of(row))
            if key in side:
                raise UserError(f"id {key} occurs twice")
            del row["id"]
            side[key] = groups_of(row)
    return side


def is_held_out(
    example: Example, split_by: SplitBy = "normal text", in_dev: Collection[str] | None = None
) -> bool:
    """Say whether training holds out an example, in whatever file it is.

    It holds out the texts of its dev file, if it has one: then `in_dev` are the hashes of these
    texts. Without a dev file, it holds out a tenth of all texts. `split_by` says what is hashed.
    """
    digest = hash_by(example, split_by)
    if in_dev is not None:
        return digest in in_dev
    return int(digest[:8], 16) % 10 == 0


WHITE_SPACE = re.compile(r"\s+")


def half_of(example: Example) -> Half:
    """Return the half of the held-out examples to which an example belongs.

    The first eight digits of the hash decide what is held out, so the next eight decide the half.
    """
    return "choosing" if int(text_hash(example)[8:16], 16) % 2 else "other"


def text_hash(example: Example) -> str:
    """Return the hash that every selection of examples uses.

    Id, order and label do not matter, nor do white space and the width of characters: the same
    facts may be in two files, or twice in one, in different print.
    """
    return hash_by(example, "normal text")


def hash_by(example: Example, split_by: SplitBy) -> str:
    """Return the hash of an example's text, or of its normal text.

    The normal text is the same for a text with other white space or full-width characters.
    """
    text = example.text
    if split_by == "normal text":
        text = WHITE_SPACE.sub("", flatten_forms(text))
    return hashlib.sha256(text.encode()).hexdigest()


def text_hashes(example: Example) -> tuple[str, str]:
    """Return the hash of an example's text, and the hash of version 0.4, which files may have."""
    return text_hash(example), hash_by(example, "text")
