"""One question, its answer, and the calls of the model that produce the answer.

An answer consists of items, e.g. one for each person, or is itself the only item. `LabelFields`
names the fields of an item whose values are labels. `Labels` counts these labels by field, which
may have another name there. A task can count an empty set, too, under the name
`LabelFields.nothing`, so that it may be the commonest answer.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from panjue.prompts.plumbing.config import Config
from panjue.prompts.plumbing.decode import visible
from panjue.prompts.plumbing.errors import UserError

Answer = Mapping[str, Any]


class Turn(NamedTuple):
    """One sentence of a dialogue: its position (from 1), the speaker, the text."""

    number: int
    holder: str
    sentence: str


@dataclass(frozen=True)
class Example:
    """A row that a task has read: the fields of the prompt template, and the gold answer."""

    id: int | str  # unique within its file; joins examples, completions and scores
    text: str  # the long part, which may be shortened; `{text}` in the template
    names: tuple[str, ...] = ()
    """What the answer is about, in order: persons, or beginnings of lines. `shorten` keeps the
    first sentence with each of them."""
    given_names: tuple[str, ...] = ()  # the names as in the file, for the submission
    inputs: Mapping[str, str] = field(default_factory=dict)  # further fields of the template
    answer: Answer | None = None  # gold; None in a test file
    references: tuple[tuple[str, ...], ...] = ()
    """Sets of gold answers in the format of the submission, if several are correct. The score is
    the best match in each set, averaged over the sets."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Attribute -> group, for scores by group: `{"defendants": "2"}`. The model never sees them."""
    anchor: str = ""  # the question about the text; the sentences most similar to it are kept
    turns: tuple[Turn, ...] = ()  # the sentences of a dialogue that the answer is about
    notes: tuple[str, ...] = ()  # warnings about a row that is valid


@dataclass(frozen=True)
class Decoded:
    """A reply after repair."""

    answer: Answer  # always complete: the task's fallback replaces unreadable parts
    repairs: tuple[str, ...] = ()  # one short text for each; empty if the reply was valid
    readable: bool = True  # False if nothing could be read, so that the answer is the fallback
    from_fallback: tuple[tuple[int, str], ...] = ()
    """Item and field of each value that a readable reply lacks, so that it is the fallback's."""

    def without(self, fields: Collection[str], items: int) -> "Decoded":
        """Return the reply as if it lacked these fields of its first `items` items."""
        lacked = [(item, field) for item in range(items) for field in fields]
        return replace(self, from_fallback=(*self.from_fallback, *lacked))

    def is_fallback(self, item: int, field: str) -> bool:
        """Say whether the reply lacks this field of an item."""
        return not self.readable or (item, field) in self.from_fallback


Solving = Generator[Sequence[Example], Sequence[Decoded], Answer]
"""The steps of an answer that takes several calls: a generator.

It yields the questions that can be asked now, each an example of the same task with its own id. It
receives their decoded replies in that order, and returns the answer. The same replies must always
lead to the same questions, so that a run can resume and be decoded again without a model.
"""


def once(example: Example) -> Solving:
    """Answer an example with one call: ask the example itself, and return its decoded reply."""
    [decoded] = yield [example]  # see `Solving`
    return decoded.answer


def run_steps(solving: Solving, reply: Callable[[int, Example], Decoded]) -> Answer:
    """Return the answer of these steps, whose questions `reply` answers by number, from 0.

    It gets a number and its question, and gives the decoded reply.
    """
    numbers = count()
    replies = None
    while True:
        try:
            questions = solving.send(replies)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            answer: Answer = end.value
            return answer
        replies = [reply(next(numbers), question) for question in questions]


@dataclass(frozen=True)
class LabelFields:
    """The fields of an answer that have known labels; some tasks have no such fields."""

    items: str = ""  # key of the list of items in the answer; "" if the answer is the only item
    sets: tuple[str, ...] = ()
    """Fields of an item that are label sets. If there are two, `Labels.pairs` says which labels
    occur together."""
    classes: tuple[str, ...] = ()  # fields of an item with one label
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Field -> all its labels in order: a closed list. Numbers in the submission are positions in
    it. If each field has a closed list, an endpoint can be asked without a training."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Field -> its name in `Labels`, if that differs."""
    nothing: str = ""  # the name of an empty set in `Labels`, if empty sets are counted
    evidence: Callable[[str], Sequence[float]] | None = None
    """From a text or clauses to numbers about an item, for the text classifier. Their count is
    fixed."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.sets, *self.classes)

    def kind(self, name: str) -> str:
        """Return the name of a field in `Labels`, such as `labels` -> `label`.

        Tasks with one class call the field `label`, and tasks with several call it `labels`. In
        `Labels` both have the same name.
        """
        return self.kinds.get(name, name)

    def counts(self, name: str, counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
        """Return label -> count for a field, from `Labels.counts`, without empty sets."""
        of_field = dict(counts[self.kind(name)])
        of_field.pop(self.nothing, None)
        return of_field

    def items_of(self, answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the items of an answer, or of a submission row; KeyError: it has none."""
        items: Sequence[Mapping[str, Any]] = answer[self.items] if self.items else [answer]
        return items

    def with_items(self, answer: Answer, items: Sequence[Mapping[str, Any]]) -> Answer:
        """Return the answer with these items in place of the items that it has."""
        if self.items:
            return {**answer, self.items: items}
        return items[0]  # the answer is itself its only item


