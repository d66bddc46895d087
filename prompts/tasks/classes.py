"""Tasks whose answer is one class, or a set of classes, from a closed list.

After a change here raise `render.RULES`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from panjue.prompts.example import Answer, AnswerFields, Decoded, Example, known_groups
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.decode import (
    last_object,
    load_json,
    normal,
    snap,
    strings_in,
    visible,
)
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import FileRow
from panjue.prompts.plumbing.rows import case_rows
from panjue.prompts.render import render
from panjue.prompts.task import (
    Ask,
    Data,
    Messages,
    Schema,
    Score,
    Task,
    closed_object,
    id_of,
    text_of,
)
from panjue.prompts.tasks.metrics import CorpusMetric, Numbers, Row

NONE = "none"
"""The name of an empty set of classes in counts and reports."""


def _with_id(number: int | str, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return {"id": number, **load()}


@dataclass(frozen=True)
class Classes:
    """A closed list of classes: words in a reply, numbers (or words) in the files."""

    name: str  # of the task
    words: Sequence[str]  # the classes as the model writes them; files have the index
    several: bool = False  # an answer is a set of classes, which may be empty
    named: bool = False  # the files have the words instead of numbers
    text: Sequence[str] = ("text",)  # the possible names of the field with the text
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Fields to report by -> the names of their numbers; empty if they have names."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of such a field in files -> its name here."""
    person: str = ""  # field with the name of the person concerned; `{person}` in the template
    synonyms: Mapping[str, str] = field(default_factory=dict)  # word in a reply -> class
    evidence: Callable[[str], Sequence[float]] | None = None  # of a text, for its classifier

    @property
    def key(self) -> str:
        return "labels" if self.several else "label"

    def listed(self, value: Any) -> Any:
        return value if self.several else [value]

    def value(self, items: Sequence[Any]) -> Any:
        return list(items) if self.several else items[0]

    def rows(self, path: Path) -> Iterator[FileRow]:
        """Yield the rows of a file. FairLex's have no ids: there the line number is the id."""
        for number, load in case_rows(path):
            yield number, partial(_with_id, number, load)

    def read(self, row: Mapping[str, Any]) -> Example:
        """Read one row. The groups are fields of the row, or of its `attributes`."""
        key = id_of(row)
        text = text_of(row, next((name for name in self.text if name in row), self.text[0]))
        groups = self._groups(row)
        given = row.get(self.person) or ""
        if not isinstance(given, str):
            raise UserError(f"{self.person!r} must be a name")
        person = visible(given)
        if given:
            text = text.replace(given, person)
        answer = None
        if self.key in row:
            answer = {self.key: self.value(self._words(row[self.key]))}
        return Example(
            id=key,
            text=text,
            names=(person,) if person else (),
            inputs={"person": person},
            answer=answer,
            groups=groups,
        )

    def _groups(self, row: Mapping[str, Any]) -> dict[str, str]:
        attributes = row.get("attributes")
        fields = {**attributes, **row} if isinstance(attributes, dict) else row
        groups = {}
        for given, value in fields.items():
            name = self.aliases.get(given, given)
            if name in self.groups:
                groups[name] = self._group(name, value)
        return known_groups(groups)

    def _group(self, name: str, value: Any) -> Any:
        names = self.groups[name]
        if isinstance(value, bool):
            raise UserError(f"{name!r} must be a name or a number, found {value}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value == -1:  # a missing ClassLabel
            return None
        if not names or not isinstance(value, int):
            return value
        if not 0 <= value < len(names):
            raise UserError(f"{name!r} must be a name or a number from 0 to {len(names) - 1}")
        return names[value]

    def _words(self, value: Any) -> list[str]:
        """Return the words for a value of a file."""
        items = self.listed(value)
        if not isinstance(items, list) or not all(map(self._is_class, items)):
            known = f"numbers from 0 to {len(self.words) - 1}"
            if self.named:
                known = "names of classes"
            expected = "a list of" if self.several else "one of the"
            raise UserError(f"{self.key!r} must be {expected} {known}")
        words = []
        for item in items:
            words.append(item if isinstance(item, str) else self.words[item])
        return self._ordered(words)

    def _ordered(self, words: Iterable[str]) -> list[str]:
        return sorted(set(words), key=self.words.index)

    def _is_class(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in self.words
        return not self.named and type(value) is int and 0 <= value < len(self.words)

    def prompt(self, example: Example) -> Messages:
        return render(self.name, example)

    def schema(self, _example: Example, _labels: Labels) -> Schema:
        word: Schema = {"enum": list(self.words)}
        words: Schema = {"type": "array", "items": word, "maxItems": len(self.words)}
        return closed_object({self.key: words if self.several else word})

    def decode(self, reply: str, _example: Example, labels: Labels) -> Decoded:
        words = self._words_in(reply)
        if words is None:
            guess = ((0, self.key),)
            return Decoded(self._fallback(labels), ("no class",), readable=False, guesses=guess)
        answer = {self.key: self.value(self._ordered(words))}
        if load_json(reply) == answer:
            return Decoded(answer)
        return Decoded(answer, ("not the JSON that was asked for",))

    def _words_in(self, reply: str) -> set[str] | None:
        """Return the classes of a reply; None if it has none, or several where one is asked for."""
        known = {normal(word): word for word in self.words}
        known |= {normal(synonym): word for synonym, word in self.synonyms.items()}
        found, is_whole = last_object(reply, [self.key])
        given = found.get(self.key)
        spelled = [snap(part, known) for part in strings_in(given)]
        words = set(filter(None, spelled))
        if self.several and is_whole and given == []:
            return words
        if not words or (len(words) > 1 and not self.several):
            return None
        return words

    def _fallback(self, labels: Labels) -> Answer:
        commonest = labels.commonest("label") or self.words[0]
        return {self.key: self.value([] if commonest == NONE else [commonest])}

    def labels(self, examples: Iterable[Example]) -> Labels:
        answers = [example.answer[self.key] for example in examples if example.answer]
        return collect({"label": self.listed(answer) or [NONE]} for answer in answers)

    def write(self, example: Example, answer: Answer) -> dict[str, Any]:
        """Return the submission row, with numbers or names as in the files."""
        words = self.listed(answer[self.key])
        items = words if self.named else [self.words.index(word) for word in words]
        return {"id": example.id, self.key: self.value(items)}

    def classes(self, row: Row) -> list[str]:
        """Return the words of a row's classes; `NONE` for an empty set."""
        return self._words(row[self.key]) or [NONE]

    def check(self, example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
        if row.keys() != {"id", self.key}:
            yield f"the fields must be id and {self.key}"
            return
        if row["id"] != example.id:
            yield f"the id is {row['id']!r}, the case has {example.id!r}"
        try:
            self._words(row[self.key])
        except UserError as error:
            yield str(error)

    def task(self) -> Task:
        names = self.words if self.named else ()
        sets = (self.key,) if self.several else ()
        return Task(
            Data(
                self.read,
                self.write,
                self.rows,
                check=self.check,
                fields=(self.text[0], self.key),
            ),
            Ask(self.prompt, self.schema, self.decode, labels=self.labels),
            Score(
                (accuracy, macro_f1(len(self.words), names, several=self.several)),
                fallback="commonest class",
                classes=self.classes,
                order={"class": (*self.words, NONE) if sets else tuple(self.words)},
                titles={
                    "accuracy": ("accuracy", "准确率"),
                    "macro_f1": ("macro F1", "宏平均 F1"),
                    "class": ("class", "类别"),
                    "commonest class": ("always the commonest class", "始终预测最常见的类别"),
                },
            ),
            AnswerFields(
                sets=sets,
                classes=() if sets else (self.key,),
                kinds={self.key: "label"},
                nothing=NONE,
                evidence=self.evidence,
            ),
        )


def macro_f1(classes: int, names: Sequence[str], *, several: bool) -> CorpusMetric:
    """Return macro F1 as scikit-learn has it: `f1_score(average="macro", zero_division=0)`.

    With one class per example it is over the classes that occur in gold or in predictions; with
    `several` it is over all of them, and an empty set is a class of its own, as in FairLex. If the
    rows have `names`, a class is the index of its name. Without a row no class is predicted.
    """
    width = classes + 1

    def counts(gold: Row, predicted: Row | None) -> Sequence[float]:
        in_gold = _indicators(gold, classes, names)
        in_reply = np.zeros(width)
        if predicted is not None:
            in_reply = _indicators(predicted, classes, names)
        result: list[float] = np.concatenate([in_gold * in_reply, in_gold, in_reply]).tolist()
        return result

    def value(sums: Numbers) -> Numbers:
        f1 = f1_by_class(sums)
        present = ~np.isnan(f1) | several
        scores: Numbers = np.nan_to_num(f1).sum(-1) / np.maximum(present.sum(-1), 1)
        return scores

    return CorpusMetric("macro_f1", 3 * width, counts, value)


def f1_by_class(sums: Numbers) -> Numbers:
    """Return F1, [..., classes + 1], from summed counts; NaN for a class that never occurs."""
    correct, gold, predicted = np.split(sums, 3, axis=-1)
    with np.errstate(invalid="ignore"):
        f1: Numbers = 2 * correct / (gold + predicted)
    return f1


def accuracy(gold: Row, predicted: Row | None) -> float:
    """Return 1 if exactly the gold classes are predicted, else 0."""
    return float(predicted is not None and classes_of(predicted) == classes_of(gold))


def classes_of(row: Row) -> set[int | str]:
    """Return the `label` or the `labels` of a row; TypeError: neither numbers nor names."""
    labels = row["labels"] if "labels" in row else [row["label"]]
    if not isinstance(labels, list) or not all(type(label) in (int, str) for label in labels):
        raise TypeError
    return set(labels)


def _indicators(row: Row, classes: int, names: Sequence[str]) -> Numbers:
    """Return 1 for every class of a row, else 0, [classes + 1]; the last is for an empty set."""
    indicators = np.zeros(classes + 1)
    known: Sequence[int | str] = names or range(classes)
    labels = classes_of(row)
    if not labels <= set(known):
        raise TypeError
    indicators[[known.index(label) for label in labels] or classes] = 1
    return indicators
