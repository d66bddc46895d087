"""Tasks whose answer is one class, or a set of classes, of a closed list."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from panjue.prompts.example import Answer, Decoded, Example, groups_of
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.decode import field_text, load_json, normal, snap, strings_in
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import Record, case_lines
from panjue.prompts.render import render
from panjue.prompts.task import Ask, Data, Messages, Schema, Score, Task, id_of, text_of
from panjue.prompts.tasks.metrics import CorpusMetric, Numbers, Row

ENDS = re.compile(r"[,，、;；\n]|\.(?=\s|$)")
"""Where a class ends in a reply that is no JSON."""

NONE = "none"
"""What an empty set of classes is called in counts and reports."""


def _with_id(number: int | str, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return {"id": number, **load()}


@dataclass(frozen=True)
class Classes:
    """A closed list of classes, in the words of a reply and in the numbers of the files.

    Attributes:
        name: The task.
        words: The classes as the model writes them; a class is its place here in the files.
        several: Whether an answer is a set of them, which may be empty.
        named: Whether the files have the words themselves, and no numbers.
        text: The fields that may have the text.
        groups: Fields to report by -> for numbers, the names that they stand for.
        other: What else files call such a field -> its name here.
        person: The field that may name whom it is about; `{person}` in the template.
        synonyms: What a free reply may have in place of a class -> the class.
    """

    name: str
    words: Sequence[str]
    several: bool = False
    named: bool = False
    text: Sequence[str] = ("text",)
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    other: Mapping[str, str] = field(default_factory=dict)
    person: str = ""
    synonyms: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the field with the answer."""
        return "labels" if self.several else "label"

    def rows(self, path: Path) -> Iterator[Record]:
        """Yield the lines of a file; one without an `id` is called by its number."""
        for number, load in case_lines(path):
            yield number, partial(_with_id, number, load)

    def read(self, row: Mapping[str, Any]) -> Example:
        """Read one line. Groups stand in it, or in its `attributes`.

        Raises:
            UserError: A field is missing or of the wrong type.
        """
        key = id_of(row)
        text = text_of(row, next((name for name in self.text if name in row), self.text[0]))
        attributes = row.get("attributes") or {}
        fields = {**attributes, **row} if isinstance(attributes, dict) else dict(row)
        fields = {self.other.get(name, name): value for name, value in fields.items()}
        groups = {name: self._group(name, fields[name]) for name in self.groups if name in fields}
        person = row.get(self.person) or ""
        if not isinstance(person, str):
            raise UserError(f"{self.person!r} must be a name")
        return Example(
            id=key,
            text=text,
            names=(person,) if person else (),
            inputs={"person": person},
            answer={self.key: self._words(row[self.key])} if self.key in row else None,
            groups=groups_of(groups),
        )

    def _group(self, name: str, value: Any) -> Any:
        names = self.groups[name]
        if not names or not isinstance(value, int) or value == -1:  # a missing ClassLabel
            return None if value == -1 else value
        if not 0 <= value < len(names):
            raise UserError(f"{name!r} must be a name or a number from 0 to {len(names) - 1}")
        return names[value]

    def _words(self, value: Any) -> list[str] | str:
        """Return the words of what a file has."""
        listed = value if self.several else [value]
        if not isinstance(listed, list) or not all(self._is_class(one) for one in listed):
            known = "names of classes" if self.named else f"numbers from 0 to {len(self.words) - 1}"
            raise UserError(
                f"{self.key!r} must be {'a list of' if self.several else 'one of the'} {known}"
            )
        words = [one if isinstance(one, str) else self.words[one] for one in listed]
        ordered = sorted(set(words), key=self.words.index)
        return ordered if self.several else ordered[0]

    def _is_class(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in self.words
        return not self.named and type(value) is int and 0 <= value < len(self.words)

    def prompt(self, example: Example) -> Messages:
        """Ask for the class."""
        return render(self.name, example)

    def schema(self, _example: Example, _labels: Labels) -> Schema:
        """Return the JSON Schema of a reply."""
        one: Schema = {"enum": list(self.words)}
        many: Schema = {"type": "array", "items": one, "maxItems": len(self.words)}
        return {
            "type": "object",
            "properties": {self.key: many if self.several else one},
            "required": [self.key],
            "additionalProperties": False,
        }

    def decode(self, reply: str, _example: Example, labels: Labels) -> Decoded:
        """Read a reply as one class, or a set of classes, whatever it is."""
        found = load_json(reply)
        if isinstance(found, dict) and list(found) == [self.key] and self._is_answer(found):
            return Decoded({self.key: found[self.key]})
        known = {normal(word): word for word in self.words}
        known |= {normal(word): meant for word, meant in self.synonyms.items()}
        text = field_text(reply, "labels?|answer|答案")
        written = ENDS.split(reply[:1024]) if text is None else strings_in(text)
        snapped = [snap(word, known) for word in written[: 4 * len(self.words)] if word.strip()]
        meant = [word for word in dict.fromkeys(snapped) if word]
        if not meant and not (self.several and text is not None and not written):
            return Decoded(self._fallback(labels), ("no class",), readable=False)
        ordered = sorted(meant, key=self.words.index)
        answer = ordered if self.several else meant[0]
        return Decoded({self.key: answer}, ("not the JSON that was asked for",))

    def _is_answer(self, found: Mapping[str, Any]) -> bool:
        value = found[self.key]
        listed = value if self.several else [value]
        if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
            return False
        places = [self.words.index(word) if word in self.words else -1 for word in listed]
        return -1 not in places and places == sorted(set(places))

    def _fallback(self, labels: Labels) -> Answer:
        commonest = labels.commonest("label") or self.words[0]
        if self.several:
            return {self.key: [] if commonest == NONE else [commonest]}
        return {self.key: commonest}

    def labels(self, examples: Iterable[Example]) -> Labels:
        """Count the classes of the training answers."""
        answers = [example.answer[self.key] for example in examples if example.answer]
        return collect(
            {"label": (answer or [NONE]) if self.several else [answer]} for answer in answers
        )

    def write(self, example: Example, answer: Answer) -> dict[str, Any]:
        """Return the hand-in row, which has numbers or names as the files have."""
        value = answer[self.key]
        listed = value if self.several else [value]
        written = list(listed) if self.named else [self.words.index(word) for word in listed]
        return {"id": example.id, self.key: written if self.several else written[0]}

    def classes(self, row: Row) -> list[str]:
        """Return the words of a row's classes; an empty set is one too."""
        found = self._words(row[self.key])
        return (found or [NONE]) if isinstance(found, list) else [found]

    def check(self, example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
        """Yield what a submission row has wrong."""
        if row.keys() != {"id", self.key}:
            yield f"the fields must be id and {self.key}"
            return
        if row["id"] != example.id:
            yield f"the id is written {row['id']!r}, the case has {example.id!r}"
        try:
            self._words(row[self.key])
        except UserError as error:
            yield str(error)

    def task(self, *languages: str) -> Task:
        """Return the task; its texts are in these languages."""
        return Task(
            Data(self.read, self.write, self.rows, check=self.check, languages=languages),
            Ask(self.prompt, self.schema, self.decode, labels=self.labels),
            Score(
                (accuracy, macro_f1(len(self.words), self.words if self.named else ())),
                fallback="commonest class",
                classes=self.classes,
                order={"class": (*self.words, NONE) if self.several else tuple(self.words)},
            ),
        )


def macro_f1(classes: int, names: Sequence[str] = ()) -> CorpusMetric:
    """Return macro F1 over the classes 0 to `classes` - 1 that are gold or predicted somewhere.

    Where rows have `names` instead, a class is its place there. As scikit-learn's
    `f1_score(average="macro", zero_division=0)` has it for one class per example. An empty set of
    classes is a class of its own, as in FairLex. An example without a row misses its gold classes
    and predicts none.
    """
    width = classes + 1

    def counts(gold: Row, predicted: Row | None) -> Sequence[float]:
        wanted = _marked(gold, classes, names)
        given = np.zeros(width) if predicted is None else _marked(predicted, classes, names)
        found: list[float] = np.concatenate([wanted * given, wanted, given]).tolist()
        return found

    def value(sums: Numbers) -> Numbers:
        f1 = f1_by_class(sums)
        present = ~np.isnan(f1)
        scores: Numbers = np.where(present, f1, 0).sum(-1) / np.maximum(present.sum(-1), 1)
        return scores

    return CorpusMetric("macro_f1", 3 * width, counts, value)


def f1_by_class(sums: Numbers) -> Numbers:
    """Return F1, [..., classes + 1], from summed counts; NaN for a class that never occurs."""
    right, wanted, given = np.split(sums, 3, axis=-1)
    with np.errstate(invalid="ignore"):
        found: Numbers = 2 * right / (wanted + given)
    return found


def accuracy(gold: Row, predicted: Row | None) -> float:
    """Return 1 where exactly the gold classes are predicted."""
    return float(predicted is not None and classes_of(predicted) == classes_of(gold))


def classes_of(row: Row) -> set[int | str]:
    """Return the classes of a row: its `label`, or its `labels`.

    Raises:
        TypeError: They are neither numbers nor names.
    """
    found = row["labels"] if "labels" in row else [row["label"]]
    if not isinstance(found, list) or not all(type(one) in (int, str) for one in found):
        raise TypeError
    return set(found)


def _marked(row: Row, classes: int, names: Sequence[str]) -> Numbers:
    """Return 1 for every class of a row, [classes + 1]; the last one is of an empty set."""
    marks = np.zeros(classes + 1)
    known: Sequence[int | str] = names or range(classes)
    found = classes_of(row)
    if not found <= set(known):
        raise TypeError
    marks[[known.index(one) for one in found] or classes] = 1
    return marks
