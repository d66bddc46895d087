"""Functions that read nearly correct replies. All are total, and linear in the reply's length.

Not json-repair (0.64 was tried): it is quadratic on replies with many unclosed lists (56,000
characters, 18 s), and it reads a 12 that was cut after its first digit as 1: life imprisonment.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

STRING = r'"(?:[^"\\]++|\\.)*+"'
QUOTES = str.maketrans("“”„‟＂", '"""""')


def load_json(reply: str) -> Any:
    """Return the value of `reply` as JSON; None if it is not valid, or an object repeats a key."""
    try:
        return json.loads(reply, object_pairs_hook=each_key_once)
    except (ValueError, RecursionError):
        return None


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; ValueError: a key is given twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is given twice")
    return value


INVISIBLE = re.compile(r"[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]+")


def visible(text: str) -> str:
    """Return a text without its invisible characters: zero-width ones, marks, soft hyphens."""
    return INVISIBLE.sub("", text)


def flatten_forms(text: str) -> str:
    """Convert full-width digits, letters and brackets to their plain forms; drop the invisible.

    Curly quotes too, if there are no plain ones: next to plain quotes they are part of the text.
    """
    plain = text if '"' in text else text.translate(QUOTES)
    return unicodedata.normalize("NFKC", visible(plain))


BLOCK = re.compile(
    r"(?P<open><\|?|\[|◁)(?:(?P<end>/|end_)|start_)?"
    r"(?P<name>(?:\w{1,20}:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection))"
    r"(?:\|?>|\]|▷)"
    r"|<\|channel\|>\s?(?:(?P<final>final)|[a-z]+)\b[^{}\n]{0,60}?<\|message\|>"
    r"|(?P<plain>assistantfinal(?=\s*+[{\[`]))",
    re.IGNORECASE,
)
"""The start or the end of a think block: `<think>`, `[/THINK]`, `◁think▷`, `<seed:think>`,
`<|END_THINKING|>`; of gpt-oss each channel, of which `final` is the answer, written
`assistantfinal` where special tokens are left out."""


def after_thinking(reply: str) -> str:
    """Drop all think blocks. One without its end extends to the end of the reply.

    An end without a start closes a block that the prompt has begun.
    """
    kept: list[str] = []
    begin = 0
    opened = None
    for tag in BLOCK.finditer(reply):
        kind = (tag["open"], (tag["name"] or "").lower())
        is_end = bool(tag["end"] or tag["final"] or tag["plain"])
        if opened and (opened != kind or not is_end):
            continue
        if is_end and not opened:
            kept.clear()
        elif not is_end:
            kept.append(reply[begin : tag.start()])
        begin = tag.end()
        opened = None if is_end else kind
    if not opened:
        kept.append(reply[begin:])
    return "".join(kept)


PIECE = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}]', re.DOTALL)


def closed_objects(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of the JSON objects that are closed and in no other closed one."""
    starts: list[int] = []
    found: list[tuple[int, int]] = []
    end = text.find("{")  # quotation marks outside are no strings
    while end >= 0:
        piece = PIECE.search(text, end)
        if piece is None:
            break
        end = piece.end()
        if piece[0] == "{":
            starts.append(piece.start())
        elif piece[0] == "}":
            start = starts.pop()
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, end))
        if not starts:
            end = text.find("{", end)
    return found


def field_text(segment: str, keys: str) -> str | None:
    """Return the text of the first value after one of the keys (`a|b`): string, list or number.

    Of a list that was cut off the existing part counts; a number that may be cut does not.
    """
    value = rf"\[(?:[^\]\"]++|{STRING})*+|{STRING}|-?\d++(?:\.0++)?+(?=\s*+[,}}\]])"
    found = re.search(rf'"(?:{keys})"\s*+:\s*+({value})', segment)
    return found[1] if found else None


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
