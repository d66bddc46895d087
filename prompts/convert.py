"""Make cases of a task from a file of another form: `panjue convert FILE OUT`.

Nothing is guessed. A row that does not say for certain what its case needs is left out and listed.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from panjue.prompts.forms import chat, data_sets, label_studio, spans, table
from panjue.prompts.forms.form import Case, Form, Row
from panjue.prompts.forms.own import own_form
from panjue.prompts.forms.sources import RowPlace, SourceFile, source_of
from panjue.prompts.plumbing.errors import NotSaid, Unreadable, UserError, did_you_mean, printable
from panjue.prompts.plumbing.files import atomic_write, delete, dump, sha256, write_json
from panjue.prompts.plumbing.ours import refuse_foreign
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.task import Task, load_task

OWN = "panjue"

FORMS_OF_TASK: dict[str, dict[str, Form]] = {
    "judgment": {
        "alpaca": chat.ALPACA,
        "sharegpt": chat.SHAREGPT,
        "messages": chat.MESSAGES,
        "prompt-completion": chat.COMPLETION,
        "query-response": chat.RESPONSE,
        "cail2018": data_sets.CAIL2018,
        "multiljp": data_sets.MULTILJP,
        "multijustice": data_sets.MULTIJUSTICE,
        "lecard": data_sets.LECARD,
        "label-studio": label_studio.LABEL_STUDIO,
    },
    "reading": {"cmrc2018": spans.CMRC2018, "squad": spans.SQUAD},
}
"""Task -> name of a form for `--form` -> the form. Each task also has its own form."""

LAST_FORMS: dict[str, dict[str, Form]] = {"judgment": {"table": table.TABLE}}
"""Forms that are considered only if no other form fits, since others have the same columns."""

OUR_COLUMNS = "; columns of a table are 编号, 案情, 被告人, 罪名, 法条, 刑期 (prompts/DATA.md)"

INSTRUCTION = 12
"""If many questions begin with this number of equal characters, these are an instruction."""
ENOUGH_QUESTIONS = 10

LOOKED_AT = 100
"""Number of first rows that show the form of a file; the first row that fits a form counts."""


@dataclass
class Conversion:
    """The result of converting a file."""

    path: Path
    out: Path
    source: SourceFile
    form: Form
    rows: int = 0
    written: int = 0
    of_nobody: int = 0
    beginning: str | None = None  # the beginning of all questions; empty if they differ
    left_out: Counter[str] = field(default_factory=Counter)  # kind of reason -> number of cases
    first_left_out: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines for the user."""
        yield f"{self.path}: {self.form.title} ({self.source.description}), {self.rows} rows"
        for note in self.form.notes:
            yield f"note: {note}"
        if self.written >= ENOUGH_QUESTIONS and len(self.beginning or "") == INSTRUCTION:
            yield f"note: all questions begin with {self.beginning!r}…, and so do the facts;"
            yield f"  if those of TEST do not, take the instruction out of {self.path} first"
        if self.of_nobody:
            yield f"note: {self.of_nobody} articles of the general part, cited for nobody by name"
        yield f"written: {self.out}, {self.written} cases"
        if self.left_out:
            yield f"left out: {self.left_out.total()}, listed in {left_out_path(self.out)}"
            width = len(str(max(self.left_out.values())))
            for kind, count in self.left_out.most_common():
                yield f"  {count:>{width}}  {kind}"


def convert(
    path: Path, out: Path, task: str = "judgment", form: str = "", *, in_years: bool = False
) -> Conversion:
    """Write the cases of a file to `out`, and list the rows that were left out in a file beside it.

    Both files appear when all is done. They replace only files that an earlier conversion made.
    `path` may be a folder of JSON files. Without the name of a `form`, the rows show which it is.
    With `in_years`, the terms of a file in panjue's own form are years, not months.
    """
    for file in (out, left_out_path(out), record_path(out)):
        _refuse(file, out)
    whose = load_task(task)
    if task == "dialogue":
        raise UserError("convert: the cases of dialogue are folders; no form is read for it")
    source = source_of(path)
    own = own_form(task, whose, in_years=in_years, in_table=source.is_table)
    chosen = _form_of(source, task, form, own)
    if in_years and chosen is not own:
        raise UserError(f"{path}: --years is for panjue's own form; this is {chosen.title}")
    done = Conversion(path, out, source, chosen)
    with suppress(_Empty), atomic_write(left_out_path(out), _is_made_for(out)) as left_out_file:
        left = _Hashed(left_out_file)
        with suppress(_Empty), atomic_write(out, _is_made_for(out)) as cases:
            written = _Hashed(cases)
            _write(done, whose, written, left, is_documents=task == "reading")
            _write_record(done, task, written, left)
            if not done.written:
                raise _Empty
        if not done.left_out:
            raise _Empty
    if not done.left_out:
        delete(left_out_path(out), _is_made_for(out))  # the one of an earlier conversion
    if not done.written:
        raise UserError(
            f"{path}: {chosen.title}: none of its {done.rows} rows says all that a case needs; "
            f"{done.first_left_out} (all are in {left_out_path(out)})"
        )
    return done


