"""Decode completions to a submission. This needs no model and can be repeated.

A choice says for each field whether the model or the text classifier answers, by their scores on
held-out cases. Just before a decoding replaces the files of the last one, it adds `unfinished` and
its own `answer` to their `decode.json`. If it is stopped, the rest of that file still describes the
earlier submission.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from panjue.finetune.classifier.classifier import CLASSIFIER_NAME
from panjue.finetune.classifier.opinions import EMPTY_REPLY, Advisor, Opinion, read_answer
from panjue.prompts.example import Answer, Decoded, Example, first_reply, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    atomic_write,
    delete,
    dump,
    read_object,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.progress import counted
from panjue.prompts.plumbing.records import DECODING, SCORES, AnsweredBy, Choice
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.run import CASES_FILE
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.reader import text_hash, text_hashes
from panjue.prompts.task import Task, no_labels
from panjue.serve.answers import Answered, asked_otherwise
from panjue.serve.settings import AnswerSetting
from panjue.serve.tally import Tally

DERIVED = (SCORES, "report.html")
"""Files beside a submission that `score` and `report` make from it."""

BATCH = 256
"""Number of examples that the text classifier looks at together; they take a few megabytes."""

LOOKING = 2
"""Threads for this. Half of the time is spent in libraries, where threads run in parallel."""

WithOpinions = tuple[Example, Mapping[str, Any], Sequence[Opinion] | None]
"""An example, its row, and the text classifier's opinions; None without a classifier."""

FIRST_LABEL = "first label of the task's list"
"""Name of the fallback if no training has counted labels."""

UNFINISHED = "unfinished"
"""Key in `decode.json` from the moment before the submission is replaced until all is written."""


def decoding_of(submission: Path) -> dict[str, Any] | None:
    """Return the run's decode.json if it describes exactly this submission (by SHA-256).

    UserError: decoding was stopped between writing the two.
    """
    report = earlier_decoding(submission.parent)
    if UNFINISHED in report:
        raise UserError(
            f"{submission}: its decoding was stopped before the end; run `panjue decode "
            f"{submission.parent}`, or wait if one runs"
        )
    return report if report.get("submission_sha256") == sha256(submission) else None


def decode(answered: Answered, answer: AnswerSetting | None = None) -> Tally:
    """Write the submission and `decode.json` of answers from their `completions.jsonl`.

    Every example of the test file is answered once, in order. `answer` says who answers, see
    `who_answers`; by default it is as in the last decoding of the folder. If a reply lacks a field,
    the text classifier answers it, or the task's fallback if the training fitted no classifier;
    both are counted. With a classifier, `confidence.jsonl` has the confidence in each answer. For
    ranked lists see `ranked`.

    A folder has one submission. Files made from an earlier submission are deleted. The caller holds
    the lock of the folder.
    """
    folder = answered.folder
    if answered.record.voted:
        raise UserError(f"{folder}: is a vote, which has no replies; `panjue vote` makes it")
    answered.answers.refuse_changes()
    confidences = folder / "confidence.jsonl"
    earlier = earlier_decoding(folder)
    answer = answer or earlier.get("answer", "auto")
    by_field = who_answers(answered, answer, earlier)
    tally = _empty_tally(answered, answer, by_field)
    earlier_sha256 = finished_before(tally.submission, earlier)
    decoder = _decoder_of(answered, tally)
    # This is in `decode.json` until all is written. If the writing is stopped, the next decoding
    # finds there `answer` and the hash of the last finished submission.
    decoder.write(confidences, {**earlier, "answer": answer, UNFINISHED: True})
    if tally.calls and not (tally.valid or tally.repaired):
        tally.answered_by = f"answered by: {tally.fallback}, since no reply could be read"
    if decoder.advisor is None:
        delete(confidences)
    submission_sha256 = sha256(tally.submission)
    is_another = earlier_sha256 not in (None, submission_sha256)
    # Even if the answers are equal, scores and report name who gave them.
    is_by_others = earlier.get("by_field") not in (None, by_field)
    if is_another or is_by_others:
        tally.replaced = delete_derived(folder, earlier)
    tally.skipped_rows = len(answered.reader.skipped.rows)
    made = {
        "panjue": panjue_version(),
        "answer": answer,
        "submission_sha256": submission_sha256,
        "confidence_sha256": sha256(confidences) if decoder.advisor else None,
    }
    write_json(folder / DECODING, tally.to_json() | made)
    return tally


