"""Completions -> submission. Decoding needs no model and can be run again."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from panjue.finetune.classifier.classifier import CLASSIFIER_NAME
from panjue.finetune.classifier.opinions import EMPTY_REPLY, Advisor, read_answer
from panjue.prompts.example import Answer, Decoded, Example, first_reply, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.endpoint import CONTENT_FILTER
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    atomic_write,
    dump,
    exclusive_lock,
    read_object,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.progress import counted
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.run import AnswersRecord
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task
from panjue.serve.answers import CASES, AnsweredFile, open_answers

MAX_SHOWN_REFUSALS = 5
"""Refused examples that are printed; decode.json has all."""

TOO_LONG = re.compile(r"token|context|length|too long")
"""What refusals for the length of a case have in common, our own and those of servers."""

FINISH = {"content_filter": "a content filter", "error": "an error of the engine"}
"""Why a reply ended -> the same in words."""


def never_asked(refusals: Sequence[str]) -> str:
    """Return a line on the examples that the model was never asked: ids, reasons, way out."""
    shown = "; id ".join(refusals[:MAX_SHOWN_REFUSALS])
    more = len(refusals) - MAX_SHOWN_REFUSALS
    rest = f"; {more} more in decode.json" if more > 0 else ""
    line = f"never asked: {len(refusals)}, their answers are not the model's: id {shown}{rest}"
    if any(map(TOO_LONG.search, refusals)):
        line += "; a model with a longer context can be asked"
    if filtered := sum(bool(CONTENT_FILTER.search(refusal)) for refusal in refusals):
        line += f"; {filtered} refused for their content: another model can be asked"
    return line


def decoding_of(submission: Path) -> dict[str, Any] | None:
    """Return the run's decode.json if it describes exactly this submission (by SHA-256)."""
    path = submission.parent / "decode.json"
    report = read_object(path) if path.exists() else {}
    return report if report.get("submission_sha256") == sha256(submission) else None


@dataclass(kw_only=True)
class Tally:
    """Counts of what happened in decoding, over all examples of a run."""

    examples: int = 0
    calls: int = 0
    valid: int = 0
    repaired: int = 0
    unreadable: int = 0
    cut: int = 0
    finish: Counter[str] = field(default_factory=Counter)
    """Why replies ended, but for their end and the limit on their length."""
    refused: int = 0
    shortened: int = 0
    skipped_rows: int = 0
    left_out: int = 0
    """Items that readable replies leave out."""
    missing_fields: int = 0
    """Single fields that readable replies leave out."""
    replaced: bool = False
    """There was a submission, and it was another one."""
    answered_by: str  # the line of `who_answered`
    fallback: str  # what answers where no reply does
    submission: Path
    repairs: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)

    def add(
        self, example: Example, row: Mapping[str, Any], decoded: Decoded, item_fields: int
    ) -> None:
        """Count the first reply to an example; each item of its answer has so many fields."""
        self.calls += 1
        if row.get("refused") is not None:
            self.refused += 1
            self.refusals.append(f"{example.id}: {row['refused']}")
            return
        reason = row["finish"][0]
        self.cut += reason == "length"
        if reason not in ("stop", "length"):
            self.finish[reason] += 1
        self.shortened += row["dropped_sentences"] > 0
        for text in decoded.repairs:
            name, _, repair = text.partition(": ")
            self.repairs[repair if name in example.names else text] += 1
        if not decoded.readable:
            self.unreadable += 1
            return
        self.repaired += bool(decoded.repairs)
        self.valid += not decoded.repairs
        for guessed in Counter(item for item, _ in decoded.guesses).values():
            if guessed == item_fields:
                self.left_out += 1
            else:
                self.missing_fields += guessed

    def lines(self) -> Iterator[str]:
        """Yield what a person reads after decoding."""
        if self.calls:
            yield from self._lines_on_replies()
        else:
            yield f"{self.examples} examples"
        if self.skipped_rows:
            yield f"{self.skipped_rows} bad rows were skipped, see skipped-test.jsonl"
        if self.refusals:
            yield never_asked(self.refusals)
        yield from (f"  {count:5d} × {kind}" for kind, count in self.repairs.most_common(8))
        if self.replaced:
            yield f"{self.submission}: replaced, it had other answers"
        yield self.answered_by

    def _lines_on_replies(self) -> Iterator[str]:
        calls = f" in {self.calls:,} calls" if self.calls != self.examples else ""
        yield (
            f"{self.examples} examples{calls}: {self.valid} first replies valid as they came, "
            f"{self.repaired} repaired, {self.unreadable} unreadable"
        )
        yield (
            f"{self.cut} cut by length, {self.refused} could not be asked, "
            f"{self.shortened} shortened to fit"
        )
        if self.finish:
            kinds = (f"{FINISH.get(why, why)}: {count}" for why, count in self.finish.most_common())
            yield f"ended by {'; by '.join(kinds)}"
        if self.left_out or self.missing_fields:
            yield f"left out by replies: {self.left_out} persons, {self.missing_fields} fields"
        if self.unreadable or self.refused or self.left_out or self.missing_fields:
            yield f"what no reply has is answered by: {self.fallback}"

    def to_json(self) -> dict[str, Any]:
        numbers = {**vars(self), "submission": self.submission.name}
        numbers["repairs"] = dict(self.repairs.most_common())
        numbers["finish"] = dict(self.finish.most_common())
        del numbers["replaced"]
        return numbers


