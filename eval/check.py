"""Would the contest take this file? Every fault of a submission, with its line."""

from collections.abc import Iterator
from pathlib import Path

from panjue.prompts.errors import UserError
from panjue.prompts.files import parse_line
from panjue.prompts.labels import Labels
from panjue.prompts.task import Example, Task


def check(task: Task, submission: Path, cases: Path, labels: Labels | None = None) -> Iterator[str]:
    """Yield every fault of `submission`, one line of text each: `FILE:LINE: what is wrong`.

    A hand-in answers every case of `cases` once and in order, one UTF-8 JSON object a line, and
    every row passes the task's own rules. Memory holds the ids and the cases that rows out of order
    have jumped over.

    Raises:
        UserError: `submission` or `cases` cannot be read at all.
    """
    known = {str(example.id) for example in task.read(cases)}
    wanted = task.read(cases)
    seen: dict[str, int] = {}
    skipped: dict[str, Example] = {}
    number = 0
    for number, line in _lines(submission):
        place = f"{submission}:{number}"
        if not line.strip():
            yield f"{place}: the line is empty"
            continue
        try:
            row = parse_line(line)
        except UserError as error:
            yield f"{place}: {error}"
            continue
        key = str(row.get("id"))
        if key in seen:
            yield f"{place}: id {key} stands already on line {seen[key]}"
            continue
        if "id" not in row or key not in known:
            yield f"{place}: id {key} is no case of {cases}" if "id" in row else f"{place}: no 'id'"
            continue
        seen[key] = number
        if key in skipped:
            yield f"{place}: id {key} is out of order"
        example = skipped.pop(key, None) or _advance(wanted, key, skipped)
        yield from (f"{place}: id {key}: {fault}" for fault in task.faults(example, row, labels))
    skipped.update((str(example.id), example) for example in wanted)
    yield from (f"{submission}: id {key} is not answered" for key in skipped)
    if not number:
        yield f"{submission}: the file is empty"


def _advance(wanted: Iterator[Example], key: str, skipped: dict[str, Example]) -> Example:
    """Return the next case with this id, which is there; those before it are noted as skipped."""
    while str((example := next(wanted)).id) != key:
        skipped[str(example.id)] = example
    return example


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        lines = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    with lines:
        yield from enumerate(lines, start=1)
