"""Tools to read replies that are nearly right. All total, all linear in the reply.

Not json-repair (0.64 was tried): it takes the square of a reply's length where lists are torn again
and again (56,000 characters, 18 s), and reads the 1 of a 12 that was cut as a 1: life imprisonment.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

STRING = r'"(?:[^"\\]++|\\.)*+"'
QUOTES = str.maketrans("“”„‟＂", '"""""')
THINKING = re.compile(r"^.*?</think>", re.DOTALL)


def load_json(reply: str) -> Any:
    """Return `reply` read as JSON, or None where it is none."""
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        return None


def named_objects(text: str, keys: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, object) of every object with one of `keys` in the first JSON of `text`.

    The order is that of the text. Empty where the text opens no JSON that closes again.
    """
    start = min((i for i in (text.find("{"), text.find("[")) if i >= 0), default=-1)
    try:
        value = json.JSONDecoder().raw_decode(text, start)[0] if start >= 0 else None
    except (ValueError, RecursionError):
        return []
    found, waiting = [], [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            name = next((item[key] for key in keys if isinstance(item.get(key), str)), None)
            found += [(name, item)] if name is not None else []
            waiting += reversed(item.values())
        elif isinstance(item, list):
            waiting += reversed(item)
    return found


def flatten_forms(text: str) -> str:
    """Bring full-width digits, letters and brackets to their plain forms.

    Curly quotes too, where no plain one is there: beside plain ones they belong to the text.
    """
    plain = text if '"' in text else text.translate(QUOTES)
    return unicodedata.normalize("NFKC", plain)


def after_thinking(reply: str) -> str:
    """Drop a leading think block; of one that was cut nothing is left."""
    if "</think>" in reply:
        return THINKING.sub("", reply, count=1)
    return "" if reply.lstrip().startswith("<think>") else reply


def field_text(segment: str, keys: str) -> str | None:
    """Return what stands behind the first of the keys (`a|b`): a string, a list or a number.

    A list that was cut off counts as far as it goes; a number that was (1 of 12?) does not.
    """
    value = rf"\[(?:[^\]\"]++|{STRING})*+|{STRING}|-?\d++(?:\.0++)?+(?=\s*+[,}}\]])"
    found = re.search(rf'"(?:{keys})"\s*+:\s*+({value})', segment)
    return found[1] if found else None


def strings_in(text: str) -> list[str]:
    """Return the strings and bare numbers of a JSON-like list, unescaped."""
    return [unquote(part) for part in re.findall(rf"{STRING}|\d[\d.\-]*+", text)]


def unquote(text: str) -> str:
    """Return the value of a JSON string, or `text` itself where it is none."""
    value = load_json(text)
    return value if isinstance(value, str) else text.strip('"')


PUNCTUATION = re.compile(r"[\s、，,；;：:。·“”\"'()（）《》<>]+")
"""What two spellings of one label may differ in. Not the `.` and `-` of article numbers."""


def normal(label: str) -> str:
    """Return the form under which the spellings of a charge, an article or a class meet.

    In plain forms and lower case, without white space, punctuation and a last 罪.
    """
    return PUNCTUATION.sub("", flatten_forms(label)).lower().removesuffix("罪")


def snap(label: str, known: Mapping[str, str]) -> str | None:
    """Return the label of which `label` is another spelling, or None.

    Never the nearest: 行贿 is near 受贿, and Article 13 near Article 3.

    Args:
        label: What the model wrote.
        known: `normal(label)` -> label, for every known label.
    """
    return label if label in known.values() else known.get(normal(label))
