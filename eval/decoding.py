"""Completions -> submission. Decoding needs no model and can be run again."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from panjue.eval.answers import AnsweredFile, open_answers
from panjue.eval.classifier import CLASSIFIER_NAME
from panjue.eval.decide import Decider, decider_of
from panjue.eval.rule import Rule, decision_sha256, other_lengths, rule_for
from panjue.prompts.example import Answer, Decoded, Example, first_reply, run_steps
from panjue.prompts.labels import Labels
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
from panjue.prompts.task import Task

MAX_SHOWN_REFUSALS = 5
"""Refused examples that are printed; decode.json has all."""


def never_asked(refusals: Sequence[str]) -> str:
    """Return a line on the examples that the model was never asked: ids, reasons, way out."""
    shown, more = refusals[:MAX_SHOWN_REFUSALS], len(refusals) - MAX_SHOWN_REFUSALS
    rest = f"; {more} more in decode.json" if more > 0 else ""
    return (
        f"never asked: {len(refusals)}, their answers are not the model's: "
        f"id {'; id '.join(shown)}{rest}; a model with a longer context can be asked"
    )


def decoding_of(submission: Path) -> dict[str, Any] | None:
    """Return the run's decode.json if it describes exactly this submission (by SHA-256)."""
    path = submission.parent / "decode.json"
    report = read_object(path) if path.exists() else {}
    return report if report.get("submission_sha256") == sha256(submission) else None