class _Empty(Exception):
    """Raised so that a file without rows does not appear."""


def left_out_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.left-out.jsonl")


def record_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.convert.json")


def _form_of(source: SourceFile, task: str, name: str, own: Form) -> Form:
    forms = {OWN: own, **FORMS_OF_TASK.get(task, {})}
    last = LAST_FORMS.get(task, {})
    names = [*forms, *last]
    if name:
        if name not in names:
            hint = did_you_mean(name, names)
            raise UserError(f"--form: {task} has no form {name!r} ({', '.join(names)}){hint}")
        return {**forms, **last}[name]
    first: Row = {}
    for place, row in islice(source.rows(), LOOKED_AT):
        if isinstance(row, NotSaid):
            continue
        first = first or row
        for group in (forms, last):
            fitting = [name for name, form in group.items() if form.fits(row)]
            if len(fitting) > 1:
                titles = " and ".join(group[name].title for name in fitting)
                ways = " or ".join(f"--form {name}" for name in fitting)
                raise UserError(f"{source.path}:{place}: is {titles} at once; say which: {ways}")
            if fitting:
                return group[fitting[0]]
    if not first:
        raise Unreadable(f"{source.path}: no row of it can be read as {source.description}")
    keys = ", ".join(map(str, islice(first, 12)))
    raise UserError(
        f"{source.path}: is of no form that is known for {task}: its rows have {keys[:200]}; "
        f"known are {', '.join(names)}" + (OUR_COLUMNS if source.is_table and last else "")
    )


CaseRows = tuple[RowPlace, list[Row] | NotSaid]


def _groups(source: SourceFile, form: Form, done: Conversion) -> Iterator[CaseRows]:
    """Yield the rows of each case, with the place of the first row."""
    if form.key is None:
        for place, row in source.rows():
            done.rows += 1
            yield place, row if isinstance(row, NotSaid) else [row]
        return
    counts, doubtful = _count_keys(source, form)
    waiting: dict[bytes, tuple[RowPlace, list[Row]]] = {}
    for place, row in source.rows():
        done.rows += 1
        key = row if isinstance(row, NotSaid) else _key(row, form)
        if isinstance(row, NotSaid):
            yield place, row
        elif isinstance(key, NotSaid):
            yield place, key
        elif key is None:
            yield place, [row]
        else:
            first, rows = waiting.setdefault(key, (place, []))
            rows.append(row)
            if len(rows) == counts[key]:
                del waiting[key]
                beside = NotSaid("a row beside it cannot be read: a person may be missing")
                yield first, beside if key in doubtful else rows


def _count_keys(source: SourceFile, form: Form) -> tuple[Counter[bytes], set[bytes]]:
    """Return how many rows each case has, and which cases lie next to unreadable rows."""
    counts: Counter[bytes] = Counter()
    doubtful: set[bytes] = set()
    before: bytes | None = None
    was_unread = False
    for _, row in source.rows():
        key = row if isinstance(row, NotSaid) else _key(row, form)
        if isinstance(key, bytes):
            counts[key] += 1
        is_unread = isinstance(key, NotSaid)
        for beside in (before if is_unread else None, key if was_unread else None):
            if isinstance(beside, bytes):
                doubtful.add(beside)
        before = key if isinstance(key, bytes) else before
        was_unread = is_unread
    return counts, doubtful


def _key(row: Row, form: Form) -> bytes | NotSaid | None:
    """Return the hash of what the rows of a case have in common; None if the row is alone."""
    assert form.key is not None
    try:
        key = form.key(row)
    except NotSaid as reason:
        return reason
    return None if key in (None, "") else hashlib.sha256(repr(key).encode()).digest()[:16]


def _write(
    done: Conversion, task: Task, cases: "_Hashed", left: "_Hashed", *, is_documents: bool
) -> None:
    writer: Callable[[Case], None] = (
        _Documents(cases).write if is_documents else _Lines(cases).write
    )
    known: set[str] = set()
    number = -1
    for place, rows in _groups(done.source, done.form, done):
        for case in _cases(done.form, rows):
            number += 1
            result = case if isinstance(case, NotSaid) else _checked(case, number, task, known)
            if isinstance(result, NotSaid):
                _leave_out(done, left, place, result)
                continue
            done.of_nobody += result.pop(chat.OF_NOBODY, 0)
            if done.form in chat.QUESTIONS:
                start = result["fact"][:INSTRUCTION]
                done.beginning = start if done.beginning in (None, start) else ""
            writer(result)
            done.written += 1
    if is_documents:
        cases.write(_Documents.END if done.written else "")


