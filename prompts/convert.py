"""Make cases of a task from a file of another form: `panjue convert FILE OUT`.

Nothing is guessed. A row that does not say for certain what its case needs is left out and listed.
A record beside OUT has the hashes of what was written, so that a later conversion knows which files
it may replace.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
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
"""Forms that are considered only if no other form fits a row: a row of another form may fit them,
too, since a table is any row with facts and persons."""

OUR_COLUMNS = "; columns of a table are 编号, 案情, 被告人, 罪名, 法条, 刑期 (prompts/DATA.md)"

INSTRUCTION_LENGTH = 12
"""If `ENOUGH_QUESTIONS` begin with this number of equal characters, these are an instruction."""
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
    of_nobody: int = 0  # articles that are cited for nobody by name
    beginning: str | None = None
    """The first `INSTRUCTION_LENGTH` characters of all questions; empty if they differ."""
    left_out: Counter[str] = field(default_factory=Counter)  # kind of reason -> number of cases
    first_left_out: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines for the user."""
        yield f"{self.path}: {self.form.title} ({self.source.description}), {self.rows} rows"
        for note in self.form.notes:
            yield f"note: {note}"
        # All questions begin with the same characters, and none is shorter than these.
        is_instruction = len(self.beginning or "") == INSTRUCTION_LENGTH
        if self.written >= ENOUGH_QUESTIONS and is_instruction:
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
    is_ours = _is_made_for(out)
    for file in (out, left_out_path(out), record_path(out)):
        if file.is_dir():
            raise UserError(f"{file}: is a folder; name a file")
        refuse_foreign(file, is_ours, "OUT")
    whose = load_task(task)
    if task == "dialogue":
        raise UserError("convert: the cases of dialogue are folders; no form is read for it")
    source = source_of(path)
    own = own_form(task, whose, in_years=in_years, in_table=source.is_table)
    chosen = _form_of(source, task, form, own)
    if in_years and chosen is not own:
        raise UserError(f"{path}: --years is for panjue's own form; this is {chosen.title}")
    done = Conversion(path, out, source, chosen)
    # `atomic_write` lets its file appear at the end of its block, unless an error leaves the block.
    # So `_Empty`, raised at the end of a block, keeps a file without rows from appearing.
    with suppress(_Empty), atomic_write(left_out_path(out), is_ours) as left_out_file:
        left = _Hashed(left_out_file)
        with suppress(_Empty), atomic_write(out, is_ours) as cases:
            written = _Hashed(cases)
            _write(done, whose, written, left, is_documents=task == "reading")
            _write_record(done, task, written, left)
            if not done.written:
                raise _Empty  # leaves only the inner block
        if not done.left_out:
            raise _Empty
    if not done.left_out:
        delete(left_out_path(out), is_ours)  # the one of an earlier conversion
    if not done.written:
        raise UserError(
            f"{path}: {chosen.title}: none of its {done.rows} rows says all that a case needs; "
            f"{done.first_left_out} (all are in {left_out_path(out)})"
        )
    return done


class _Empty(Exception):
    """A file has no rows; see `convert`."""


def left_out_path(out: Path) -> Path:
    """Return the file beside `out` that lists the rows that were left out."""
    return out.with_name(f"{out.name}.left-out.jsonl")


def record_path(out: Path) -> Path:
    """Return the file beside `out` that says how it was made, with hashes of what was written."""
    return out.with_name(f"{out.name}.convert.json")


def _form_of(source: SourceFile, task: str, name: str, own: Form) -> Form:
    """Return the form of a task with this name; without a name, the only one that a first row fits.

    UserError: the task has no such form, or a row fits none or several.
    """
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
        for group in (forms, last):  # `last` only if none of the others fits
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
    hint = OUR_COLUMNS if source.is_table and last else ""
    for other in FORMS_OF_TASK.keys() - {task}:
        fitting = _forms_of_other(other, first, source)
        if fitting:
            hint = f"; with --task {other} it is {' or '.join(fitting)}"
    raise UserError(
        f"{source.path}: is of no form that is known for {task}: its rows have {keys[:200]}; "
        f"known are {', '.join(names)}{hint}"
    )


def _forms_of_other(task: str, row: Row, source: SourceFile) -> list[str]:
    """Return the titles of the forms of a task that a row fits; chats may be of any task."""
    own = own_form(task, load_task(task), in_years=False, in_table=source.is_table)
    forms = [own, *FORMS_OF_TASK[task].values()]
    fitting = [form for form in forms if form.fits(row) and form not in chat.QUESTIONS]
    return [form.title for form in fitting]


def _groups(
    source: SourceFile, form: Form, done: Conversion
) -> Iterator[tuple[RowPlace, list[Row] | NotSaid]]:
    """Yield the rows of each case, or why it cannot be read, with the place of its first row.

    Rows of one case, e.g. one for each person, have the same key. A row without a key is a case.
    Count the rows in `done`.
    """
    if form.key is None:  # each row is a case
        for place, row in source.rows():
            done.rows += 1
            yield place, row if isinstance(row, NotSaid) else [row]
        return
    counts, doubtful = _count_keys(source, form)
    waiting: dict[bytes, tuple[RowPlace, list[Row]]] = {}
    for place, row in source.rows():
        done.rows += 1
        if isinstance(row, NotSaid):
            yield place, row
            continue
        key = _key(row, form)
        if isinstance(key, NotSaid):
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
    """Return how many rows each case has, and the doubtful cases, by their keys.

    A row that cannot be read may be a person of the case before or after it. Both are doubtful.
    """
    counts: Counter[bytes] = Counter()
    doubtful: set[bytes] = set()
    last_key: bytes | None = None
    after_unread = False
    for _, row in source.rows():
        key = row if isinstance(row, NotSaid) else _key(row, form)
        if isinstance(key, NotSaid) and last_key:
            doubtful.add(last_key)
        if isinstance(key, bytes):
            counts[key] += 1
            if after_unread:
                doubtful.add(key)
            last_key = key
        after_unread = isinstance(key, NotSaid)
    return counts, doubtful


