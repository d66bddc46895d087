"""Map the characters of a JSON reply to values: for probabilities by field."""

import re
from collections.abc import Iterator

TOKEN = re.compile(
    r'"(?:[^"\\]++|\\.)*+(?:"(?P<key>\s*+:)?|\\?\Z)|[\[\]{},]|[^\s\[\]{},:"]+', re.DOTALL
)
"""A string that is cut extends to the end of the reply. Otherwise the search would start again at
each quotation mark in it, in quadratic time."""

MAX_DEPTH = 64
"""Nesting depth at which the search for values stops; the tasks' replies are four levels deep."""

Path = tuple[str | int, ...]
"""Object keys and array indices from the root of a reply to a value."""


def value_spans(reply: str) -> Iterator[tuple[int, int, Path]]:
    """Yield (start, end, path) of every string, number and literal in the JSON text `reply`.

    Quotation marks belong to the value. A reply that is cut gives the values up to the cut.
    """
    path: list[str | int] = []
    for token in TOKEN.finditer(reply):
        text = token[0]
        if token["key"] and path:
            path[-1] = text[1 : text.rindex('"')]
        elif text in "[{":
            path.append(0 if text == "[" else "")
            if len(path) > MAX_DEPTH:
                return
        elif text in "]}":
            path = path[:-1]
        elif text == ",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
        else:
            yield token.start(), token.end(), tuple(path)
