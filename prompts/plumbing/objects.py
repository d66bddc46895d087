"""Find the JSON objects of a reply by their braces, each with the fields that are its own."""

import re
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from panjue.prompts.plumbing.decode import unquote

LEXEME = re.compile(
    r"(?P<remark>//[^\n{}]*+|/\*(?:[^*{}]++|\*(?!/))*+(?:\*/)?)"
    r'|(?P<string>"(?:[^"\\]++|\\.)*+(?:(?P<end>")(?P<key>\s*+[:：])?|\\?\Z))'
    r'|[\[\]{},，]|(?P<word>[^\s\[\]{},，:："]++)(?P<colon>\s*+[:：])?',
    re.DOTALL,
)
"""A remark has no braces: one without its end would hide where the next person begins. A string
that is cut extends to the end, so that the time stays linear in the length."""


MAX_DEPTH = 64
"""Nesting depth at which the search stops; the tasks' replies are four levels deep."""


class FoundField(NamedTuple):
    """A key, and its strings and bare words: a single one, or those of a list and its lists."""

    key: str
    values: list[str]


class Found(NamedTuple):
    """An object with its fields in order, without those of the objects in it that are others.

    An object without a name that is the value of a key has no place of its own: its fields are
    those of the object around it.
    """

    start: int
    names: set[str]
    fields: list[FoundField]
    is_closed: bool


@dataclass
class _Level:
    """An object or a list that is still open; a list has the fields of its object."""

    start: int
    is_object: bool
    is_value: bool  # of a key
    fields: list[FoundField]
    names: set[str] = field(default_factory=set)


class Scanner:
    """Finds the objects of a text.

    A string that follows one of the keys `name_keys` is a name. A bare word that is a key (matches
    `key`) means that a quotation mark is missing or too many: every open object ends there, and
    the search starts again at the next brace, which may be in what seemed to be a string.
    """

    def __init__(self, text: str, name_keys: Container[str], key: re.Pattern[str]) -> None:
        self._text = text
        self._name_keys = name_keys
        self._key = key
        self._levels: list[_Level] = []
        self._found: list[Found] = []
        self._read_twice = 0  # end of the text that no third reading is for: the time stays linear

    def objects(self) -> list[Found]:
        start = self._text.find("{")
        while start >= 0:
            end = self._read(start)
            while self._levels:
                self._close(is_closed=False)
            start = self._text.find("{", end)
        return sorted(self._found, key=lambda found: found.start)

    def _read(self, start: int) -> int:
        """Read the outermost object that starts here; return where the reading stopped."""
        key: str | None = ""  # of the value that may follow; None: a value has just ended
        string = start
        words: list[str] = []  # the values of which the last one is a bare word
        for token in LEXEME.finditer(self._text, start):
            if token["remark"]:
                continue
            if token["word"] and self._key.fullmatch(token["word"]):
                again = token.end() > self._read_twice
                self._read_twice = token.end()
                return string + 1 if again else token.end()
            if token["word"] and not token["colon"]:
                words = self._add_word(token["word"], words, key)
                key = None
                continue
            words = []
            if token["key"] or token["colon"]:
                key = self._add_key(token)
                continue
            if token["end"]:
                self._add_string(token[0], key)
                string = token.start()
            elif token["string"]:
                return len(self._text)  # cut
            elif token[0] in "[{":
                if len(self._levels) == MAX_DEPTH:
                    return token.end()
                self._open(token.start(), key, is_object=token[0] == "{")
            elif token[0] in "]}":
                self._end(is_object=token[0] == "}")
                if not self._levels:
                    return token.end()
            key = "" if token[0] in "[{,，" else None
        del words[-1:]  # the text ends here: the 12 may be 120, the 3 may be 3个月
        return len(self._text)

    def _add_key(self, token: re.Match[str]) -> str:
        self._end_lists()  # a list has no keys: its bracket is missing
        string = token["string"]
        key: str = _value(string[: string.rindex('"') + 1]) if string else token["word"]
        self._levels[-1].fields.append(FoundField(key, []))
        return key

    def _add_string(self, string: str, key: str | None) -> None:
        value = _value(string)
        self._values(key).append(value)
        if key in self._name_keys:
            self._levels[-1].names.add(value)

    def _add_word(self, word: str, words: list[str], key: str | None) -> list[str]:
        """Add a bare word; return the values that it is in.

        Words without a comma between them are one value, which is no label: the first one and a
        bar. After another value they are a remark.
        """
        if words:
            words[-1] += "|" * (not words[-1].endswith("|"))
        elif key is not None or not self._levels[-1].is_object:
            words = self._values(key)
            words.append(word)
        return words

    def _open(self, start: int, key: str | None, *, is_object: bool) -> None:
        fields: list[FoundField] = []
        if not is_object:
            self._values(key)
            fields = self._levels[-1].fields
        self._levels.append(_Level(start, is_object, bool(key), fields))

    def _values(self, key: str | None) -> list[str]:
        """Return the values that a new one belongs to: those of its key or of its list.

        One that stands where a key should be is another value of the key before.
        """
        level = self._levels[-1]
        if not level.fields:
            return []
        if level.is_object and not key:
            level.fields.append(FoundField(level.fields[-1].key, []))
        return level.fields[-1].values

    def _end(self, *, is_object: bool) -> None:
        """Close the innermost object with the lists in it; or a list, if that is innermost."""
        if is_object:
            self._end_lists()
        if self._levels[-1].is_object == is_object:
            self._close(is_closed=True)

    def _end_lists(self) -> None:
        while not self._levels[-1].is_object:
            self._close(is_closed=True)

    def _close(self, *, is_closed: bool) -> None:
        level = self._levels.pop()
        if not level.is_object:
            return
        if level.is_value and self._levels and not level.names:
            self._levels[-1].fields += level.fields
        else:
            self._found.append(Found(level.start, level.names, level.fields, is_closed))


def _value(string: str) -> str:
    return unquote(string) if "\\" in string else string[1:-1]
