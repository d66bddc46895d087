"""The answers to one test file, opened together with their task, cases and label sets."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from panjue.finetune.classifier.opinions import Advisor
from panjue.finetune.trained import Trained, read_trained
from panjue.prompts.example import Example, call_key
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.model import is_demo
from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.files import difference, sha256
from panjue.prompts.plumbing.ours import followed
from panjue.prompts.plumbing.records import MANIFEST, REPLIES, AnswersRecord, Choice
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.run import (
    ANSWERS,
    CASES_FILE,
    find_answers,
    refuse_unanswered,
    weights_that_answered,
)
from panjue.prompts.reader import Reader, text_hashes
from panjue.prompts.task import Task, load_task
from panjue.serve.settings import RESOURCES

DEMO_ANSWERED = (
    "a demo model answered: its base was trained from nothing, and its answers to real cases mean "
    "nothing"
)


@dataclass(frozen=True)
class Answers:
    """A folder with the answers to one test file, and the training that answered."""

    folder: Path
    record: AnswersRecord
    trained: Trained | None
    """The training whose model or text classifier answered. None for an endpoint without a
    training, or if the training no longer exists."""
    labels: Labels  # the label sets with which the answers were decoded
    changed: str
    """How training and labels differ from those that answered; empty if they do not differ."""
    voters: Sequence["Answers"] = ()  # answers that voted for these, if they still exist

    @property
    def trainings(self) -> list[Trained | None]:
        """Return the training that answered, or the trainings that voted."""
        return [one.trained for one in self.voters or [self]]

    @property
    def is_of_demo(self) -> bool:
        """Say whether the model that answered has a base made from nothing by `panjue base`."""
        if self.record.endpoint:
            return False
        return any(is_demo(trained.folder) for trained in self.trainings if trained)

    @property
    def name(self) -> str:
        """Return the name of the folder, after the name of its run if it lies in one."""
        folder = self.folder.resolve()
        is_in_run = folder.parent.name == ANSWERS
        return f"{folder.parent.parent.name}/{folder.name}" if is_in_run else folder.name

    def refuse_changes(self) -> None:
        """Raise UserError if the training or the labels are not those that answered."""
        if self.changed:
            raise UserError(
                f"{self.folder}: {self.changed}; restore it, or generate again with another "
                "answers=NAME"
            )


def read_answers(folder: Path, trained: Trained | None = None) -> Answers:
    """Open a folder of answers and the training that answered.

    `trained` is a training that is already open; it is used if it is the one that answered.
    """
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder}: has no answers; `panjue generate` makes them")
    record = AnswersRecord.read(folder)
    weights = weights_that_answered(folder, record.trained)
    if weights is None:  # an endpoint without a training answered
        trained = None
    else:
        # Links are followed, since both may be paths of one folder.
        has_answered = trained is not None and followed(weights) == followed(trained.folder)
        if not has_answered:
            trained = read_trained(weights) if (weights / MANIFEST).is_file() else None
    voters = []
    for recorded in record.voted:
        voter = voter_folder(folder, recorded)
        if (voter / MANIFEST).is_file():
            voters.append(read_answers(voter))
    label_file = folder / "labels.json"
    return Answers(
        folder=folder,
        record=record,
        trained=trained,
        # If there are none, `changes_since` says so; old answers can still be scored.
        labels=load_labels(label_file) if label_file.exists() else Labels(),
        changed=changes_since(folder, record, trained),
        voters=voters,
    )


def voter_folder(folder: Path, voter: str) -> Path:
    """Return the folder of answers that voted for those in `folder`, from the path in their record.

    Versions before 0.5 recorded a path relative to the working folder.
    """
    place = Path(os.path.normpath(folder / voter))
    return place if place.exists() else Path(voter)


def changes_since(folder: Path, record: AnswersRecord, trained: Trained | None) -> str:
    """Return how the hashes in a record differ from the files of today; empty if they do not.

    What the record has no hash of is not compared.
    """
    changes = []
    now = trained.sha256 if trained else ""
    if record.trained and record.trained_sha256 not in (None, now):
        place = weights_that_answered(folder, record.trained)
        changes.append(f"{place} is missing, or is not the training that gave these answers")
    label_file = folder / "labels.json"
    if not label_file.exists():
        changes.append(f"{label_file} is missing")
    elif record.labels_sha256 not in (None, sha256(label_file)):
        changes.append(f"{label_file} was changed since the answers were made")
    format_of = load_task(record.task).data.submission
    for voter, digest in record.voted.items():
        submission = voter_folder(folder, voter) / format_of.name
        if not (submission.exists() and sha256(submission) == digest):
            changes.append(f"{submission}, which voted, is missing, or was changed since")
    return "; ".join(changes)


@dataclass(frozen=True)
class Answered:
    """A test file with its answers, and what is needed to read both. Commands hold it."""

    answers: Answers
    reader: Reader
    test: Path  # the file that was answered, or one of the same cases with gold answers
    test_sha256: str  # hash of `test`
    choice: Choice | None = None  # who answers each field; None if that is undecided

    @property
    def record(self) -> AnswersRecord:
        return self.answers.record

    @property
    def trained(self) -> Trained | None:
        return self.answers.trained

    @property
    def labels(self) -> Labels:
        return self.answers.labels

    @property
    def changed(self) -> str:
        """Return how training and labels differ from those that answered; empty if they do not."""
        return self.answers.changed

    @property
    def folder(self) -> Path:
        return self.answers.folder

    @property
    def name(self) -> str:
        return self.answers.name

    @property
    def task(self) -> Task:
        return self.reader.task

    @property
    def is_answered_file(self) -> bool:
        """Say whether `test` is exactly the file that was answered."""
        return self.test_sha256 == self.record.test_sha256

    def left_out(self) -> str:
        """Return a line that only the first cases of the file were answered; empty if all were."""
        limit = self.record.limit
        if limit is None:
            return ""
        examples = replace(self.reader, limit=limit + 1).read(self.test)
        if sum(1 for _ in examples) <= limit:
            return ""
        return f"only the first {limit} cases of {self.test} were answered (limit={limit})"

    @cached_property
    def advisor(self) -> Advisor | None:
        """Return the training's text classifier; None if it fitted none, or has changed since."""
        if self.trained is None or self.changed or not self.task.answer.fields:
            return None
        advisor = self.trained.advisor(self.task)
        return advisor and replace(advisor, labels=self.labels)

    def examples(self) -> Iterator[Example]:
        """Yield the examples of the test file; UserError: an example is not the answered case."""
        for example in self.reader.read(self.test):
            self.refuse_other_text(example)
            yield example

    def refuse_other_text(self, example: Example) -> None:
        """Refuse an example if the case answered under its id has another text."""
        row = self._text_hashes.get(example.id) if self._text_hashes else None
        if row and row["text_sha256"] not in text_hashes(example):
            raise UserError(
                f"{self.test}: id {example.id} is another case than the one that was answered in "
                f"{self.folder}; give the gold file of {self.record.test}"
            )

    @cached_property
    def _text_hashes(self) -> Rows | None:
        """Return the hashes of the answered texts; None if they are not needed, or not recorded."""
        path = self.folder / CASES_FILE
        return None if self.is_answered_file or not path.exists() else Rows(path)

    def rows(self) -> Rows:
        """Return the rows of `completions.jsonl` by the keys of their calls."""
        try:
            # A call on which the engine failed was asked again, so it has two rows.
            return Rows(self.folder / "completions.jsonl", key=call_key, last_counts=True)
        except Unreadable as error:
            raise Unreadable(f"{error}; run `panjue generate`") from None
        except UserError as error:
            raise UserError(
                f"{error}; `panjue generate` again drops it if it is the last line, cut by a "
                "kill; delete any other broken line by hand: generate asks that example again"
            ) from None

    def row(self, rows: Rows, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a call, as `row_if_any` does; UserError: there is none."""
        row = self.row_if_any(rows, call)
        if row is None:
            raise UserError(
                f"{rows.path}: no row for id {call['id']}; "
                "run `panjue generate` again, it continues where it stopped"
            )
        return row

    def row_if_any(self, rows: Rows, call: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row of a call, with its replies or `refused`; None if it was never asked.

        `call` identifies it: `{"id": 7}`, or `{"id": 7, "call": 2}` if the example has several
        calls. UserError: the row is damaged.
        """
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
    """Say whether a value is a list of one or more texts."""
    return isinstance(value, list) and value != [] and all(isinstance(one, str) for one in value)


def without_resources(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of a record without engine settings of memory and speed, which may differ."""
    settings = entries.get("engine", {})
    engine = {key: value for key, value in settings.items() if key not in RESOURCES}
    return {**entries, "engine": engine}


def choice_for(trained: Trained, record: AnswersRecord) -> Choice | None:
    """Return the choice of who answers each field of answers with this record; None without one.

    The training has made its choices from answers to held-out cases. The newest choice counts for
    which the model was asked with the same settings. If there is none, it is the newest choice with
    the same setting `constrained`.
    """
    # Answers to held-out cases make a choice. A choice is not about the base or an endpoint.
    if record.held_out or not record.is_of_adapter:
        return None
    newest_first = trained.choices[::-1]
    for choice in newest_first:
        if not asked_otherwise(choice, record):
            return choice
    for choice in newest_first:
        if choice.asked["constrained"] == record.constrained:
            return choice
    return None


def asked_otherwise(choice: Choice, record: AnswersRecord) -> str:
    """Return which settings differ between a choice's held-out cases and the cases of a record.

    For example `seed: 1 -> 0`: the held-out cases were asked with seed 1, the others with 0.
    """
    return difference(without_resources(choice.asked), without_resources(record.part(REPLIES)))


def open_answers(path: Path, gold: Path | None = None) -> Answered:
    """Open a folder of answers, or the one of a run folder that `find_answers` finds.

    The cases are read from `gold` if it is given, else from the test file that was answered.
    """
    digest = sha256_of_cases(gold) if gold else ""
    return with_cases(read_answers(folder_meant(path, gold, digest)), gold, digest)


def folder_meant(path: Path, gold: Path | None = None, gold_sha256: str = "") -> Path:
    """Return the folder of answers for a path that a user gave; UserError: there is none.

    The path is a run folder, a folder of answers or a submission. `gold` is the file with the gold
    answers; it says which answers of a run folder are meant.
    """
    found = find_answers(path, gold, gold_sha256) if path.exists() else None
    return found or refuse_unanswered(path)


def sha256_of_cases(path: Path) -> str:
    """Return the hash of a file or folder of cases; empty if it is neither."""
    return sha256(path) if path.is_file() or path.is_dir() else ""  # a pipe cannot be read twice


def with_cases(answers: Answers, gold: Path | None = None, gold_sha256: str = "") -> Answered:
    """Return answers with their test file, or with the file `gold`, whose hash is given."""
    record = answers.record
    test = gold or Path(record.test)
    if not gold and not (test.exists() and sha256(test) == record.test_sha256):
        raise UserError(
            f"{test}: missing, or not the file that {answers.folder}/completions.jsonl was "
            "made from"
        )
    reader = Reader(
        load_task(record.task, record.solve),
        held_out=record.held_out,
        split_by=record.split_by,
        highest_hash=record.highest_hash,
        half=record.half,
        columns=record.columns,
        limit=record.limit,
        on_bad_row=record.on_bad_row,
    )
    trained = answers.trained
    return Answered(
        answers=answers,
        reader=reader,
        test=test,
        test_sha256=gold_sha256 if gold else record.test_sha256,
        # A choice is about the training as it was.
        choice=choice_for(trained, record) if trained and not answers.changed else None,
    )


def check_complete(answered: Answered) -> None:
    """Refuse a file of cases, `answered.test`, if its ids are not those of the submission."""
    submission = answered.task.data.submission
    rows = submission.index(submission.find(answered.folder)).ids()
    # Ids that the contest takes as the same, such as 7 and "7", are the same here.
    examples = {submission.same(example.id) for example in answered.examples()}
    if rows != examples:
        raise UserError(
            f"{answered.test}: is not the gold file of {answered.folder}: "
            f"{len(examples - rows)} examples have no row there, "
            f"{len(rows - examples)} rows no example"
        )
