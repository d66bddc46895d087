"""Find the JSON objects of a reply by their braces, each with the text that is its own."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from panjue.prompts.plumbing.decode import unquote
from panjue.prompts.plumbing.files import dump

TOKEN = re.compile(
    r"(?P<remark>//[^\n{}]*+|/\*(?:[^*{}]++|\*(?!/))*+(?:\*/)?)"
    r'|(?P<string>"(?:[^"\\]++|\\.)*+(?:(?P<end>")(?P<key>\s*+:)?|\\?\Z))'
    r'|[\[\]{},]|[^\s\[\]{},:"]++',
    re.DOTALL,
)
"""A remark has no braces: one without its end would hide where the next person begins. A string
that is cut extends to the end, so that the time stays linear in the length."""


MAX_DEPTH = 64
"""Nesting depth at which the search stops; the tasks' replies are four levels deep."""


class Named(NamedTuple):
    """An object with names, and its text without remarks and without other named objects."""

    start: int
    names: set[str]
    text: str


@dataclass
class _Level:
    """An object or a list that is still open."""

    start: int
    is_object: bool
    is_value: bool  # of a key
    names: set[str] = field(default_factory=set)
    parts: list[str] = field(default_factory=list)


class Scanner:
    """Finds the named objects of a text.

    A string that follows one of the keys `name_keys` is a name. A bare word that is a key (matches
    `key`) means that a quotation mark is missing or too many: every open object ends there, and
    the search starts again at the next brace, which may be in what seemed to be a string.
    """

    def __init__(self, text: str, name_keys: frozenset[str], key: re.Pattern[str]) -> None:
        """Start at the beginning of `text`."""
        self._text, self._name_keys, self._key = text, name_keys, key
        self._levels: list[_Level] = []
        self._found: list[Named] = []
        self._read_twice = 0  # end of the text that no third reading is for: the time stays linear

    def objects(self) -> list[Named]:
        """Return the named objects in the order of the text."""
        end = 0
        while (start := self._text.find("{", end)) >= 0:
            end = self._read(start)
            while self._levels:
                self._close(is_cut=True)
        return sorted(self._found, key=lambda found: found.start)

    def _read(self, start: int) -> int:
        """Read the outermost object that starts here; return where the reading stopped."""
        after = ""  # the key before the token
        string = start
        for token in TOKEN.finditer(self._text, start):
            word, is_value = token[0], bool(after)
            if token["remark"]:
                continue
            if word in "[{":
                if len(self._levels) == MAX_DEPTH:
                    return token.end()
                self._levels.append(_Level(token.start(), word == "{", is_value))
            elif token["key"]:
                after = self._add_key(word)
                continue
            elif token["end"]:
                self._add_string(word, is_name=after in self._name_keys)
                string = token.start()
            elif token["string"]:
                return len(self._text)  # cut
            elif word in "]}":
                self._end(is_object=word == "}")
                if not self._levels:
                    return token.end()
            elif self._key.fullmatch(word):
                again = token.end() > self._read_twice
                self._read_twice = token.end()
                return string + 1 if again else token.end()
            elif word == "," or token.end() < len(self._text):  # else a number that may be cut
                self._levels[-1].parts.append(word)
            after = ""
        return len(self._text)

    def _add_key(self, word: str) -> str:
        self._end_lists()  # a list has no keys: its bracket is missing
        key = _value(word[: word.rindex('"') + 1])
        self._levels[-1].parts.append(f"{dump(key)}:")
        return key

    def _add_string(self, word: str, *, is_name: bool) -> None:
        value = _value(word)
        self._levels[-1].parts.append(dump(value))
        if is_name:
            self._levels[-1].names.add(value)

    def _end(self, *, is_object: bool) -> None:
        """Close the innermost object with the lists in it; or a list, if that is innermost."""
        if is_object:
            self._end_lists()
        if self._levels[-1].is_object == is_object:
            self._close(is_cut=False)

    def _end_lists(self) -> None:
        while not self._levels[-1].is_object:
            self._close(is_cut=False)

    def _close(self, *, is_cut: bool) -> None:
        """Close the innermost level.

        An object without a name belongs to the object of which it is a value; in a list, to nobody.
        """
        level = self._levels.pop()
        parts = ["{", *level.parts, "}"] if level.is_object else ["[", *level.parts, "]"]
        if level.names:
            self._found.append(Named(level.start, level.names, " ".join(parts)))
        elif self._levels and (not level.is_object or level.is_value):
            self._levels[-1].parts += parts[: -1 if is_cut else None]


def _value(string: str) -> str:
    return unquote(string) if "\\" in string else string[1:-1]
