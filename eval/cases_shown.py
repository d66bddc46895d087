"""Answered cases with all that is known about their answers, for the page and `panjue explain`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from panjue.eval.agreement import compared_opinions, without_gold
from panjue.eval.baselines import row_of_classifier
from panjue.eval.field_why import (
    VOTE,
    FieldWhy,
    answerers,
    field_reasons,
    persons,
    whys_of,
    with_reasons,
)
from panjue.eval.metric_values import item_names, metric_values, submission_rows
from panjue.eval.reliability import Confidences, mean_confidence
from panjue.eval.shown import items_of
from panjue.finetune.classifier.opinions import ModelLogprobs, model_logprobs
from panjue.finetune.classifier.why import Most
from panjue.prompts.example import Decoded, Example, first_reply
from panjue.prompts.names import split_at_names
from panjue.prompts.tasks.metrics import Field, Item, Row
from panjue.serve.answers import Answered
from panjue.serve.decoding import edited

EXPLAINED_AT_ONCE = 64
"""Number of cases for which the text classifier gives reasons at once."""


@dataclass(frozen=True)
class CaseShown:
    """A case with all that is known about its answer."""

    id: str
    groups: Mapping[str, str]
    text: list[tuple[str, int | None]]
    """Pieces of the text in order: (piece, index of the name in `items` or None)."""
    items: list[Item]  # fields are their own gold if the file has none
    opinions: list[list[tuple[Field, str]]]
    """Item -> field -> the other one's answer (the text classifier's or the model's), and the key
    of `AGREEMENTS` for the two answers, or `NO_REPLY`. Empty if the classifier made the submission,
    or if there is no classifier."""
    confidence: float | None  # mean over its fields; None if the run has no confidences
    whys: list[list[FieldWhy]]
    """Item -> decided field -> why it got its answer; empty if the task has no decided fields."""
    handled: dict[str, str]  # what shortening and decoding did: keyword -> details
    reply: list[str]  # the raw replies, one for each call


def cases_shown(
    answered: Answered,
    decoding: Mapping[str, Any],
    examples: Iterable[Example],
    *,
    has_gold: bool,
    most: Most,
    wants_reasons: Callable[[], bool] = lambda: True,
) -> Iterator[CaseShown]:
    """Yield examples of the answered file with all that is known about their answers.

    No case has reasons while `wants_reasons` returns False.
    """
    task = answered.task
    classifier = answered.advisor
    files = _Files(answered, decoding, has_gold=has_gold)
    answers = map(files.answer, examples)
    while batch := list(islice(answers, EXPLAINED_AT_ONCE)):
        cases = [files.case(answer) for answer in batch]
        if not (classifier and wants_reasons()):
            yield from cases
            continue
        of_examples = [answer.example for answer in batch]
        rows = [answer.row for answer in batch]
        found = field_reasons(task, of_examples, rows, classifier, most)
        for case, reasons in zip(cases, found, strict=True):
            names = [name for name, _ in case.items]
            yield replace(case, whys=with_reasons(task, names, case.whys, reasons))


@dataclass(frozen=True)
class _Answer:
    """What the files of the answers have of one example."""

    example: Example
    row: Row | None  # its row of the submission
    gold: Row | None  # without gold, the answer itself, so that it can be shown
    items: list[Item]
    asked: Example
    """With the persons about whom the model was asked. Gold may list others."""
    calls: list[dict[str, Any]]  # its row of completions, or one for each call in order
    decoded: Decoded | None  # None without a reply, or if several make the answer
    confidence: Sequence[Mapping[str, float]] | None


class _Files:
    """The submission, the replies and the confidences of a folder of answers."""

    def __init__(self, answered: Answered, decoding: Mapping[str, Any], *, has_gold: bool) -> None:
        self._answered = answered
        self._decoding = decoding
        self._has_gold = has_gold
        self._rows = submission_rows(answered.task, answered.folder)
        path = answered.folder / "confidence.jsonl"
        self._confidences = None
        if decoding and path.exists():
            self._confidences = Confidences(answered.task, path)
        self._is_vote = bool(answered.record.voted)
        self._is_edited = not decoding and bool(edited(self._rows.path))
        was_asked = not decoding or bool(decoding.get("calls"))
        by_model = was_asked and not (self._is_vote or self._is_edited)
        self._completions = answered.rows() if by_model else None
        self._advisor = answered.advisor if by_model else None

    def answer(self, example: Example) -> _Answer:
        task = self._answered.task
        row = self._rows.get(example.id)
        gold = self._gold(example, row)
        asked = replace(example, names=tuple(item_names(task, row or {})) or example.names)
        calls = self._calls(example)
        decoded = None
        if calls and self._decoding and not task.solve:
            decoded = task.ask.decode(first_reply(calls[0]), asked, self._answered.labels)
        return _Answer(
            example=example,
            row=row,
            gold=gold,
            items=list(items_of(task, gold, row)) if gold else [],
            asked=asked,
            calls=calls,
            decoded=decoded,
            confidence=self._confidences.of(example, row) if self._confidences and row else None,
        )

    def _gold(self, example: Example, row: Row | None) -> Row | None:
        task = self._answered.task
        if self._has_gold:
            return task.gold(example)
        if row is None:
            return None
        gold = task.as_gold(row)
        place = f"{self._rows.path}: id {example.id}"
        metric_values(task, gold, row, place)  # raises if the metric cannot read it
        return gold

    def _calls(self, example: Example) -> list[dict[str, Any]]:
        answered = self._answered
        completions = self._completions
        if completions is None:
            return []
        if not answered.task.solve:
            row = answered.row_if_any(completions, {"id": example.id})
            return [row] if row else []
        calls: list[dict[str, Any]] = []
        while row := answered.row_if_any(completions, {"id": example.id, "call": len(calls)}):
            calls.append(row)
        return calls

    def case(self, answer: _Answer) -> CaseShown:
        """Return the case without the text classifier's reasons."""
        example = answer.example
        fallback = self._decoding.get("fallback", self._answered.task.score.fallback)
        return CaseShown(
            id=str(example.id),
            groups=example.groups,
            text=split_at_names(example.text, [name for name, _ in answer.items]),
            items=answer.items,
            opinions=self._opinions(answer),
            confidence=mean_confidence(answer.confidence) if answer.confidence else None,
            whys=self._whys(answer),
            handled=dict(_what_happened(answer, fallback)),
            reply=[call.get("refused") or first_reply(call) for call in answer.calls],
        )

    def _opinions(self, answer: _Answer) -> list[list[tuple[Field, str]]]:
        """Return what the other one, text classifier or model, answers."""
        gold = answer.gold
        if self._advisor is None or gold is None:
            return []
        task = self._answered.task
        decoded = answer.decoded
        by_field = self._decoding.get("by_field", {})
        reply = answer.calls[0] if answer.calls and self._answered.is_answered_file else None
        of_classifier = row_of_classifier(task, self._advisor, answer.example, reply)
        classifier_items = list(items_of(task, gold, of_classifier))
        model_items = answer.items
        if decoded and "classifier" in by_field.values():
            of_model = task.data.write(answer.asked, decoded.answer)
            model_items = list(items_of(task, gold, of_model))
        opinions = compared_opinions(
            task, answer.asked, model_items, classifier_items, decoded, by_field
        )
        return list(opinions if self._has_gold else map(without_gold, opinions))

    def _whys(self, answer: _Answer) -> list[list[FieldWhy]]:
        """Return who answered each decided field of each item, and with which probabilities."""
        task = self._answered.task
        if not (answer.row and task.answer.fields):
            return []
        by = answerers(task, answer.asked, answer.decoded, self._decoding)
        if self._is_vote:
            by = {person: dict.fromkeys(task.answer.fields, VOTE) for person in by}
        if self._is_edited:
            by = {}
        in_row = persons(task, item_names(task, answer.row))
        sure = dict(zip(in_row, answer.confidence, strict=True)) if answer.confidence else {}
        of_model: ModelLogprobs = {}
        if answer.decoded:
            of_model = model_logprobs(answer.calls[0], answer.decoded, task.answer)
        asked = enumerate(persons(task, answer.asked.names))
        logprobs = {
            person: {field: of_model.get((number, field)) for field in task.answer.fields}
            for number, person in asked
        }
        return whys_of(task, [name for name, _ in answer.items], by, sure, logprobs)


def _what_happened(answer: _Answer, fallback: str) -> Iterator[tuple[str, str]]:
    """Yield what happened to the calls of an example: (keyword, details).

    `fallback` answers what is unreadable.
    """
    calls = answer.calls
    decoded = answer.decoded
    refusals = [call["refused"] for call in calls if call.get("refused") is not None]
    asked = [call for call in calls if call.get("refused") is None]
    if refusals:
        yield "not asked", f"could not be asked: {refusals[0]}"
    dropped = sum(call["dropped_sentences"] for call in asked)
    if dropped:
        yield "shortened", f"shortened to fit by {dropped} sentences"
    cut = sum(call["finish"][0] == "length" for call in asked)
    if cut:
        yield "cut", f"{cut} replies cut by length"
    filtered = sum(call["finish"][0] == "content_filter" for call in asked)
    if filtered:
        yield "content filter", f"{filtered} replies ended by a content filter"
    if not asked or decoded is None:
        return
    if not decoded.readable:
        yield "unreadable", f"the reply was unreadable, its answer: {fallback}"
    elif decoded.repairs:
        yield "repaired", "repaired: " + "; ".join(decoded.repairs)