def earlier_decoding(folder: Path) -> dict[str, Any]:
    """Return the `decode.json` of the last decoding of a folder; empty before the first."""
    path = folder / DECODING
    return read_object(path) if path.exists() else {}


def finished_before(submission: Path, earlier: Mapping[str, Any]) -> str | None:
    """Return the hash of the submission of the last finished decoding; None if none has finished.

    Scores and a report beside it were made from that submission. `earlier` is the `decode.json`.
    """
    if UNFINISHED in earlier:  # the submission may be of the stopped decoding; the hash is older
        return earlier.get("submission_sha256")
    return sha256(submission) if submission.exists() else None


def edited(submission: Path) -> str:
    """Return a line if a submission was changed since it was decoded; else an empty text.

    Nobody knows who answered a changed submission.
    """
    if not (submission.parent / DECODING).exists():
        return ""
    is_as_decoded = decoding_of(submission) is not None
    if is_as_decoded:
        return ""
    again = f"`panjue decode {submission.parent}` makes it again"
    return f"{submission}: was changed since it was decoded, so nobody knows who answers; {again}"


def delete_derived(folder: Path, earlier: Mapping[str, Any]) -> str:
    """Delete files made from an earlier submission; return a line on it and these files.

    For example `was answered by the model; deleted scores.json, made from it`.
    """
    was = earlier.get("answered_by") or "other answers"  # a line such as `answered by the model`
    gone = [name for name in DERIVED if (folder / name).exists()]
    for name in gone:
        delete(folder / name)
    return f"was {was}" + (f"; deleted {', '.join(gone)}, made from it" if gone else "")


def who_answers(
    answered: Answered, answer: AnswerSetting, earlier: Mapping[str, Any]
) -> dict[str, AnsweredBy]:
    """Return field -> who answers it, as the setting `answer` says.

    `auto`: The choice decides. Without one, the classifier answers everything if the model was
    never asked; otherwise the last decoding decides, if it was by `auto` too (`earlier` is its
    `decode.json`). The model answers everything if the training fitted no classifier, or if the
    answers are of an endpoint or of the base alone.

    UserError: none of these decides; or the classifier is to answer, but was not fitted; or the
    model is to answer, but was never asked.
    """
    fields = answered.task.answer.fields
    record = answered.record
    by_field: dict[str, AnsweredBy] = dict.fromkeys(fields, "model")
    if answer == "classifier":
        if answered.advisor is None:
            raise UserError(f"answer=classifier: the training of {answered.folder} fitted none")
        by_field = dict.fromkeys(fields, "classifier")
    elif answer == "auto" and answered.advisor and record.is_of_adapter:
        if answered.choice:
            by_field = answered.choice.answered_by
        elif not record.asked:
            by_field = dict.fromkeys(fields, "classifier")
        elif earlier and earlier.get("answer", "auto") == "auto":  # version 0.4 wrote no `answer`
            by_field = earlier.get("by_field", by_field)  # in version 0.4, the model alone answered
        else:
            raise UserError(
                f"{answered.folder}: nobody has decided who answers, the model or the text "
                "classifier; say answer=model or answer=classifier"
            )
    if not record.asked and (not fields or "model" in by_field.values()):
        raise UserError(
            f"{answered.folder}: the model was never asked, which needs the engine: "
            f"`panjue generate RUN {record.test} answer={answer}`"
        )
    return by_field


def _empty_tally(
    answered: Answered, answer: AnswerSetting, by_field: Mapping[str, AnsweredBy]
) -> Tally:
    """Return a tally that says who answers, and has counted nothing yet."""
    choice = answered.choice
    # With answer=model or answer=classifier, a choice may exist, but does not decide who answers.
    # It still calibrates the confidences.
    deciding = choice if answer == "auto" else None
    by_whom = who_answered(deciding) if deciding else who_answered_without_choice(by_field, answer)
    has_model = "model" in by_field.values()
    return Tally(
        by_field=by_field,
        answered_by=by_whom,
        asked_otherwise=asked_otherwise(deciding, answered.record) if deciding else "",
        lacks_choice=bool(answered.advisor) and choice is None and has_model,
        fallback=fallback_name(answered),
        submission=answered.folder / answered.task.data.submission.name,
    )


