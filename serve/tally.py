"""What decoding counts: replies that are valid, repaired or cut, and examples without a reply."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panjue.prompts.example import ENDPOINT_SAID, ENGINE_FAILED, Decoded, Example
from panjue.prompts.plumbing.endpoint import CONTENT_FILTER, TOO_LONG
from panjue.prompts.plumbing.records import AnsweredBy

MAX_SHOWN_REFUSALS = 5  # number of refused examples that are printed; decode.json has all

FINISH = {
    "content_filter": "a content filter",
    "error": "an error of the engine (the same `panjue generate` asks again)",
}
"""Finish reason of a reply -> the same in words."""

OWN_LIMIT = re.compile(r": the prompt needs \d+ tokens")
"""A refusal of `ask.QuestionMaker` for the length of a case, after the example's id."""


def without_reply(refusals: Sequence[str]) -> str:
    """Return a line on the examples that have no reply: ids, reasons, way out."""
    shown = "; id ".join(refusals[:MAX_SHOWN_REFUSALS])
    more = len(refusals) - MAX_SHOWN_REFUSALS
    rest = f"; {more} more in decode.json" if more > 0 else ""
    line = f"without a reply: {len(refusals)}, their answers are not the model's: id {shown}{rest}"
    said = [refusal for refusal in refusals if f": {ENDPOINT_SAID}" in refusal]
    if any(map(OWN_LIMIT.search, refusals)) or any(map(TOO_LONG.search, said)):
        line += "; a model with a longer context can be asked"
    if said:
        line += f"; {len(said)} refused by the endpoint: the same `panjue generate` asks again"
    if any("finish_reason: length" in refusal for refusal in said):
        line += "; give replies more tokens: sampling.max_tokens=N answers=NAME"
    if failed := sum(refusal.endswith(ENGINE_FAILED) for refusal in refusals):
        line += f"; {failed} on which the engine failed: the same `panjue generate` asks again"
    if filtered := sum(bool(CONTENT_FILTER.search(refusal)) for refusal in refusals):
        line += f"; {filtered} refused for their content: another model can be asked"
    return line


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
    """Finish reasons of replies, other than their end and the limit on their length."""
    refused: int = 0
    shortened: int = 0
    skipped_rows: int = 0
    left_out: int = 0  # items, such as defendants, of which readable replies have nothing
    missing_fields: int = 0  # fields that the other items of readable replies lack
    unpaired: int = 0  # items with a charge that no training case has with any of their articles
    has_gold: bool = False  # whether the test file has gold answers, so that scoring is possible
    asked_otherwise: str = ""
    """How asking differed for the answers that decided who answers; empty if it did not."""
    lacks_choice: bool = False
    """Whether the model answers, and no choice by held-out cases has weights for confidences."""
    replaced: str = ""
    """Who answered the replaced submission, and which files made from it were deleted."""
    by_field: Mapping[str, AnsweredBy]
    answered_by: str  # the line of `who_answered`
    fallback: str  # who answers what replies lack
    submission: Path
    repairs: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)

    def add(
        self, example: Example, row: Mapping[str, Any], decoded: Decoded, item_fields: int
    ) -> None:
        """Count the first reply to an example, whose items have `item_fields` fields each."""
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
            # "张某: charge 盗窃 -> 盗窃罪" counts for all defendants together.
            name, _, repair = text.partition(": ")
            self.repairs[repair if name in example.names else text] += 1
        if not decoded.readable:
            self.unreadable += 1
            return
        self.repaired += bool(decoded.repairs)
        self.valid += not decoded.repairs
        missing_by_item = Counter(item for item, _ in decoded.from_fallback)  # fields of each item
        for missing in missing_by_item.values():
            if missing == item_fields:  # the reply lacks the whole item
                self.left_out += 1
            else:
                self.missing_fields += missing

    def lines(self) -> Iterator[str]:
        """Yield the lines for the console after decoding."""
        if self.calls:
            yield from self._lines_on_replies()
        else:
            yield f"{self.examples} examples"
        if self.skipped_rows:
            yield f"{self.skipped_rows} bad rows were skipped, see skipped-test.jsonl"
        if self.refusals:
            yield without_reply(self.refusals)
        yield from (f"  {count:5d} × {kind}" for kind, count in self.repairs.most_common(8))
        if self.unpaired:
            yield f"{self.unpaired} persons have a charge never seen with their articles"
        if self.asked_otherwise:
            way = self.asked_otherwise
            yield f"who answers was decided on answers that were made in another way: {way}"
        if self.lacks_choice:
            yield "no choice lies beside the weights: confidences in the model are not calibrated"
        if self.replaced:
            yield f"{self.submission}: replaced: {self.replaced}"
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
            yield f"what replies lack is answered by: {self.fallback}"

    def to_json(self) -> dict[str, Any]:
        """Return the entries of `decode.json`."""
        numbers = {**vars(self), "submission": self.submission.name}
        numbers["repairs"] = dict(self.repairs.most_common())
        numbers["finish"] = dict(self.finish.most_common())
        for name in ("replaced", "has_gold", "asked_otherwise", "lacks_choice"):
            del numbers[name]  # only for the console
        return numbers
