"""Answered cases with all that is known about their answers, for the page and `panjue explain`.

A field is decided if it is in `LabelFields`: its labels are known, so that model or classifier may
answer it. The items are those of gold, or without gold those of the answer. Replies and
confidences have one entry for each person of the submission row, in order. Gold may list others, or
in another order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

from panjue.eval.agreement import compared_opinions, used_replies, without_gold
from panjue.eval.baselines import row_of_classifier
from panjue.eval.field_why import (
    VOTE,
    FieldWhy,
    PersonReasons,
    field_reasons,
    persons,
)
from panjue.eval.metric_values import item_names, metric_values, submission_rows
from panjue.eval.reliability import Confidences, mean_confidence
from panjue.eval.shown import items_of
from panjue.finetune.classifier.classifier import CLASSIFIER_NAME
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
    text: list[tuple[str, int | None]]  # pieces, each with its index in `items` if it is a name
    items: list[Item]  # fields are their own gold if the file has none
    opinions: list[list[tuple[Field, str]]]
    """Item -> field -> the answer that was not handed in, the text classifier's or the model's, and
    how the two agree; see `compared_opinions`. Empty if only one of them has answered."""
    confidence: float | None  # mean over its fields; None if the run has no confidences
    whys: list[list[FieldWhy]]
    """Item -> decided field -> who answered it and why; empty if the task has no decided fields."""
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

    `decoding` is the `decode.json` of the submission, or empty. The text classifier gives `most`
    reasons for each case, and none while `wants_reasons` returns False.
    """
    task = answered.task
    advisor = answered.advisor
    files = _Files(answered, decoding, has_gold=has_gold)
    answers = map(files.answer, examples)
    while batch := list(islice(answers, EXPLAINED_AT_ONCE)):
        reasons: Iterable[PersonReasons] = repeat({})
        if advisor and wants_reasons():
            batch_examples = [answer.example for answer in batch]
            batch_rows = [answer.row for answer in batch]
            reasons = field_reasons(task, batch_examples, batch_rows, advisor, most)
        yield from map(files.case, batch, reasons)


@dataclass(frozen=True)
class _Answer:
    """What the files of a folder of answers have of one example."""

    example: Example
    row: Row | None  # its row of the submission
    gold: Row | None  # without gold, the answer itself, so that it can be shown
    items: list[Item]
    asked: Example  # the example with the persons of its row; gold may list others
    calls: list[dict[str, Any]]  # its row of completions, or one for each call in order
    decoded: Decoded | None  # None without a reply, or if several make the answer
    confidence: Sequence[Mapping[str, float]] | None  # item -> field -> confidence