def _decoder_of(answered: Answered, tally: Tally) -> "_Decoder":
    """Return the decoder of the answers. `tally.by_field` says who answers each label field.

    The model answers a task without label fields, whose `by_field` is empty. A choice also gives
    the calibration of confidences. It is not used for the texts that it was fitted on.
    """
    choice = answered.choice
    advisor = answered.advisor
    if advisor:
        of_classifier = [name for name, who in tally.by_field.items() if who == "classifier"]
        advisor = replace(advisor, answers=of_classifier)
        # Asked in another way, the model may be right more or less often.
        if choice and not asked_otherwise(choice, answered.record):
            advisor = replace(advisor, calibration=choice.calibration)
    reads_replies = not tally.by_field or "model" in tally.by_field.values()
    return _Decoder(
        answered=answered,
        rows=answered.rows() if reads_replies else None,
        advisor=advisor,
        calibrated_on=frozenset(choice.texts if choice else ()),
        tally=tally,
    )


def fallback_name(answered: Answered) -> str:
    """Return who answers what replies lack, in words such as "commonest labels"."""
    if answered.advisor:
        return CLASSIFIER_NAME
    task = answered.task
    has_labels = task.ask.labels is not no_labels
    if has_labels and not answered.labels.were_counted:  # no training: none is the commonest
        return FIRST_LABEL
    return task.score.fallback


def who_answered(choice: Choice) -> str:
    """Return one line on who answers each field, with the scores on held-out cases.

    For example `charges: model (.71, classifier .69); penalty: classifier (.31, model .24)`.
    """
    parts = []
    for name, best in choice.best.items():
        score = short(choice.score(name, best.candidate))
        [other] = choice.candidates.keys() - {best.candidate}
        score_of_other = short(choice.score(name, other))
        parts.append(f"{name}: {best.candidate} ({score}, {other} {score_of_other})")
    return "; ".join(parts)


def who_answered_without_choice(by_field: Mapping[str, AnsweredBy], answer: AnswerSetting) -> str:
    """Return one line on who answers each field, if no choice has decided it.

    For example `answered by the model, as answer=model says`. If an earlier decoding has decided:
    `charges: model; penalty: classifier, as decoded before`.
    """
    if len(set(by_field.values())) > 1:  # only an earlier decoding can say this
        fields = "; ".join(f"{name}: {who}" for name, who in by_field.items())
        return f"{fields}, as decoded before"
    who = CLASSIFIER_NAME if "classifier" in by_field.values() else "model"
    return f"answered by the {who}" + (f", as answer={answer} says" if answer != "auto" else "")


def short(score: float) -> str:
    """Return a score with two decimals, without the zero before the point."""
    return f"{score:.2f}".removeprefix("0")


