"""Which characters of a JSON reply belong to which field: for losses and probabilities by part."""

import re
from collections.abc import Iterator, Sequence

SYNTAX = "syntax"
"""The part of everything that is no value: braces, keys, commas, the end token."""

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(?P<key>\s*:)?|[\[{]|[\]}]|[^\s\[\]{},:"]+')


def value_spans(reply: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, field) of every string, number and literal in the JSON text `reply`.

    The field is the nearest object key above the value: the strings of `"charges": ["盗窃罪"]` are
    of `charges`. Quotation marks belong to the value. A reply that is cut gives what is there.
    """
    above: list[str] = []
    field = SYNTAX
    for token in TOKEN.finditer(reply):
        text = token[0]
        if token["key"]:
            field = text[1 : text.rindex('"')]
        elif text in "[{":
            above.append(field)
        elif text in "]}":
            field = above.pop() if above else SYNTAX
        else:
            yield token.start(), token.end(), field


def part_of_tokens(reply: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Return the part of every token, given each token's character span in `reply`.

    A token that covers characters of two parts counts for the value among them: BPE joins a
    closing quotation mark with the bracket behind it.
    """
    owner = [SYNTAX] * len(reply)
    for start, end, field in value_spans(reply):
        owner[start:end] = [field] * (end - start)
    return [
        next((part for part in owner[start:end] if part != SYNTAX), SYNTAX)
        for start, end in offsets
    ]
