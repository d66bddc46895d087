"""One question, its answer, and the calls that lead there."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from panjue.prompts.plumbing.config import SolveSettings
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


def run_steps(solving: Solving, reply: Callable[[int, Example], Decoded]) -> Answer:
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


class First:
    """The answer is the first reply. The other ways to an answer differ from this in what they say.

    Attributes:
        fields: Of an item of the answer, those that are decided from several replies.
        settings: How `Solve` goes about it; None where one call is enough.
        uses_samples: Whether further replies beside the first change the answer.
    """

    fields: tuple[str, ...] = ()
    settings: SolveSettings | None = None
    uses_samples = False

    def solving(self, example: Example) -> Solving:
        """Begin on the way to an example's answer."""
        return once(example)

    def training_examples(self, example: Example) -> Iterator[Example]:
        """Yield the questions of a perfect run, with their answers: what a model is trained on."""
        yield example


@dataclass(frozen=True)
class Decide(First):
    """An answer is decided from what several samples and their probabilities say.

    Attributes:
        items: The key under which the answer lists its items.
        sets: Fields of an item that are label sets, decided by expected F1. Where there are two,
            `Labels.pairs` says which labels of theirs go together.
        classes: Fields of an item with one label, decided by probability.
        order: Field -> its labels in their own order; where the submission has numbers, these
            count through them.
    """

    items: str
    sets: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    uses_samples = True

    def __post_init__(self) -> None:
        """Name all fields that are decided."""
        object.__setattr__(self, "fields", (*self.sets, *self.classes))


@dataclass(frozen=True)
class Rank(First):
    """An answer is a list, best first, and several samples are ranked by their votes.

    Attributes:
        field: The key of the list in the answer, and of its labels, which fill it up.
        length: How long it is.
    """

    field: str
    length: int
    uses_samples = True


@dataclass(frozen=True)
class Solve(First):
    """An answer takes several calls.

    Attributes:
        steps: Example, settings -> the way to its answer.
        gold_oracle: Example with its gold answer -> what answers each question of `steps` as a
            perfect model would: question -> question with its answer.
        settings: The defaults.
    """

    steps: Callable[[Example, Any], Solving]
    gold_oracle: Callable[[Example], Callable[[Example], Example]]
    settings: SolveSettings

    def solving(self, example: Example) -> Solving:
        """Begin on the way to an example's answer."""
        return self.steps(example, self.settings)

    def training_examples(self, example: Example) -> Iterator[Example]:
        """Yield the questions of a perfect run, with their answers.

        They come out of the very `steps` that are used later, so that training sees what use sees.
        """
        oracle, asked = self.gold_oracle(example), []

        def reply(_number: int, question: Example) -> Decoded:
            asked.append(oracle(question))
            assert asked[-1].answer is not None
            return Decoded(asked[-1].answer)

        run_steps(self.solving(example), reply)
        yield from asked


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