def decode_answers(path: Path) -> Tally:
    """Write the submission and `decode.json` of a folder of answers from its `completions.jsonl`.

    Every example of the test file is answered once, in order, by its reply. What the reply does not
    have is answered by the text classifier if the training fitted one, else by the task's fallback;
    both are counted. With a classifier, `confidence.jsonl` has the confidence in each answer. If
    the record says so, the classifier answers everything, and there need not be any replies. Ranked
    lists are voted on and filled up (`ranked`).
    """
    answered = open_answers(path)
    task = answered.task
    submission = answered.folder / task.data.submission.name
    confidences = answered.folder / "confidence.jsonl"
    with exclusive_lock(answered.folder):
        advisor = answered.advisor()
        tally = Tally(
            answered_by=who_answered(answered.record),
            fallback=CLASSIFIER_NAME if advisor else task.score.fallback,
            submission=submission,
        )
        before = sha256(submission) if submission.exists() else None
        _write(_Decoder(answered, _replies(answered, advisor), advisor, tally), confidences)
        if tally.calls and not (tally.valid or tally.repaired):
            tally.answered_by = f"answered by: {tally.fallback}, since no reply could be read"
        if advisor is None:
            confidences.unlink()
        after = sha256(submission)
        tally.replaced = before not in (None, after)
        tally.skipped_rows = len(answered.reader.skipped.rows)
        digests = {
            "submission_sha256": after,
            "confidence_sha256": sha256(confidences) if advisor else None,
        }
        write_json(answered.folder / "decode.json", tally.to_json() | digests)
    return tally


def who_answered(record: AnswersRecord) -> str:
    who = CLASSIFIER_NAME if record.answered_by == "classifier" else "model"
    reason = f": {record.because}" if record.because else ""
    return f"answered by the {who}{reason}"


def _replies(answered: AnsweredFile, advisor: Advisor | None) -> Rows | None:
    """Return the rows of replies; None if the classifier answers."""
    if answered.record.answered_by != "classifier":
        return answered.rows()
    if advisor is None:
        raise UserError(
            f"{answered.folder}: the text classifier answered, but {answered.record.trained} has "
            "none: restore it"
        )
    return None


@dataclass(frozen=True)
class _Decoder:
    """Makes answers of the replies to a test file; `tally` counts what happened."""

    answered: AnsweredFile
    rows: Rows | None  # the replies; None if the classifier answers
    advisor: Advisor | None
    tally: Tally

    def answer(self, example: Example) -> tuple[Answer, Sequence[Mapping[str, float]]]:
        """Return the answer to an example, and its confidence if there is a classifier."""
        task = self.answered.task
        labels = self.answered.labels
        if task.solve:
            return run_steps(task.solving(example), partial(self._call, example)), []
        row = self._row({"id": example.id})
        read = read_answer(task, labels, self.advisor, example, row)
        if self.rows is not None:
            self.tally.add(example, row, read.decoded, len(task.answer.fields))
        if task.ranking:
            return ranked(task, example, row.get("texts", ()), labels), []
        return read.answer, read.confidence

    def _call(self, example: Example, call: int, question: Example) -> Decoded:
        row = self._row({"id": example.id, "call": call})
        if row.get("question") != str(question.id):
            raise UserError(
                f"{self.answered.folder}: call {call} of id {example.id} asked "
                f"{row.get('question')!r}, but now asks {question.id!r}; generate again "
                "into another answers=NAME"
            )
        task = self.answered.task
        decoded = task.ask.decode(first_reply(row), question, self.answered.labels)
        self.tally.add(question, row, decoded, len(task.answer.fields))
        return decoded

    def _row(self, call: dict[str, Any]) -> Mapping[str, Any]:
        return EMPTY_REPLY if self.rows is None else self.answered.row(self.rows, call)


def _write(decoder: _Decoder, confidences: Path) -> None:
    """Write the submission, the hashes of the cases' texts, and the confidences."""
    answered = decoder.answered
    tally = decoder.tally
    task = answered.task
    rows = decoder.rows
    total = sum(1 for _ in answered.examples()) if rows is None else len(rows)
    with (  # the submission is the first that is replaced
        atomic_write(confidences) as confidence_lines,
        atomic_write(answered.folder / CASES) as cases,
        task.data.submission.writing(tally.submission) as write,
    ):
        for example in counted(answered.examples(), total):
            cases.write(dump({"id": example.id, "text_sha256": text_hash(example)}) + "\n")
            answer, confidence = decoder.answer(example)
            write(task.data.write(example, answer))
            if confidence:
                row = {"id": example.id, "confidence": confidence}
                confidence_lines.write(dump(row) + "\n")
            tally.examples += 1


def ranked(task: Task, example: Example, replies: Sequence[str], labels: Labels) -> Answer:
    """Return the answer with its list ranked by the votes of all replies.

    The k-th value of a reply's list gets 1/k of a vote (reciprocal rank fusion without its
    constant); of equal values, the one that came first stays first, and the greedy reply comes
    first. A list that is too short is filled up with the commonest labels. Without a readable reply
    the answer is the task's fallback.
    """
    assert task.ranking, "the answers of other tasks are no ranked lists"
    key = task.ranking.key
    length = task.ranking.length
    decoded = [task.ask.decode(reply, example, labels) for reply in (*replies, "")]
    votes: dict[str, float] = defaultdict(float)
    for reply in decoded:
        if reply.readable:
            for rank, value in enumerate(reply.answer[key], start=1):
                votes[value] += 1 / rank
    voted = sorted(votes, key=lambda value: -votes[value])
    commonest = islice(labels.counts.get(key, ()), length)
    values = list(dict.fromkeys([*voted, *commonest]))
    return {**decoded[0].answer, key: values[:length]}