def _cases(form: Form, rows: list[Row] | NotSaid) -> Iterator[Case | NotSaid]:
    """Yield the cases of some rows, or why there is none."""
    if isinstance(rows, NotSaid):
        yield rows
        return
    for row in rows:
        if not form.fits(row):
            yield NotSaid("a row of another form", f"it has {', '.join(map(str, row))}")
            return
    try:
        yield from form.cases(*rows)
    except NotSaid as reason:
        yield reason


def _checked(case: Case, number: int, task: Task, known: set[str]) -> Case | NotSaid:
    """Return the case with an id, or why the task refuses it."""
    if case.get("id") is None:
        case = {"id": number, **{key: value for key, value in case.items() if key != "id"}}
    without = {key: value for key, value in case.items() if key != chat.OF_NOBODY}
    try:
        example = task.data.read(without)
    except KeyError as error:
        return NotSaid("not a case of the task", f"it has no {error}")
    except UserError as error:
        return NotSaid("not a case of the task", str(error))
    if str(example.id) in known:
        return NotSaid("an id that was there before", str(example.id))
    known.add(str(example.id))
    return case


def _leave_out(done: Conversion, left: "_Hashed", place: RowPlace, reason: NotSaid) -> None:
    done.left_out[reason.kind] += 1
    done.first_left_out = done.first_left_out or f"{place}: {printable(reason)}"
    row = dump({"file": str(done.path), "place": place, "reason": str(reason)})
    left.write(row.encode("utf-8", "replace").decode() + "\n")


class _Hashed:
    """Writes into a file, and computes the hash of what it writes."""

    def __init__(self, file: IO[str]) -> None:
        """Start with nothing."""
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, text: str) -> None:
        self._file.write(text)
        self._hash.update(text.encode())

    def sha256(self) -> str:
        return self._hash.hexdigest()


class _Lines:
    """Writes cases as JSON lines."""

    def __init__(self, file: _Hashed) -> None:
        """Write into a file."""
        self._file = file

    def write(self, case: Case) -> None:
        self._file.write(dump(case) + "\n")


class _Documents:
    """Writes questions in the form of the task `reading`; questions of one text stay together."""

    END = "]}]}\n]}\n"
    OF_TEXT = ("context", "casename")

    def __init__(self, file: _Hashed) -> None:
        """Write into a file."""
        self._file = file
        self._text: Sequence[Any] | None = None

    def write(self, case: Case) -> None:
        text = [case.get("domain"), *map(case.get, self.OF_TEXT)]
        of_text = {key: case[key] for key in self.OF_TEXT if key in case}
        question = {key: case[key] for key in case if key not in (*self.OF_TEXT, "domain")}
        if text == self._text:
            self._file.write(",")
        else:
            domain = {"domain": case["domain"]} if case.get("domain") is not None else {}
            beginning = '{"data": [\n' if self._text is None else "]}]},\n"
            opened = dump({**domain, "paragraphs": [{**of_text, "qas": []}]})
            self._file.write(beginning + opened.removesuffix("]}]}"))
        self._file.write(dump(question))
        self._text = text


def _refuse(file: Path, out: Path) -> None:
    if file.is_dir():
        raise UserError(f"{file}: is a folder; name a file")
    refuse_foreign(file, _is_made_for(out), "OUT")


def _is_made_for(out: Path) -> Callable[[Path], bool]:
    """Return a function that says whether an earlier conversion to `out` wrote a file as it is."""

    def is_made(path: Path) -> bool:
        made = _made(out)
        if path.name == record_path(out).name:
            return bool(made)
        return path.is_file() and sha256(path) in made.get(path.name, ())

    return is_made


def _made(out: Path) -> dict[str, list[str]]:
    """Return file name -> hashes, from the record beside `out` of what was written."""
    try:
        record = json.loads(record_path(out).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict) or not {"left_out", "form", "made"} <= record.keys():
        return {}
    made = record["made"]
    return made if isinstance(made, dict) else {}


def _write_record(done: Conversion, task: str, cases: _Hashed, left: _Hashed) -> None:
    """Write the record before the files appear, so that both count as ours even after a kill."""
    made: dict[str, list[str]] = {}
    for path, hashed in ((done.out, cases), (left_out_path(done.out), left)):
        hashes = [hashed.sha256()]
        if path.is_file():  # checked before: it is from an earlier conversion
            hashes.append(sha256(path))
        made[path.name] = hashes
    record = {
        "panjue": panjue_version(),
        "file": str(done.path),
        "task": task,
        "form": done.form.title,
        "source": done.source.description,
        "rows": done.rows,
        "written": done.written,
        "left_out": dict(done.left_out.most_common()),
        "made": made,
    }
    write_json(record_path(done.out), record, _is_made_for(done.out))