@dataclass(frozen=True)
class Ranking:
    """For answers that are a list, best first, which the votes of several samples rank."""

    key: str  # name of the list, and of the labels that fill it up
    length: int


@dataclass(frozen=True)
class Solve:
    """For answers that take several calls, each with its own row."""

    steps: Callable[[Example, Any], Solving]  # example, settings -> the steps to its answer
    gold_oracle: Callable[[Example], Callable[[Example], Example]]
    """From an example to a function that answers each question of `steps` as a perfect model
    would."""
    settings: Config

    def training_examples(self, example: Example) -> Iterator[Example]:
        """Yield the questions of `steps` with the answers of a perfect model."""
        oracle = self.gold_oracle(example)
        answered = []

        def perfect_reply(_number: int, question: Example) -> Decoded:
            with_answer = oracle(question)
            assert with_answer.answer is not None
            answered.append(with_answer)
            return Decoded(with_answer.answer)

        run_steps(self.steps(example, self.settings), perfect_reply)
        yield from answered


def is_same(gold: Any, value: Any) -> bool:
    """Say whether two values of a field are equal; the order of a label set does not matter."""
    if isinstance(gold, list) and isinstance(value, list):
        return set(gold) == set(value)
    return bool(gold == value)


def call_key(row: Mapping[str, Any]) -> str:
    """Return the key of a row of `completions.jsonl`: its id, and its call's number, if any."""
    if "call" in row:
        return f"{row['id']} {row['call']}"
    return str(row["id"])


def first_reply(row: Mapping[str, Any]) -> str:
    """Return the first reply in a row of `completions.jsonl`; empty if it was refused."""
    if row.get("refused") is not None:
        return ""
    texts = row.get("texts")
    if not (isinstance(texts, list) and texts and isinstance(texts[0], str)):
        raise UserError(
            f"id {row['id']}: 'texts' has no reply; delete the line: `panjue generate` asks again"
        )
    return texts[0]


ENGINE_FAILED = "the engine failed on this request"

ENDPOINT_SAID = "the endpoint said "
"""The first words of why an endpoint gave no reply, in a row's `refused`."""

FOR_NOW = re.compile(
    rf"{ENGINE_FAILED}$|{ENDPOINT_SAID}|[45]\d\d: |the reply has no text|the model refuses:"
)
"""What `refused` has of calls that may succeed later: what an engine or a server says today is no
property of the case. The last three are what versions before 0.5 wrote."""


def has_failed(row: Mapping[str, Any]) -> bool:
    """Say whether a call got no reply for a reason that may be gone when it is asked again.

    `row` is one of `completions.jsonl`. Its `finish` says for each reply why it ended.
    """
    finish = row.get("finish")
    # The first reply gives the answer; the samples after it only vote.
    if isinstance(finish, list) and finish[:1] == ["error"]:
        return True
    refused = str(row.get("refused") or "")
    return bool(FOR_NOW.match(refused))  # the engine or endpoint failed, not the case


UNKNOWN = "-"
"""The group of examples whose attribute is unknown."""

UNKNOWN_WORDS = ("", UNKNOWN, "n/a", "na", "<na>", "nan", "none", "null")


def groups_of(groups: Any) -> dict[str, str]:
    """Return attribute -> group, with `UNKNOWN` for unknown ones."""
    if not isinstance(groups, dict):
        raise UserError("groups must be an object: attribute to group")
    return {name: group_of(name, value) for name, value in groups.items()}


def known_groups(groups: Any) -> dict[str, str]:
    """Return attribute -> group, without the unknown ones."""
    return {name: group for name, group in groups_of(groups).items() if group != UNKNOWN}


def group_of(attribute: str, value: Any) -> str:
    """Return the group of a value in a file: a text, or `UNKNOWN`."""
    if not isinstance(value, str | int | float | None):
        raise UserError(f"group {attribute!r} must be one text or number")
    if isinstance(value, float) and value.is_integer():  # pandas makes 0.0 of an int column
        value = int(value)
    text = visible(str(value)).strip()
    return UNKNOWN if text.casefold() in UNKNOWN_WORDS else text
