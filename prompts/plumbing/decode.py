"""Functions that read nearly correct replies. All are total, and linear in the reply's length.

Not json-repair (0.64 was tried): it is quadratic on replies with many unclosed lists (56,000
characters, 18 s), and it reads a 12 that was cut after its first digit as 1: life imprisonment.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

STRING = r'"(?:[^"\\]++|\\.)*+"'
QUOTES = str.maketrans("“”„‟＂", '"""""')
THINKING = re.compile(r"^.*?</think>", re.DOTALL)


def load_json(reply: str) -> Any:
    """Return the value of `reply` as JSON; None if it is not valid, or an object repeats a key."""
    try:
        return json.loads(reply, object_pairs_hook=_without_repeated_keys)
    except (ValueError, RecursionError):
        return None


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is repeated")
    return value


def flatten_forms(text: str) -> str:
    """Convert full-width digits, letters and brackets to their plain forms.

    Curly quotes too, if there are no plain ones: next to plain quotes they are part of the text.
    """
    plain = text if '"' in text else text.translate(QUOTES)
    return unicodedata.normalize("NFKC", plain)


def after_thinking(reply: str) -> str:
    """Drop a leading think block; nothing remains if the block is not closed."""
    if "</think>" in reply:
        return THINKING.sub("", reply, count=1)
    return "" if reply.lstrip().startswith("<think>") else reply


def field_text(segment: str, keys: str) -> str | None:
    """Return the first of `field_texts`, or None."""
    return next(iter(field_texts(segment, keys)), None)


def field_texts(segment: str, keys: str) -> list[str]:
    """Return the texts of the values after one of the keys (`a|b`): strings, lists or numbers.

    Of a list that was cut off the existing part counts; a number that may be cut does not.
    """
    value = rf"\[(?:[^\]\"]++|{STRING})*+|{STRING}|-?\d++(?:\.0++)?+(?=\s*+[,}}\]])"
    return re.findall(rf'"(?:{keys})"\s*+:\s*+({value})', segment)


def strings_in(text: str) -> list[str]:
    """Return the strings and bare numbers of a JSON-like list, unescaped."""
    return [unquote(part) for part in re.findall(rf"{STRING}|\d[\d.\-]*+", text)]


def unquote(text: str) -> str:
    """Return the value of a JSON string; of any other text, the text without outer quotes."""
    value = load_json(text)
    return value if isinstance(value, str) else text.strip('"')


PUNCTUATION = re.compile(r"[\s、，,；;：:。·“”\"'()（）《》<>]+")
"""Characters that two spellings of a label may differ in; not the `.` and `-` of articles."""


def normal(label: str) -> str:
    """Return the normal form of a charge, an article or a class, equal for all its spellings.

    It has plain characters, lower case, no white space, no punctuation and no final 罪.
    """
    return PUNCTUATION.sub("", flatten_forms(label)).lower().removesuffix("罪")


def snap(label: str, known: Mapping[str, str]) -> str | None:
    """Return the known label of which `label` is a spelling, or None.

    Similar labels do not match: 行贿 is similar to 受贿, and Article 13 to Article 3.

    `known` has `normal(label)` -> label.
    """
    return label if label in known.values() else known.get(normal(label))
