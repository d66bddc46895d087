"""Check a submission before it is handed in: every fault, with its place."""

from collections.abc import Iterator
from pathlib import Path

from panjue.eval.decoding import decoding_of, never_asked
from panjue.prompts.example import Example
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader


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
    remaining = reader.read(cases)
    seen: dict[str, int | str] = {}
    skipped: dict[str, Example] = {}
    records = 0
    for number, load in task.data.submission.read(submission):
        records += 1
        place = f"{submission}:{number}"
        try:
            row = load()
        except UserError as error:
            yield f"{place}: {error}"
            continue
        key = str(row.get("id"))
        if key in seen:
            yield f"{place}: id {key} stands already at {seen[key]}"
            continue
        if "id" not in row or key not in case_ids:
            yield f"{place}: id {key} is no case of {cases}" if "id" in row else f"{place}: no 'id'"
            continue
        seen[key] = number
        if key in skipped:
            yield f"{place}: id {key} is out of order"
        example = skipped.pop(key, None) or _advance(remaining, key, skipped)
        yield from (
            f"{place}: id {key}: {fault}" for fault in task.data.check(example, row, labels)
        )
    skipped.update((str(example.id), example) for example in remaining)
    yield from (f"{submission}: id {key} is not answered" for key in skipped)
    decoding = decoding_of(submission) if submission.is_file() else None
    for refusal in decoding.get("refusals", ()) if decoding else ():
        yield f"{submission}: {never_asked([refusal])}"
    if not records:
        yield f"{submission}: the file is empty"


def _advance(remaining: Iterator[Example], key: str, skipped: dict[str, Example]) -> Example:
    """Return the next case with this id, which must exist; add the cases before it to `skipped`."""
    while str((example := next(remaining)).id) != key:
        skipped[str(example.id)] = example
    return example