@dataclass
class Tally:
    """Counts of what happened in decoding, over all examples of a run."""

    examples: int = 0
    calls: int = 0
    valid: int = 0
    repaired: int = 0
    unreadable: int = 0
    cut: int = 0
    refused: int = 0
    shortened: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    near_ties: int = 0
    skipped_rows: int = 0
    replies: int = 0
    decided: int = 0
    filled: int = 0
    rule: Rule | None = None
    warning: str = ""
    decision_sha256: str | None = None
    fallback: str = "commonest labels"
    submission: Path = Path("submission.jsonl")
    repairs: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the summary that is printed."""
        calls = f" in {self.calls:,} calls" if self.calls != self.examples else ""
        yield (
            f"{self.examples} examples{calls}: {self.valid} first replies valid as they came, "
            f"{self.repaired} repaired, "
            f"{self.unreadable} unreadable (their answer: {self.fallback})"
        )
        instead = f" (their answer: {self.fallback})" if self.refused else ""
        yield (
            f"{self.cut} cut by length, {self.refused} could not be asked{instead}, "
            f"{self.shortened} shortened to fit"
        )
        if self.skipped_rows:
            yield f"{self.skipped_rows} bad rows were skipped, see skipped-test.jsonl"
        if self.refusals:
            yield never_asked(self.refusals)
        share = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0
        yield (
            f"{self.prompt_tokens:,} prompt tokens ({share:.0%} from the cache), "
            f"{self.completion_tokens:,} output tokens"
        )
        if self.decided:
            sources = f", by {self.rule}" if self.rule else ""
            yield f"{self.decided} answers decided from {self.replies} replies{sources}"
        if self.warning:
            yield self.warning
        if self.near_ties:
            yield f"{self.near_ties} greedy replies pass a near tie: another run may differ there"
        if self.filled:
            yield f"{self.filled} places of ranked answers filled up with the {self.fallback}"
        yield from (f"  {count:5d} × {kind}" for kind, count in self.repairs.most_common(8))


def decode_answers(path: Path, *, greedy: bool = False) -> Tally:
    """Write the submission and `decode.json` of a folder of answers from its `completions.jsonl`.

    Every example of the test file is answered once, in order. If it was refused or its reply is
    unreadable, the answer is the task's fallback, which is counted. If a row has several replies,
    or a rule was fitted (`eval.rule`), the answer is decided, and its confidence goes to
    `confidence.jsonl`. With `greedy` only the first reply counts. Ranked lists are voted on and
    filled up (`ranked`).
    """
    answered = open_answers(path)
    with exclusive_lock(answered.folder):
        return _decode(answered, greedy=greedy)


def _decode(answered: AnsweredFile, *, greedy: bool) -> Tally:
    folder = answered.folder
    task, submission = answered.task, folder / answered.task.data.submission.name
    tally = Tally(fallback=task.score.fallback, submission=submission)
    fitted = answered.trained if answered.record.is_of_adapter else None
    decider = decider_of(task, answered.labels, fitted)
    if decider and fitted and not greedy:
        decider = decider.with_rule(rule_for(answered, fitted))
    if decider and decider.classifier:
        tally.fallback = CLASSIFIER_NAME
    lengths = array("l")
    with (
        task.data.submission.writing(submission) as write,
        atomic_write(folder / "confidence.jsonl") as confidences,
    ):
        rows = answered.rows()
        replies = _Replies(answered, rows, decider, tally, most=1 if greedy else None)
        for example in counted(answered.examples(), len(rows)):
            lengths.append(len(example.text))
            answer, confidence = replies.answer(example)
            write(task.data.write(example, answer))
            if confidence is not None:
                confidences.write(dump({"id": example.id, "confidence": confidence}) + "\n")
            tally.examples += 1
    if decider and fitted and not greedy:
        tally.warning = other_lengths(lengths, fitted)
    if decider and tally.decided and not greedy:
        tally.rule, tally.decision_sha256 = decider.rule, decision_sha256(fitted)
    else:
        (folder / "confidence.jsonl").unlink()
    tally.skipped_rows = len(answered.reader.skipped.rows)
    report = {
        **vars(tally),
        "rule": asdict(tally.rule) if tally.rule else None,
        "repairs": dict(tally.repairs.most_common()),
        "submission": submission.name,
    }
    report["submission_sha256"] = sha256(submission)
    write_json(folder / "decode.json", report)
    return tally


@dataclass(frozen=True)
class _Replies:
    """The replies to a test file, and what makes answers of them; `tally` counts what happened.

    Attributes:
        most: So many replies to an example count; None means all.
    """

    answered: AnsweredFile
    rows: Rows
    decider: Decider | None
    tally: Tally
    most: int | None

    def answer(self, example: Example) -> tuple[Answer, list[dict[str, float]] | None]:
        """Return the answer to an example, and its confidence if it was decided."""
        task, decider, tally = self.answered.task, self.decider, self.tally
        if task.answer.several_calls:
            return run_steps(task.answer.solving(example), partial(self._call, example)), None
        row = self.answered.row(self.rows, {"id": example.id})
        decoded = self._decoded(example, row)
        replies = row.get("texts", ())[: self.most]
        if task.answer.ranked:
            answer, filled = ranked(task, example, replies, self.answered.labels)
            tally.decided += len(replies) > 1
            tally.replies += len(replies) if len(replies) > 1 else 0
            tally.filled += filled
            return answer, None
        if decider is None:
            return decoded.answer, None
        if decider.rule.uses_classifier or len(replies) > 1:
            tally.decided += 1
            tally.replies += len(replies)
            decision = decider.decide(example, row)
            return decision.answer, decision.confidence
        if decider.classifier and not decoded.readable:
            return decider.decide(example, {"refused": ""}).answer, None
        return decoded.answer, None

    def _call(self, example: Example, call: int, question: Example) -> Decoded:
        """Return the stored reply to one of an example's calls."""
        row = self.answered.row(self.rows, {"id": example.id, "call": call})
        if row["question"] != str(question.id):
            raise UserError(
                f"{self.rows.path}: call {call} of id {example.id} asked {row['question']!r}, but "
                f"now asks {question.id!r}; generate again into another run=FOLDER"
            )
        return self._decoded(question, row)

    def _decoded(self, example: Example, completion: dict[str, Any]) -> Decoded:
        """Decode the first reply of one completion and count what happened."""
        task, tally = self.answered.task, self.tally
        refused = completion.get("refused") is not None
        decoded = task.ask.decode(first_reply(completion), example, self.answered.labels)
        tally.calls += 1
        tally.refused += refused
        if refused:
            tally.refusals.append(f"{example.id}: {completion['refused']}")
        else:
            tally.cut += completion["finish"][0] == "length"
            tally.shortened += completion["dropped_sentences"] > 0
            tally.prompt_tokens += completion["prompt_tokens"]
            tally.cached_tokens += completion["cached_tokens"]
            tally.completion_tokens += completion["completion_tokens"]
            tally.near_ties += bool(completion["near_ties"])
            tally.unreadable += not decoded.readable
            tally.valid += not decoded.repairs
            tally.repaired += bool(decoded.repairs) and decoded.readable
            # The part before the colon is the defendant's name, the part after the kind of repair.
            tally.repairs.update(text.rpartition(": ")[2] for text in decoded.repairs)
        return decoded


def ranked(
    task: Task, example: Example, replies: Sequence[str], labels: Labels
) -> tuple[Answer, int]:
    """Return the answer with its list ranked by votes, and how many places were filled up.

    The k-th value of a reply's list gets 1/k of a vote (reciprocal rank fusion without its
    constant); of equal values, the one that came first stays first, and the greedy reply comes
    first. A list that is too short is filled up with the commonest labels. Without a readable reply
    the answer is the task's fallback.
    """
    key, length = task.answer.ranked, task.answer.length
    decoded = [task.ask.decode(reply, example, labels) for reply in (*replies, "")]
    votes: dict[str, float] = defaultdict(float)
    for reply in decoded:
        for rank, value in enumerate(reply.answer[key] if reply.readable else (), start=1):
            votes[value] += 1 / rank
    voted = sorted(votes, key=lambda value: -votes[value])[:length]
    commonest = islice(labels.counts.get(key, ()), length)
    filled = list(dict.fromkeys([*voted, *commonest]))[:length]
    return {**decoded[0].answer, key: filled}, len(filled) - len(voted)
