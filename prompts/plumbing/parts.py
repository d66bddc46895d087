"""Which characters of a JSON reply belong to which value: for losses and probabilities by field."""

import re
from collections.abc import Iterator, Sequence

SYNTAX = "syntax"
"""The part of everything that is no value: braces, keys, commas, the end token."""

TOKEN = re.compile(
    r'"(?:[^"\\]++|\\.)*+(?:"(?P<key>\s*+:)?|\\?\Z)|[\[\]{},]|[^\s\[\]{},:"]+', re.DOTALL
)
"""A string that is cut reaches to the end: looked for anew at every quotation mark in it, its end
would take the square of its length."""

DEEPEST = 64
"""Where values of a reply that nests deeper are no longer looked for; tasks nest four deep."""

Path = tuple[str | int, ...]
"""Object keys and array indices from the top of a reply down to a value."""


def value_spans(reply: str) -> Iterator[tuple[int, int, Path]]:
    """Yield (start, end, path) of every string, number and literal in the JSON text `reply`.

    Quotation marks belong to the value. A reply that is cut gives what is there.
    """
    path: list[str | int] = []
    for token in TOKEN.finditer(reply):
        text = token[0]
        if token["key"] and path:
            path[-1] = text[1 : text.rindex('"')]
        elif text in "[{":
            path.append(0 if text == "[" else "")
            if len(path) > DEEPEST:
                return
        elif text in "]}":
            path = path[:-1]
        elif text == ",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
        else:
            yield token.start(), token.end(), tuple(path)


def field_of(path: Path) -> str:
    """Return the nearest object key above a value: `charges` for a label in `"charges": […]`."""
    return next((key for key in reversed(path) if isinstance(key, str)), SYNTAX)


def part_of_tokens(reply: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Return the field of every token, given each token's character span in `reply`.

    A token that covers characters of a value and of what is around it counts for the value: BPE
    joins a closing quotation mark with the bracket behind it.
    """
    owner = [SYNTAX] * len(reply)
    for start, end, path in value_spans(reply):
        owner[start:end] = [field_of(path)] * (end - start)
    return [
        next((part for part in owner[start:end] if part != SYNTAX), SYNTAX)
        for start, end in offsets
    ]
