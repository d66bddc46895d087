"""Check a submission before it is handed in: every fault, with its place."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from panjue.eval.decoding import decoding_of, never_asked
from panjue.eval.shown import own_gold
from panjue.eval.values import metric_values, other_cases
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row


def check(reader: Reader, submission: Path, cases: Path) -> Iterator[str]:
    """Yield every fault of `submission`, one line of text each: `FILE:PLACE: fault`.

    A correct submission has the task's form, answers every case of `cases` once and in order, and
    every row passes the task's own rules. If `labels.json` is beside it, other labels are faults;
    if `decode.json` is, so are cases that the model was never asked.
    Only the ids, and cases that were skipped by rows out of order, are kept in memory.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    label_file = submission.parent / "labels.json"
    labels = load_labels(label_file) if label_file.exists() else None
    case_ids = {str(example.id) for example in reader.read(cases)}
    if not case_ids:
        raise UserError(f"{cases}: has no cases")
    message = _other_cases(reader, submission, cases)
    if message:
        yield message
        return
    remaining = _Remaining(reader.read(cases))
    seen: dict[str, int | str] = {}
    records = 0
    for number, load in task.data.submission.read(submission):
        records += 1
        place = f"{submission}:{number}"
        try:
            row = load()
            key = _checked_id(row, seen)
            if key not in case_ids:
                raise UserError(f"id {key} is no case of {cases}")
        except UserError as error:
            yield f"{place}: {error}"
            continue
        seen[key] = number
        if remaining.is_skipped(key):
            yield f"{place}: id {key} is out of order"
        example = remaining.take(key)
        faults = list(task.data.check(example, row, labels)) or unscorable(task, example, row)
        yield from (f"{place}: id {key}: {fault}" for fault in faults)
    yield from (f"{submission}: id {key} is not answered" for key in remaining.ids())
    decoding = decoding_of(submission) if submission.is_file() else None
    for refusal in decoding.get("refusals", ()) if decoding else ():
        yield f"{submission}: {never_asked([refusal])}"
    if not records:
        yield f"{submission}: the file is empty"


def _checked_id(row: Row, seen: Mapping[str, int | str]) -> str:
    """Return the id of a row; UserError: it has none, or another row has it."""
    if "id" not in row:
        raise UserError("no 'id'")
    key = str(row["id"])
    if key in seen:
        raise UserError(f"id {key} stands already at {seen[key]}")
    return key


class _Remaining:
    """The cases that no row has answered yet; of those ahead of the rows, none is in memory."""

    def __init__(self, ahead: Iterator[Example]) -> None:
        self._ahead = ahead
        self._skipped: dict[str, Example] = {}

    def is_skipped(self, key: str) -> bool:
        """Say whether a row of a later case has come before that of this one."""
        return key in self._skipped

    def take(self, key: str) -> Example:
        """Return the case with this id, which must remain."""
        if key in self._skipped:
            return self._skipped.pop(key)
        for example in self._ahead:
            if str(example.id) == key:
                return example
            self._skipped[str(example.id)] = example
        raise AssertionError(f"the case {key} is there")

    def ids(self) -> Iterator[str]:
        yield from self._skipped
        yield from (str(example.id) for example in self._ahead)


def _other_cases(reader: Reader, submission: Path, cases: Path) -> str:
    """Return a message if all is about other cases; rows that cannot be read are named later."""
    rows = None
    with suppress(UserError):
        rows = reader.task.data.submission.index(submission)
    return other_cases(reader, cases, rows) if rows else ""


def unscorable(task: Task, example: Example, row: Row) -> Iterator[str]:
    """Yield a fault if the metric cannot read a row, even as its own gold."""
    try:
        metric_values(task, own_gold(row), row, "")
    except UserError:
        right = task.data.write(example, task.ask.decode("", example, Labels()).answer)
        yield f"`panjue score` cannot read it; a right row is {dump(right):.200}"
