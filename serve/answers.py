"""The answers to one test file, opened together with their task, cases and label sets."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panjue.finetune.classifier.opinions import Advisor, load_advisor
from panjue.prompts.example import Example, call_key
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.files import read_lines, sha256
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.run import (
    ANSWERS,
    HELD_OUT,
    REPLIES,
    Answers,
    AnswersRecord,
    Choice,
    Run,
    find_answers,
    is_held_out_folder,
)
from panjue.prompts.reader import Reader, text_hashes
from panjue.prompts.task import Task, load_task
from panjue.serve.settings import RESOURCES

CASES_FILE = "cases.jsonl"
"""File beside answers with the hash of each case's text."""


@dataclass(frozen=True)
class OpenedAnswers:
    """A test file with its answers, and what reads both."""

    answers: Answers
    record: AnswersRecord
    reader: Reader
    test: Path
    labels: Labels
    changed: str
    """How the training and the labels differ from those that answered; empty: they do not."""

    @property
    def folder(self) -> Path:
        return self.answers.folder

    @property
    def task(self) -> Task:
        return self.reader.task

    @property
    def name(self) -> str:
        """Return the name of the folder, after that of its run if it still lies there."""
        folder = self.folder.resolve()
        is_in_run = folder.parent.name == ANSWERS
        return f"{folder.parent.parent.name}/{folder.name}" if is_in_run else folder.name

    def advisor(self) -> Advisor | None:
        """Return the training's text classifier; None if it fitted none, or is another now."""
        trained = self.answers.trained
        if trained is None or self.changed or not self.task.answer.fields:
            return None
        return load_advisor(trained, self.task, self.labels)

    def refuse_changes(self) -> None:
        """UserError: the training or the labels are not those that answered."""
        if self.changed:
            raise UserError(
                f"{self.folder}: {self.changed}; restore it, or generate again with another "
                "answers=NAME"
            )

    def examples(self) -> Iterator[Example]:
        return self.reader.read(self.test)

    def rows(self) -> Rows:
        try:
            # A call on which the engine failed has been asked again, and has two rows.
            return Rows(self.folder / "completions.jsonl", key=call_key, last_counts=True)
        except Unreadable as error:
            raise Unreadable(f"{error}; run `panjue generate`") from None
        except UserError as error:
            raise UserError(
                f"{error}; `panjue generate` again drops it if it is the last line, cut by a "
                "kill; delete any other broken line by hand: generate asks that example again"
            ) from None

    def row(self, rows: Rows, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a call, which is `{id}`, or `{id, call}` of several."""
        row = self.row_if_any(rows, call)
        if row is None:
            raise UserError(
                f"{rows.path}: no row for id {call['id']}; "
                "run `panjue generate` again, it continues where it stopped"
            )
        return row

    def row_if_any(self, rows: Rows, call: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row of a call if it has one, complete or refused."""
        row = rows.get(call_key(call))
        if row is None or isinstance(row.get("refused"), str):
            return row
        texts: Any = row.get("texts")
        finish: Any = row.get("finish")
        is_whole = are_texts(texts) and are_texts(finish) and len(texts) == len(finish)
        if not (is_whole and isinstance(row.get("dropped_sentences"), int)):
            raise UserError(
                f"{rows.path}: id {call['id']}: needs 'texts', 'finish' and 'dropped_sentences'; "
                "delete the line: `panjue generate` asks that example again"
            )
        return row


def are_texts(value: Any) -> bool:
    """Say whether a value is a list of texts, at least one."""
    return isinstance(value, list) and value != [] and all(isinstance(one, str) for one in value)


def changes_since(answers: Answers) -> str:
    """Return how the hashes of a record differ from what is there now; empty if they do not."""
    record = answers.record
    changes = []
    trained = answers.trained
    if trained and record.trained_sha256:
        is_same = trained.is_dir() and model_sha256(trained) == record.trained_sha256
        if not is_same:
            changes.append(f"{trained} is missing, or is not the training that gave these answers")
    label_file = answers.folder / "labels.json"
    if not label_file.exists():
        changes.append(f"{label_file} is missing")
    elif record.labels_sha256 not in (None, sha256(label_file)):
        changes.append(f"{label_file} was changed since the answers were made")
    format_of = load_task(record.task).data.submission
    for folder, digest in record.voted.items():
        submission = Path(folder) / format_of.name
        if not (submission.exists() and sha256(submission) == digest):
            changes.append(f"{submission}, which voted, is missing, or was changed since")
    return "; ".join(changes)


def without_resources(record: AnswersRecord) -> AnswersRecord:
    """Return the record without the engine settings of memory and speed, which may differ."""
    engine = {key: value for key, value in record.engine.items() if key not in RESOURCES}
    return record.model_copy(update={"engine": engine})


def is_made_alike(one: AnswersRecord, other: AnswersRecord) -> bool:
    """Say whether the same model was asked in the same way, whatever the cases were."""
    of_both = []
    for record in (one, other):
        way = without_resources(record).part(REPLIES)
        of_both.append((way, record.trained_sha256, record.labels_sha256))
    return of_both[0] == of_both[1]


def held_out_answers(folder: Path, record: AnswersRecord) -> Path | None:
    """Return the folder of the answers to held-out cases that count for the answers in `folder`.

    They were made in the same way, and have a choice beside them; None if there are none.
    """
    if is_held_out_folder(folder):
        return None
    for name in (f"{HELD_OUT}-{folder.name}", HELD_OUT):
        place = folder.parent / name
        if Choice.read(place) and is_made_alike(AnswersRecord.read(place), record):
            return place
    return None


def choice_of(run: Run) -> Choice | None:
    """Return the choice that the held-out answers of this very training led to, if there is one."""
    for folder in sorted((run.folder / ANSWERS).glob(f"{HELD_OUT}*")):
        choice = Choice.read(folder)
        if choice is None:
            continue
        record = AnswersRecord.read(folder)
        if record.is_of_adapter and record.trained_sha256 == model_sha256(run.trained):
            return choice
    return None


def texts_of(folder: Path) -> frozenset[str]:
    """Return the hashes of the texts that decoded answers are to."""
    path = folder / CASES_FILE
    rows = read_lines(path) if path.exists() else ()
    return frozenset(row["text_sha256"] for _, row in rows)


def open_answers(path: Path, gold: Path | None = None) -> OpenedAnswers:
    """Open a folder of answers, or those of a run folder that `find_answers` chooses.

    With `gold` the cases are read from it, else from the test file that was answered.
    """
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder")
    answers = find_answers(path, gold)
    if answers is None:
        raise UserError(f"{path}: has no answers; `panjue generate` makes them")
    record = answers.record
    test = gold or Path(record.test)
    if not gold and (not test.exists() or sha256(test) != record.test_sha256):
        raise UserError(
            f"{test}: missing, or not the file that {answers.folder}/completions.jsonl was "
            "made from"
        )
    reader = reader_of(answers, gold)
    label_file = answers.folder / "labels.json"
    # Without them `changes_since` says so: old answers can still be scored.
    labels = load_labels(label_file) if label_file.exists() else Labels()
    return OpenedAnswers(answers, record, reader, test, labels, changes_since(answers))


def reader_of(answers: Answers, gold: Path | None = None) -> Reader:
    """Return what reads the cases that were answered, as they were read then.

    `gold` is refused if a text in it differs from the one that was answered under the same id.
    """
    record = answers.record
    task = load_task(record.task, record.solve)
    reader = Reader(
        task,
        held_out=record.held_out,
        split_by=record.split_by,
        highest_hash=record.highest_hash,
        half=record.half,
        on_bad_row=record.on_bad_row,
    )
    path = answers.folder / CASES_FILE
    if gold is None or not path.exists() or sha256(gold) == record.test_sha256:
        return reader
    rows = Rows(path)
    for example in reader.read(gold):
        row = rows.get(example.id)
        if row and row["text_sha256"] not in text_hashes(example):
            raise UserError(
                f"{gold}: id {example.id} is another case than the one that was answered in "
                f"{answers.folder}; give the gold file of {record.test}"
            )
    return reader


def check_complete(answered: OpenedAnswers) -> None:
    """Refuse gold whose examples are not exactly those of the submission."""
    submission = answered.task.data.submission
    rows = submission.index(submission.find(answered.folder)).ids()
    examples = {submission.same(example.id) for example in answered.examples()}
    if rows != examples:
        raise UserError(
            f"{answered.test}: is not the gold file of {answered.folder}: "
            f"{len(examples - rows)} examples have no row there, "
            f"{len(rows - examples)} rows no example"
        )


def next_step(answered: OpenedAnswers) -> str:
    """Return the command that comes after answers: a score, or a check where gold is missing."""
    example = next(answered.examples())
    words = ["score", answered.test, answered.folder]
    if example.answer is None:
        words = ["check", answered.folder, "--cases", answered.test]
    return f"next: {shlex.join(['panjue', *map(str, words)])}"
