"""One question, its answer, and the calls that lead there."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from panjue.prompts.plumbing.errors import UserError

Answer = Mapping[str, Any]


class Turn(NamedTuple):
    """What somebody says in a dialogue.

    Attributes:
        number: Its place in the dialogue, from 1: sentences repeat themselves.
        holder: Who says it.
        sentence: What is said.
        event: What it is about, where that is known.
    """

    number: int
    holder: str
    sentence: str
    event: str = ""


@dataclass(frozen=True)
class Example:
    """One question: what fills the template, and the answer we hope for.

    Attributes:
        id: Unique within its file; joins examples, completions and scores.
        text: The long part, which `fit` may shorten; `{text}` in the template.
        names: Those the answer is about, in order; `fit` keeps the sentences that introduce them.
        inputs: Further fields of the template.
        answer: The gold answer; None in a test file.
        references: Where several answers may be right, sets of them as the hand-in writes them:
            a score is the mean over the sets of how well the best of a set is met.
        groups: Attributes to report apart, e.g. `{"defendants": "2"}`; never shown to the model.
        anchor: What the text is read for: `fit` keeps the sentences that share most with it.
        turns: Of a dialogue, those that the answer is about.
        notes: What somebody should know of its row, though it is a good one.
    """

    id: int | str
    text: str
    names: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    answer: Answer | None = None
    references: tuple[tuple[str, ...], ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    anchor: str = ""
    turns: tuple[Turn, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decoded:
    """A reply after repair.

    Attributes:
        answer: Always complete: what could not be read is answered by the task's fallback.
        repairs: What was mended, one short text each; empty when the reply was valid as it came.
        readable: False when nothing at all could be read, so that the answer is a guess.
    """

    answer: Answer
    repairs: tuple[str, ...] = ()
    readable: bool = True


Solving = Generator[Sequence[Example], Sequence[Decoded], Answer]
"""The way to an answer that takes several calls.

It yields the questions that can be put by now, each an example of the same task with an id of its
own, receives their replies in that order, decoded, and returns the answer. Given the same replies
it asks the same questions: that is how a run is gone on with, and decoded again without a model.
"""


def once(example: Example) -> Solving:
    """Solve by one call: the example is the question."""
    [decoded] = yield [example]
    return decoded.answer


def drive(solving: Solving, reply: Callable[[int, Example], Decoded]) -> Answer:
    """Return the answer that is found where question 0, 1, … gets this reply."""
    number, replies = 0, None
    while True:
        try:
            questions = solving.send(replies)  # type: ignore[arg-type]  # None starts it
        except StopIteration as found:
            answer: Answer = found.value
            return answer
        replies = [reply(number + i, question) for i, question in enumerate(questions)]
        number += len(replies)


def call_key(row: Mapping[str, Any]) -> str:
    """Return the key of a row of `completions.jsonl`: its id, and which of its calls it is."""
    return f"{row['id']} {row['call']}" if "call" in row else str(row["id"])


def first_reply(row: Mapping[str, Any]) -> str:
    """Return the first reply of a row of `completions.jsonl`; empty where it could not be asked."""
    return str(row["texts"][0]) if row.get("refused") is None else ""


UNKNOWN = "-"
"""The group of an example whose attribute nobody knows."""

NOBODY_KNOWS = (None, "", UNKNOWN, "n/a", "N/A")
"""What files have for an attribute that is not known."""


def groups_of(found: Any) -> dict[str, str]:
    """Return attribute -> group, those left out that nobody knows.

    Raises:
        UserError: There is no such mapping, or a group is no text, number or truth value.
    """
    if not isinstance(found, dict):
        raise UserError("groups must be an object: attribute to group")
    for name, group in found.items():
        if not isinstance(group, str | int | float | None):
            raise UserError(f"group {name!r} must be one text or number")
    return {name: str(group) for name, group in found.items() if group not in NOBODY_KNOWS}