def _key(row: Row, form: Form) -> bytes | NotSaid | None:
    """Return the hash of what the rows of a case have in common; None if the row is a whole case.

    `NotSaid`: the row does not say to which case it belongs.
    """
    assert form.key is not None
    try:
        key = form.key(row)
    except NotSaid as reason:
        return reason
    return None if key in (None, "") else hashlib.sha256(repr(key).encode()).digest()[:16]


def _write(
    done: Conversion, task: Task, cases: "_Hashed", left: "_Hashed", *, is_documents: bool
) -> None:
    """Write the cases, and the rows that are left out with the reason; count both in `done`."""
    documents = _Documents(cases) if is_documents else None
    known: set[str] = set()
    number = -1
    for place, rows in _groups(done.source, done.form, done):
        for case in _cases(done.form, rows):
            number += 1
            result = case if isinstance(case, NotSaid) else _checked(case, number, task, known)
            if isinstance(result, NotSaid):
                done.left_out[result.kind] += 1
                where = f"line {place}" if isinstance(place, int) else place
                done.first_left_out = done.first_left_out or f"{where}: {printable(result)}"
                row = dump({"file": str(done.path), "place": place, "reason": str(result)})
                left.write(row.encode("utf-8", "replace").decode() + "\n")
                continue
            done.of_nobody += result.pop(chat.OF_NOBODY, 0)
            if done.form in chat.QUESTIONS:
                start = result["fact"][:INSTRUCTION_LENGTH]
                is_first = done.beginning is None
                done.beginning = start if is_first or start == done.beginning else ""
            if documents:
                documents.write(result)
            else:
                cases.write(dump(result) + "\n")
            done.written += 1
    if documents and done.written:
        cases.write(documents.END)


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
    """Return the case with an id, by default `number`, or why the task refuses it.

    `known` are the ids of earlier cases; the id is added.
    """
    if case.get("id") is None:
        case = {"id": number, **{key: value for key, value in case.items() if key != "id"}}
    # OF_NOBODY is no column of the task, which would refuse it. The caller takes it out and counts.
    of_task = {key: value for key, value in case.items() if key != chat.OF_NOBODY}
    try:
        example = task.data.read(of_task)
    except KeyError as error:
        return NotSaid("not a case of the task", f"it has no {error}")
    except UserError as error:
        return NotSaid("not a case of the task", str(error))
    if str(example.id) in known:
        return NotSaid("an id that was there before", str(example.id))
    known.add(str(example.id))
    return case


@dataclass
class _Hashed:
    """Writes into a file, and computes the hash of what it writes."""

    file: IO[str]
    hash: Any = field(default_factory=hashlib.sha256)

    def write(self, text: str) -> None:
        self.file.write(text)
        self.hash.update(text.encode())


@dataclass
class _Documents:
    """Writes questions in the form of the task `reading`; questions of one text stay together.

    The list `qas` of a text is left open for its next question: `{"paragraphs":[{"qas":[`. The next
    text, or `END`, closes it.
    """

    END_OF_TEXT = "]}]}"
    END = f"{END_OF_TEXT}\n]}}\n"
    OF_TEXT = ("context", "casename")

    file: _Hashed
    last_text: list[Any] | None = None  # domain, context and casename

    def write(self, case: Case) -> None:
        """Write a question, after its text if that differs from the last one."""
        text = [case.get("domain"), *map(case.get, self.OF_TEXT)]
        of_text = {key: case[key] for key in self.OF_TEXT if key in case}
        question = {key: case[key] for key in case if key not in (*self.OF_TEXT, "domain")}
        if text == self.last_text:
            self.file.write(",")
        else:
            domain = {"domain": case["domain"]} if case.get("domain") is not None else {}
            before = '{"data": [\n' if self.last_text is None else f"{self.END_OF_TEXT},\n"
            without_questions = dump({**domain, "paragraphs": [{**of_text, "qas": []}]})
            # Without its end, the JSON is open after `"qas":[`, where the questions follow.
            self.file.write(before + without_questions.removesuffix(self.END_OF_TEXT))
        self.file.write(dump(question))
        self.last_text = text


def _is_made_for(out: Path) -> Callable[[Path], bool]:
    """Return a function that says whether a conversion to `out` wrote a file, unchanged since.

    Only such a file may be replaced or deleted.
    """

    def is_made(path: Path) -> bool:
        hashes = _recorded_hashes(out)
        if path.name == record_path(out).name:  # the record cannot contain a hash of itself
            return bool(hashes)
        return path.is_file() and sha256(path) in hashes.get(path.name, ())

    return is_made


def _recorded_hashes(out: Path) -> dict[str, list[str]]:
    """Return name -> hashes of the files that the record beside `out` lists; empty without one."""
    try:
        record = json.loads(record_path(out).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    # With all three keys, it is hardly a user's file of the same name.
    if not isinstance(record, dict) or not {"left_out", "form", "made"} <= record.keys():
        return {}
    made = record["made"]
    return made if isinstance(made, dict) else {}


def _write_record(done: Conversion, task: str, cases: _Hashed, left: _Hashed) -> None:
    """Write the record, before the files appear.

    It has the hashes of the new files, and of those of an earlier conversion that they replace. So
    panjue may replace what is there even if it is killed before the new files appear.
    """
    made: dict[str, list[str]] = {}
    for path, hashed in ((done.out, cases), (left_out_path(done.out), left)):
        hashes = [hashed.hash.hexdigest()]
        if path.is_file():
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
