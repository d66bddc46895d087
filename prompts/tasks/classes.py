"""Tasks whose answer is one class, or a set of classes, of a closed list."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from panjue.prompts.example import Answer, Decoded, Example, LabelFields, known_groups
from panjue.prompts.labels import Labels, normal, snap
from panjue.prompts.plumbing.decode import last_object, load_json, strings_in, visible
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import quoted
from panjue.prompts.render import render
from panjue.prompts.task import Ask, Data, Schema, Score, Task, closed_object, id_of, text_of
from panjue.prompts.tasks.metrics import CorpusMetric, Numbers, Row

NONE = "none"
"""The name of an empty set of classes in counts and reports."""


@dataclass(frozen=True)
class Classes:
    """A closed list of classes: words in answers and replies, numbers or words in the files."""

    name: str  # name of the task
    words: Sequence[str]  # the classes as the model writes them; files have their positions
    several: bool = False  # an answer is a set of classes, which may be empty
    named: bool = False  # whether files have the words instead of their positions
    numbers: Sequence[str] = ()
    """With `named`: the classes of 0, 1, … in files that have numbers nevertheless."""
    text: str = "text"  # field with the text; FairLex's own files have `text`
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Fields by which scores are reported -> names of their numbers; empty if they have names."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of such a field in files -> its name here."""
    person: str = ""  # field with the name of the person concerned; `{person}` in the template
    synonyms: Mapping[str, str] = field(default_factory=dict)  # another word in a reply -> class
    evidence: Callable[[str], Sequence[float]] | None = None  # for the text classifier

    @property
    def key(self) -> str:
        return "labels" if self.several else "label"

    def read(self, row: Mapping[str, Any]) -> Example:
        """Read a case: its id, text and classes, the person's name and the groups."""
        key = id_of(row)
        is_of_fairlex = self.text not in row and "text" in row  # its files name the field `text`
        text = text_of(row, "text" if is_of_fairlex else self.text)
        written_name = (row.get(self.person) or "") if self.person else ""
        if not isinstance(written_name, str):
            raise UserError(f"{self.person!r} must be a name")
        person = visible(written_name)
        has_answer = row.get(self.key) not in (None, -1)  # -1: a missing ClassLabel of `datasets`
        return Example(
            id=key,
            text=text,
            names=(person,) if person else (),
            inputs={"person": person},
            answer=self._answer(self._gold_words(row)) if has_answer else None,
            groups=self._groups(row),
        )

    def _gold_words(self, row: Mapping[str, Any]) -> list[str]:
        """Return the classes of a case; hint at files with words in place of numbers."""
        try:
            return self._words(row)
        except UserError as error:
            value = row[self.key]
            items = value if isinstance(value, list) else [value]
            if self.named or not any(item in self.words for item in items):
                raise
            raise UserError(f"{error}; Classes(…, named=True) reads words") from None

    def _groups(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the known groups, from fields of the row or else of its `attributes`."""
        attributes = row.get("attributes")
        fields = {**attributes, **row} if isinstance(attributes, dict) else row
        values = {self.aliases.get(name, name): value for name, value in fields.items()}
        groups = {}
        for name, names in self.groups.items():
            if name in values:
                groups[name] = _group(name, names, values[name])
        return known_groups(groups)

    def _words(self, row: Row) -> list[str]:
        """Return the classes in a row of cases or of a submission, in the order of `words`.

        Files have words if `named`, or else their positions: `{"label": 1}` -> the second word.
        """
        value = row[self.key]
        items = value if self.several else [value]
        known: Sequence[int | str] = self.words if self.named else range(len(self.words))
        if isinstance(items, list):
            items = [self._plain(item) for item in items]
        are_known = isinstance(items, list) and all(
            type(item) in (int, str) and item in known  # True and 1.0 are not class 1
            for item in items
        )
        if not are_known:
            expected = "a list of" if self.several else "one of"
            choice = ", ".join(map(str, known))
            raise UserError(f"{self.key!r} must be {expected} {choice}; found {quoted(value)}")
        places = {known.index(item) for item in items}
        return [self.words[place] for place in sorted(places)]

    def _plain(self, item: Any) -> Any:
        """Return a class of a file in plain form; other values stay.

        A word loses its invisible characters. A number becomes the word that `numbers` has at this
        position, if it has one.
        """
        if isinstance(item, str):
            return visible(item)
        is_number = type(item) is int and 0 <= item < len(self.numbers)
        return self.numbers[item] if is_number else item

    def _answer(self, words: Iterable[str]) -> Answer:
        """Return the answer of these classes: `{"label": "a"}`, or `{"labels": ["a", "b"]}`."""
        ordered = sorted(words, key=self.words.index)
        return {self.key: ordered if self.several else ordered[0]}

    def schema(self, _example: Example, _labels: Labels) -> Schema:
        """Return the JSON Schema of a reply: an answer with known classes."""
        word: Schema = {"enum": list(self.words)}
        if not self.several:
            return closed_object({self.key: word})
        words = {"type": "array", "items": word, "maxItems": len(self.words)}
        return closed_object({self.key: words})

    def decode(self, reply: str, _example: Example, labels: Labels) -> Decoded:
        """Read the classes of a reply; if it has none, the commonest class of the training counts.

        `Labels` counts the classes as `label`, whatever the key, and an empty set as `NONE`.
        """
        words = self._words_in(reply)
        if words is None:
            commonest = labels.commonest("label") or self.words[0]
            fallback = self._answer([commonest] if commonest != NONE else [])
            filled = ((0, self.key),)  # the only item, and its field
            return Decoded(fallback, ("no class",), readable=False, from_fallback=filled)
        answer = self._answer(words)
        if load_json(reply) == answer:
            return Decoded(answer)
        return Decoded(answer, ("not the JSON that was asked for",))

    def _words_in(self, reply: str) -> set[str] | None:
        """Return the classes in a reply; None if it has none, or several if one is asked for."""
        by_spelling = {normal(word): word for word in self.words}
        for synonym, word in self.synonyms.items():
            by_spelling[normal(synonym)] = word
        found, is_whole = last_object(reply, [self.key])
        given = found.get(self.key)
        if self.several and is_whole and given == []:  # a list that was cut may have had more
            return set()
        spelled = [snap(text, by_spelling) for text in strings_in(given)]
        words = set(filter(None, spelled))
        is_clear = len(words) == 1 or (self.several and words)
        return words if is_clear else None

    def write(self, example: Example, answer: Answer) -> dict[str, Any]:
        """Return the submission row, with numbers or names as in the files."""
        words = answer[self.key] if self.several else [answer[self.key]]
        items = [word if self.named else self.words.index(word) for word in words]
        return {"id": example.id, self.key: items if self.several else items[0]}

    def check(self, example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
        """Yield the faults of a submission row in its fields, id and classes."""
        if row.keys() != {"id", self.key}:
            yield f"the fields must be id and {self.key}"
            return
        if row["id"] != example.id:
            yield f"the id is {row['id']!r}, the case has {example.id!r}"
        try:
            self._words(row)
        except UserError as error:
            yield str(error)

    def classes(self, row: Row) -> list[str]:
        """Return the words of a row's classes; `NONE` for an empty set."""
        return self._words(row) or [NONE]

    def accuracy(self, gold: Row, predicted: Row | None) -> float:
        """Return 1 if exactly the gold classes are predicted, else 0."""
        return float(predicted is not None and self._words(predicted) == self._words(gold))

    def _counts(self, gold: Row, predicted: Row | None) -> Sequence[float]:
        """Return 1 or 0 for each class and `NONE`: correct, gold, predicted; 3 * [classes + 1]."""
        in_gold = self._indicators(gold)
        in_reply = self._indicators(predicted)
        counts: list[float] = np.concatenate([in_gold * in_reply, in_gold, in_reply]).tolist()
        return counts

    def _indicators(self, row: Row | None) -> Numbers:
        """Return 1 for every class in a row, else 0, [classes + 1]; the last is the empty set."""
        classes = self.classes(row) if row is not None else []
        return np.array([float(word in classes) for word in (*self.words, NONE)])

    def _macro_f1(self, sums: Numbers) -> Numbers:
        """Return macro F1 as FairLex computes it, from sums of `_counts`.

        With one class for each example, it is the mean over the classes that occur in gold. A group
        is scored by the classes in its own gold. With `several`, it is the mean over all classes,
        even if they never occur, and the empty set.
        """
        correct, gold, predicted = np.split(sums, 3, axis=-1)  # each of shape [..., classes + 1]
        f1 = 2 * correct / np.maximum(gold + predicted, 1)
        is_averaged = (gold > 0) | self.several
        scores: Numbers = (f1 * is_averaged).sum(-1) / np.maximum(is_averaged.sum(-1), 1)
        return scores

    def task(self) -> Task:
        """Return the task whose answers are these classes."""
        width = 3 * (len(self.words) + 1)  # of `_counts`
        order = (*self.words, NONE) if self.several else tuple(self.words)
        return Task(
            # Rows are numbered, since FairLex's have no ids.
            Data(self.read, self.write, numbered=True, check=self.check),
            Ask(partial(render, self.name), self.schema, self.decode),
            Score(
                (self.accuracy, CorpusMetric("macro_f1", width, self._counts, self._macro_f1)),
                fallback="commonest class",
                classes=self.classes,
                order={"class": order},
                titles={
                    "accuracy": ("accuracy", "准确率"),
                    "macro_f1": ("macro F1", "宏平均 F1"),
                    "class": ("class", "类别"),
                    "commonest class": ("always the commonest class", "始终预测最常见的类别"),
                },
            ),
            LabelFields(
                sets=(self.key,) if self.several else (),
                classes=() if self.several else (self.key,),
                order={self.key: tuple(self.words)},
                kinds={self.key: "label"},
                nothing=NONE,
                evidence=self.evidence,
            ),
        )


def _group(name: str, names: Sequence[str], value: Any) -> Any:
    """Return the group of a value; a number is looked up in `names`, if there are any.

    Return None for -1, a missing ClassLabel. Other values stay; `known_groups` checks them.
    """
    if isinstance(value, bool):
        raise UserError(f"{name!r} must be a name or a number, found {value}")
    if isinstance(value, float) and value.is_integer():  # pandas makes 0.0 of an int column
        value = int(value)
    if value == -1:
        return None
    if not isinstance(value, int) or not names:
        return value
    if not 0 <= value < len(names):
        raise UserError(f"{name!r} must be a name or a number from 0 to {len(names) - 1}")
    return names[value]