@dataclass(frozen=True)
class _Decoder:
    """Makes answers from the replies to a test file. `tally` counts what happens."""

    answered: Answered
    rows: Rows | None  # the replies; None if the classifier answers everything
    advisor: Advisor | None
    calibrated_on: frozenset[str]
    """Hashes of the texts on which the choice calibrated confidences. There, calibrated confidences
    would look better than they are, so they stay uncalibrated."""
    tally: Tally

    def write(self, confidences: Path, unfinished: Mapping[str, Any]) -> None:
        """Write the submission, the hashes of the cases' texts, and the confidences.

        `unfinished` is written to `decode.json` before the first of these files is replaced.
        """
        task = self.answered.task
        folder = self.answered.folder
        # Only for the progress. If the classifier answers everything, there are no rows to count.
        total = (self.answered.record.cases or 0) if self.rows is None else len(self.rows)
        with (  # the blocks end in reverse order, so the submission is replaced first
            atomic_write(confidences) as confidence_lines,
            atomic_write(folder / CASES_FILE) as cases,
            task.data.submission.writing(self.tally.submission) as write,
        ):
            examples = counted(self.answered.examples(), total)
            for example, answer, confidence in self.answers(examples):
                cases.write(dump({"id": example.id, "text_sha256": text_hash(example)}) + "\n")
                write(task.data.write(example, answer))
                if confidence:
                    of_example = {"id": example.id, "confidence": confidence}
                    confidence_lines.write(dump(of_example) + "\n")
                # Items whose charge no training case has with any of their articles.
                self.tally.unpaired += unpaired(task, answer, self.answered.labels)
                self.tally.examples += 1
                self.tally.has_gold |= example.answer is not None
            write_json(folder / DECODING, unfinished)

    def answers(
        self, examples: Iterable[Example]
    ) -> Iterator[tuple[Example, Answer, Sequence[Mapping[str, float]]]]:
        """Yield each example with its answer and, with a classifier, its confidences."""
        task = self.answered.task
        if task.solve:
            for example in examples:
                yield example, run_steps(task.solving(example), partial(self._call, example)), []
            return
        for example, row, opinions in self._opinions(examples):
            answer, confidence = self._answer(example, row, opinions)
            yield example, answer, confidence

    def _opinions(self, examples: Iterable[Example]) -> Iterator[WithOpinions]:
        """Yield each example with its row and the text classifier's opinions.

        Threads look at the next examples while the caller answers these.
        """
        looking: deque[Future[list[WithOpinions]]] = deque()
        with ThreadPoolExecutor(LOOKING) as threads:
            for batch in batches(examples):
                rows = [self._row({"id": example.id}) for example in batch]
                looking.append(threads.submit(self._with_opinions, batch, rows))
                if len(looking) > LOOKING:
                    yield from looking.popleft().result()
            while looking:
                yield from looking.popleft().result()

    def _with_opinions(
        self, examples: Sequence[Example], rows: Sequence[Mapping[str, Any]]
    ) -> list[WithOpinions]:
        """Return each example with its row and the opinions on it, computed for all at once."""
        opinions = self.advisor.opinions_of(examples, rows) if self.advisor else [None] * len(rows)
        return list(zip(examples, rows, opinions, strict=True))

    def _answer(
        self, example: Example, row: Mapping[str, Any], opinions: Sequence[Opinion] | None
    ) -> tuple[Answer, Sequence[Mapping[str, float]]]:
        """Return the answer to an example, and for each item: field -> confidence."""
        task = self.answered.task
        labels = self.answered.labels
        advisor = self.advisor
        if advisor and not self.calibrated_on.isdisjoint(text_hashes(example)):
            advisor = replace(advisor, calibration={})
        read = read_answer(task, labels, advisor, example, row, opinions)
        if self.rows is not None:  # else the classifier answers, so there is no reply to count
            self.tally.add(example, row, read.decoded, len(task.answer.fields))
        if task.ranking:
            return ranked(task, example, row.get("texts", ()), labels), []
        return read.answer, read.confidence

    def _call(self, example: Example, call: int, question: Example) -> Decoded:
        """Return the decoded reply to one of the calls that an example's steps take."""
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
        """Return the row of a call. If the classifier answers everything, no call has one."""
        return EMPTY_REPLY if self.rows is None else self.answered.row(self.rows, call)


def batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Yield the examples in lists of `BATCH` examples; the last list may be shorter."""
    rest = iter(examples)
    while batch := list(islice(rest, BATCH)):
        yield batch


def unpaired(task: Task, answer: Answer, labels: Labels) -> int:
    """Return how many items have a charge that no training case pairs with any of their articles.

    Charges and articles stand for the first two label sets of any task.
    """
    if len(task.answer.sets) < 2 or not labels.pairs:
        return 0
    charges, articles, *_ = task.answer.sets
    count = 0
    for item in task.answer.items_of(answer):
        partners = [labels.pairs.get(charge, {}) for charge in item[charges]]
        count += any(seen.keys().isdisjoint(item[articles]) for seen in partners)
    return count


def ranked(task: Task, example: Example, replies: Sequence[str], labels: Labels) -> Answer:
    """Return the answer with its list ranked by the votes of all replies.

    The k-th value of a reply's list gets 1/k of a vote (reciprocal rank fusion without its
    constant). Values with equal votes stay in the order in which they came; the greedy reply comes
    first. A list that is too short is filled up with the commonest labels; without any readable
    reply, it has these alone.
    """
    assert task.ranking, "the answers of other tasks are no ranked lists"
    key = task.ranking.key
    length = task.ranking.length
    # A refused call has no reply: then the empty one gives the answer's other fields. It has no
    # vote, since it is unreadable.
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
