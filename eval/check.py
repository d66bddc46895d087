"""Check a submission before it is handed in, and name every fault with its place."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from panjue.eval.metric_values import COMPARED, metric_values, other_cases
from panjue.eval.stage import read_lists
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.names import NameCount
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row
from panjue.serve.decoding import decoding_of
from panjue.serve.tally import without_reply

MAX_SHOWN_LABELS = 5
FIRST_NOTES = 3


@dataclass
class Notes:
    """Facts that are no faults of a submission, but may be why its score is low."""

    names: NameCount = field(default_factory=NameCount)
    first_on_cases: list[str] = field(default_factory=list)  # as `id: note`
    n_on_cases: int = 0  # number of all notes on cases
    gold: Labels = field(default_factory=Labels)  # of the cases' answers; empty without answers
    not_in_gold: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Field and label -> how often the submission has it, for labels that no gold answer has."""

    def of(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Yield the cases; count their notes, and keep the first ones."""
        for example in self.names.of(examples):
            self.n_on_cases += len(example.notes)
            notes = [f"id {example.id}: {note}" for note in example.notes]
            self.first_on_cases += notes[: FIRST_NOTES - len(self.first_on_cases)]
            yield example

    def add(self, task: Task, row: Row) -> None:
        """Count the labels of a submission row that no gold answer has, if there is gold."""
        if not self.gold.counts:
            return
        with suppress(KeyError, TypeError):  # a row of another form; its faults are named elsewhere
            for item in task.answer.items_of(row):
                for name in task.answer.sets:
                    known = self.gold.counts[task.answer.kind(name)]
                    texts = (one for one in item[name] if isinstance(one, str))
                    self.not_in_gold.update((name, one) for one in texts if one not in known)

    def lines(self, task: Task) -> Iterator[str]:
        """Yield a line for each kind of note that there is."""
        yield from self.names.lines()
        if self.n_on_cases:
            first = " | ".join(self.first_on_cases)
            yield f"notes on cases: {self.n_on_cases}, first: {first}"
        shown = []
        for (name, label), count in self.not_in_gold.most_common(MAX_SHOWN_LABELS):
            hint = self.gold.did_you_mean(task.answer.kind(name), label)
            shown.append(f"{count} × {name} {label!r}{hint}")
        if more := len(self.not_in_gold) - len(shown):
            shown.append(f"{more} more")
        if shown:
            yield f"labels that no gold answer has: {' | '.join(shown)}"


def check(
    reader: Reader,
    submission: Path,
    cases: Path,
    notes: Notes | None = None,
    lists: Sequence[Path] = (),
) -> Iterator[str]:
    """Yield every fault of `submission`, one line of text each: `FILE:PLACE: fault`.

    A correct submission has the task's form, answers every case of `cases` once and in order, and
    every row follows the task's own rules. A label is a fault if it is not in `lists`, or without
    lists not in the `labels.json` beside the submission. With a `decode.json` beside it, a case
    that the model was not asked is a fault. Facts that are no faults are added to `notes`. Memory
    holds the ids of all cases. If rows are out of order, it also holds cases until their row comes.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    decoding = decoding_of(submission)
    labels = _known_labels(task, lists, submission)
    key_of = task.data.submission.same  # from an id to the key that joins rows and cases
    notes = notes or Notes()
    examples = notes.of(reader.read(cases))  # yields these cases and counts their notes
    case_ids: dict[str, int | str] = {key_of(example.id): example.id for example in examples}
    if not case_ids:
        raise UserError(f"{cases}: has no cases")
    if message := _other_cases(reader, submission, cases):
        yield message
        return
    # Without known labels, no label is a fault. Those that gold does not have are noted instead.
    if labels is None and next(reader.read(cases)).answer is not None:
        notes.gold = task.ask.labels(reader.read(cases))
    moved = _moved_keys(task, submission, list(case_ids))
    unread = reader.read(cases)
    waiting: dict[str, Example] = {}  # cases that were read before their row
    seen: dict[str, int | str] = {}  # key -> the place of its row
    for place, load in task.data.submission.read(submission):
        try:
            row = load()
            key = _key_of_case(row, cases, case_ids, seen, key_of)
        except UserError as error:
            yield f"{submission}:{place}: {error}"
            continue
        seen[key] = place
        if key in moved:
            yield f"{submission}:{place}: id {row['id']} is out of order"
        while key not in waiting:  # cases before it get their rows later, or none
            example = next(unread)
            waiting[key_of(example.id)] = example
        example = waiting.pop(key)
        faults = list(task.data.check(example, row, labels))
        if not faults:  # a row that follows the rules must also be readable by the metric
            faults += unscorable(task, example, row)
        yield from (f"{submission}:{place}: id {row['id']}: {fault}" for fault in faults)
        notes.add(task, row)
    for key, case_id in case_ids.items():
        if key not in seen:
            yield f"{submission}: id {case_id} is not answered"
    for refusal in decoding.get("refusals", ()) if decoding else ():
        yield f"{submission}: {without_reply([refusal])}"


def _known_labels(task: Task, lists: Sequence[Path], submission: Path) -> Labels | None:
    """Return the labels of `lists`, or else of `labels.json` beside the submission.

    None if there are neither. A list does not name its field; it is the field that has most of
    these labels in the submission. In a field without a list, any label may be right.
    """
    if not lists:
        beside = submission.parent / "labels.json"
        return load_labels(beside) if beside.exists() else None
    answered: dict[str, Counter[str]] = {}
    for _, load in task.data.submission.read(submission):
        with suppress(UserError, KeyError, TypeError):  # a row with faults, which are named later
            for item in task.answer.items_of(load()):
                for name in task.answer.sets:
                    answered.setdefault(task.answer.kind(name), Counter()).update(item[name])
    known = read_lists(task, lists, Labels(answered))
    # Each label has the count 1, because nobody counted: only the names matter here.
    return Labels({field: dict.fromkeys(sorted(names), 1) for field, names in known.items()})


def _moved_keys(task: Task, submission: Path, case_keys: Sequence[str]) -> set[str]:
    """Return the keys of rows that are out of order, given the keys of the cases in order."""
    position_of = {key: position for position, key in enumerate(case_keys)}
    positions: dict[str, int] = {}  # key of a row -> position of its case, in the rows' order
    for _, load in task.data.submission.read(submission):
        with suppress(UserError, KeyError):  # named later
            key = task.data.submission.same(load()["id"])
            positions.setdefault(key, position_of[key])
    keys = list(positions)
    return {keys[number] for number in moved_rows(list(positions.values()))}


def moved_rows(positions: Sequence[int]) -> set[int]:
    """Return the fewest rows to move, so that the others are in order: `[1, 2, 0] -> {2}`.

    `positions` has for each row, by number, the position of its case. The rows that stay are a
    longest ascending subsequence. Patience sorting finds it, from the last row to the first, so
    that of equally long ones the earliest row begins it.
    """
    # firsts[length - 1]: the row that begins a subsequence of this length. Of several such rows, it
    # is the one with the highest position, since most rows fit before it. So a row further on in
    # `firsts` has a lower position.
    firsts: list[int] = []
    next_row: dict[int, int | None] = {}  # row -> the row after it in its subsequence
    for number in reversed(range(len(positions))):
        # This row fits before the rows of `firsts` with a higher position: the first `length` ones,
        # as `bisect_left` finds. It needs an ascending order, hence the minus.
        length = bisect_left(firsts, -positions[number], key=lambda row: -positions[row])
        next_row[number] = firsts[length - 1] if length else None
        firsts[length : length + 1] = [number]  # replaces a first row, or appends one
    moved = set(range(len(positions)))
    row = firsts[-1] if firsts else None
    while row is not None:
        moved.remove(row)
        row = next_row[row]
    return moved


def _key_of_case(
    row: Row,
    cases: Path,
    case_ids: Container[str],
    seen: Mapping[str, int | str],
    key_of: Callable[[object], str],
) -> str:
    """Return the key of a row's id; UserError: it is the id of no case, or of an earlier row.

    `key_of` makes the key of an id. `case_ids` has the keys of all cases, and `seen` those of
    earlier rows with their places.
    """
    if "id" not in row:
        raise UserError("no 'id'")
    key = key_of(row["id"])
    if key in seen:
        raise UserError(f"id {row['id']} is already at {seen[key]}")
    if key not in case_ids:
        hint = _other_type(row["id"], case_ids, key_of)
        raise UserError(f"id {row['id']} is no case of {cases}{hint}")
    return key


def _other_type(row_id: Any, case_ids: Container[str], key_of: Callable[[object], str]) -> str:
    """Return a hint if there is a case `"1"` for the id `1`, or the reverse; else an empty text."""
    if isinstance(row_id, int) and key_of(str(row_id)) in case_ids:
        return "; there it is a text"
    if isinstance(row_id, str) and row_id.isdecimal() and key_of(int(row_id)) in case_ids:
        return "; there it is a number"
    return ""


def _other_cases(reader: Reader, submission: Path, cases: Path) -> str:
    """Return a message if all rows answer other cases; else an empty text."""
    rows = None
    with suppress(UserError):  # `check` names unreadable rows later
        rows = reader.task.data.submission.index(submission)
    if not rows:
        return ""
    return other_cases(reader, cases, rows, list(islice(reader.read(cases), COMPARED)))


def unscorable(task: Task, example: Example, row: Row) -> Iterator[str]:
    """Yield a fault if the metric cannot read a row even as its own gold."""
    try:
        metric_values(task, task.as_gold(row), row, "")
    except UserError:
        fallback = task.ask.decode("", example, Labels())  # the answer of an empty reply
        right = task.data.write(example, fallback.answer)
        yield f"`panjue score` cannot read it; a right row is {dump(right):.200}"
