"""Tasks whose answer is one class, or a set of classes, of a closed list."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from panjue.prompts.decode import after_thinking, field_text, load_json, normal, snap, strings_in
from panjue.prompts.errors import UserError
from panjue.prompts.files import dump
from panjue.prompts.labels import Labels, collect
from panjue.prompts.render import render
from panjue.prompts.task import (
    NOBODY_KNOWS,
    Answer,
    Decoded,
    Example,
    Messages,
    Row,
    Schema,
    Task,
)


@dataclass(frozen=True)
class Classes:
    """A closed list of classes, in the words of a reply and in the numbers of the files.

    Attributes:
        name: The task.
        words: The classes as the model writes them; a class is its place here in the files.
        several: Whether an answer is a set of them, which may be empty.
        text: The field with the text.
        groups: Fields to report by -> for numbers, the names that they stand for.
    """

    name: str
    words: Sequence[str]
    several: bool = False
    text: str = "text"
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the field with the answer."""
        return "labels" if self.several else "label"

    def from_row(self, row: Mapping[str, Any]) -> Example:
        """Read one line.

        Raises:
            UserError: A field is missing or of the wrong type.
        """
        if not isinstance(row.get("id"), int | str) or isinstance(row["id"], bool):
            raise UserError("'id' must be a number or a string")
        if not isinstance(row.get(self.text), str) or not row[self.text].strip():
            raise UserError(f"{self.text!r} must be a text that is not empty")
        groups = {name: self._group(name, row[name]) for name in self.groups if name in row}
        return Example(
            id=row["id"],
            text=row[self.text],
            answer={self.key: self._words(row[self.key])} if self.key in row else None,
            groups={name: group for name, group in groups.items() if group},
        )

    def _group(self, name: str, value: Any) -> str:
        names = self.groups[name]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
            value = names[value]
        return "" if value in NOBODY_KNOWS else str(value)

    def _words(self, value: Any) -> list[str] | str:
        numbers = value if self.several else [value]
        known = range(len(self.words))
        if not isinstance(numbers, list) or not all(
            type(number) is int and number in known for number in numbers
        ):
            what = "a list of numbers" if self.several else "a number"
            raise UserError(f"{self.key!r} must be {what} from 0 to {len(self.words) - 1}")
        words = [self.words[number] for number in sorted(set(numbers))]
        return words if self.several else words[0]

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

    def target(self, example: Example) -> str:
        """Return the gold reply."""
        assert example.answer is not None, "a test case has no target"
        return dump(example.answer)

    def decode(self, reply: str, _example: Example, labels: Labels) -> Decoded:
        """Read a reply as one class, or a set of classes, whatever it is."""
        found = load_json(reply)
        if isinstance(found, dict) and list(found) == [self.key] and self._is_answer(found):
            return Decoded({self.key: found[self.key]})
        known = {normal(word): word for word in self.words}
        text = field_text(after_thinking(reply), "labels?|answer|答案")
        written = re.split(r"[,，、;；\n]", reply[:1024]) if text is None else strings_in(text)
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
        return {self.key: [commonest] if self.several else commonest}

    def labels(self, examples: Iterable[Example]) -> Labels:
        """Count the classes of the training answers."""
        answers = [example.answer[self.key] for example in examples if example.answer]
        return collect({"label": answer if self.several else [answer]} for answer in answers)

    def submission(self, example: Example, answer: Answer) -> dict[str, Any]:
        """Return the hand-in row, which has numbers as the files have."""
        value = answer[self.key]
        numbers = [self.words.index(word) for word in (value if self.several else [value])]
        return {"id": example.id, self.key: numbers if self.several else numbers[0]}

    def classes(self, row: Row) -> list[str]:
        """Return the words of a row's classes."""
        numbers = row[self.key] if self.several else [row[self.key]]
        return [self.words[number] for number in numbers]

    def faults(self, example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
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

    def task(self, **settings: Any) -> Task:
        """Return the task."""
        return Task(
            from_row=self.from_row,
            prompt=self.prompt,
            schema=self.schema,
            target=self.target,
            decode=self.decode,
            submission=self.submission,
            labels=self.labels,
            faults=self.faults,
            classes=self.classes,
            fallback="commonest class",
            metrics=(f"{self.name}.accuracy", f"{self.name}.macro_f1"),
            **settings,
        )