class _Files:
    """The submission, the replies and the confidences of a folder of answers."""

    def __init__(self, answered: Answered, decoding: Mapping[str, Any], *, has_gold: bool) -> None:
        """Open the files; `decoding` is the `decode.json` of the submission.

        It is empty if there is none, or if the submission was changed after decoding.
        """
        self._answered = answered
        self._decoding = decoding
        self._has_gold = has_gold
        self._fallback: str = decoding.get("fallback", answered.task.score.fallback)
        self._rows = submission_rows(answered.task, answered.folder)
        path = answered.folder / "confidence.jsonl"
        self._confidences = None
        if decoding and path.exists():
            self._confidences = Confidences(answered.task, path)
        self._is_vote = bool(answered.record.voted)
        # Without any `decode.json`, `edited` returns an empty text, too.
        self._is_edited = not decoding and bool(edited(self._rows.path))
        is_of_replies = used_replies(decoding) and not (self._is_vote or self._is_edited)
        self._completions = answered.rows() if is_of_replies else None
        self._advisor = answered.advisor if is_of_replies else None

    def answer(self, example: Example) -> _Answer:
        """Return what the files have of an example."""
        task = self._answered.task
        row = self._rows.get(example.id)
        gold = self._gold(example, row)
        # The model was asked about the persons of the row. Those of `example` may be gold's.
        asked = replace(example, names=tuple(item_names(task, row or {})) or example.names)
        calls = self._calls(example)
        decoded = None
        # With `task.solve`, several calls make the answer, so that no reply alone is the answer.
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
        """Return the gold row of an example; without gold its own row, so that it can be shown."""
        task = self._answered.task
        if self._has_gold:
            return task.gold(example)
        if row is None:
            return None
        gold = task.as_gold(row)
        place = f"{self._rows.path}: id {example.id}"
        metric_values(task, gold, row, place)  # UserError: it is not in the hand-in format
        return gold

    def _calls(self, example: Example) -> list[dict[str, Any]]:
        """Return an example's rows of completions, one for each call of the model, in order."""
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

    def case(self, answer: _Answer, reasons: PersonReasons) -> CaseShown:
        """Return a case with what its files have, and with the text classifier's reasons."""
        example = answer.example
        return CaseShown(
            id=str(example.id),
            groups=example.groups,
            text=split_at_names(example.text, [name for name, _ in answer.items]),
            items=answer.items,
            opinions=self._opinions(answer),
            confidence=mean_confidence(answer.confidence) if answer.confidence else None,
            whys=self._whys(answer, reasons),
            handled=dict(_what_happened(answer, self._fallback)),
            reply=[call.get("refused") or first_reply(call) for call in answer.calls],
        )

    def _opinions(self, answer: _Answer) -> list[list[tuple[Field, str]]]:
        """Return `CaseShown.opinions`: the answers that were not handed in, and the results."""
        gold = answer.gold
        if self._advisor is None or gold is None:
            return []
        task = self._answered.task
        decoded = answer.decoded
        by_field = self._decoding.get("by_field", {})
        # A row of completions may contain the classifier's opinions, one for each person in order.
        # They do not fit if the cases are read from a gold file, which may list other persons.
        reply = answer.calls[0] if answer.calls and self._answered.is_answered_file else None
        of_classifier = row_of_classifier(task, self._advisor, answer.example, reply)
        classifier_items = list(items_of(task, gold, of_classifier))
        model_items = answer.items
        if decoded and "classifier" in by_field.values():  # the row mixes the answers of both
            of_model = task.data.write(answer.asked, decoded.answer)
            model_items = list(items_of(task, gold, of_model))
        opinions = compared_opinions(
            task, answer.asked, model_items, classifier_items, decoded, by_field
        )
        return list(opinions if self._has_gold else map(without_gold, opinions))

    def _whys(self, answer: _Answer, reasons: PersonReasons) -> list[list[FieldWhy]]:
        """Return for each item, field by field, who answered it and why: `CaseShown.whys`.

        A person of gold is looked up by name among those that the model was asked about.
        """
        task = self._answered.task
        if not (answer.row and task.answer.fields):
            return []
        asked_persons = persons(task, answer.asked.names)
        positions = {person: position for position, person in enumerate(asked_persons)}
        logprobs: ModelLogprobs = {}
        if answer.decoded:
            logprobs = model_logprobs(answer.calls[0], answer.decoded, task.answer)
        whys = []
        for person in persons(task, [name for name, _ in answer.items]):
            position = positions.get(person)
            of_item = []
            for field in task.answer.fields:
                why = FieldWhy(by="", confidence=None)  # if only gold has the person
                if position is not None:
                    confidences = answer.confidence[position] if answer.confidence else {}
                    why = FieldWhy(
                        by=self._who_answered(answer.decoded, position, field),
                        confidence=confidences.get(field),
                        logprob=logprobs.get((position, field)),
                    )
                of_item.append(replace(why, reasons=reasons.get(person, {}).get(field)))
            whys.append(of_item)
        return whys

    def _who_answered(self, decoded: Decoded | None, position: int, field: str) -> str:
        """Return who answered a field of the item at a position, as in `FieldWhy.by`.

        `decoded` is the reply, which may lack the field; None if that is unknown.
        """
        if self._is_edited:
            return ""
        if self._is_vote:
            return VOTE
        of_all = "model" if used_replies(self._decoding) else "classifier"
        who: str = self._decoding.get("by_field", {}).get(field, of_all)
        if who == "model" and decoded and decoded.is_fallback(position, field):
            return "classifier" if self._fallback == CLASSIFIER_NAME else self._fallback
        return who


def _what_happened(answer: _Answer, fallback: str) -> Iterator[tuple[str, str]]:
    """Yield what happened to the calls of an example, e.g. ("cut", "1 replies cut by length").

    `fallback` names what answers an unreadable reply.
    """
    calls = answer.calls
    decoded = answer.decoded
    refusals = [call["refused"] for call in calls if call.get("refused") is not None]
    asked = [call for call in calls if call.get("refused") is None]
    ends = [call["finish"][0] for call in asked]  # why the first reply of each call ended
    if refusals:
        yield "not asked", f"could not be asked: {refusals[0]}"
    if dropped := sum(call["dropped_sentences"] for call in asked):
        yield "shortened", f"shortened to fit by {dropped} sentences"
    if cut := ends.count("length"):
        yield "cut", f"{cut} replies cut by length"
    if filtered := ends.count("content_filter"):
        yield "content filter", f"{filtered} replies ended by a content filter"
    if not asked or decoded is None:
        return
    if not decoded.readable:
        yield "unreadable", f"the reply was unreadable, its answer: {fallback}"
    elif decoded.repairs:
        yield "repaired", "repaired: " + "; ".join(decoded.repairs)
