"""The model's own log-probability of each answer in a reply, summed over its tokens.

Under a schema, vLLM's processed log-probabilities come after the mask of the grammar: what the
schema forces has probability 1 and adds nothing, so the sums are over what the model decided.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from panjue.prompts.example import LabelFields
from panjue.prompts.plumbing.decode import load_json

FieldLogprobs = list[dict[str, list[float]]]
"""For each item: field -> the log-probabilities of its labels in order, or of its class."""

DIGITS = 4
"""Significant digits that a row keeps. With as many after the point, 0.99996 would be certain."""

PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]|[^\s"\[\]{},:]+', re.DOTALL)
"""Pattern of the strings, brackets, commas and other values of JSON."""


class Token(NamedTuple):
    """A token of a reply. `text` is empty if it has only a part of a character."""

    text: str
    logprob: float


class Part(NamedTuple):
    """A value or key of JSON: its keys and positions from the outside in, and where it stands.

    A key has no path.
    """

    path: tuple[str | int, ...] | None
    start: int  # its first character
    end: int  # its last character


def field_logprobs(
    reply: str, tokens: Sequence[Token], fields: LabelFields
) -> FieldLogprobs | None:
    """Return the log-probability of each label and class of a reply.

    The numbers of a field add up to the log-probability of its whole value. A label's tokens are
    those from its first character up to the next string: the last one says whether the list goes
    on. A token that is part of two labels counts for the one that it begins in; a token with the
    end of a key counts for the value after it. An empty list has one number. Return None if the
    reply is not JSON alone, or if the tokens do not spell it.
    """
    if not isinstance(load_json(reply), dict):
        return None
    if "".join(token.text for token in tokens)[: len(reply)] != reply:
        return None
    items: dict[int, dict[str, list[float]]] = defaultdict(dict)
    parts = list(parts_of(reply))
    for part, logprob in zip(parts, sums_by_part(parts, tokens, len(reply)), strict=True):
        path = list(part.path or ())
        number = 0
        if fields.items:  # the path is `judgments`, the item's number, the field
            if len(path) < 3 or path[0] != fields.items or not isinstance(path[1], int):
                continue
            number = path[1]
            path = path[2:]
        if path and path[0] in fields.fields:
            of_item = items[number]
            of_item.setdefault(str(path[0]), []).append(float(f"{logprob:.{DIGITS}g}"))
    return [items[number] for number in range(max(items, default=-1) + 1)]


def sums_by_part(parts: Sequence[Part], tokens: Sequence[Token], end: int) -> list[float]:
    """Return the sum of the log-probabilities of the tokens that begin in each part.

    A part reaches up to the next one. After `end` comes the token that ends the reply.
    """
    sums = [0.0] * len(parts)
    current = -1
    place = 0
    for token in tokens:
        if place >= end:
            break
        while current + 1 < len(parts) and parts[current + 1].start <= place:
            current += 1
        owner = current
        place += len(token.text)
        if owner >= 0 and parts[owner].path is None and place > parts[owner].end:
            owner += 1  # it has the end of a key
        if 0 <= owner < len(parts):
            sums[owner] += token.logprob
    return sums


def parts_of(reply: str) -> Iterator[Part]:
    """Yield the keys, the simple values and the empty lists of valid JSON, in order."""
    path: list[str | int] = []
    is_key = False
    signs = [*PARTS.finditer(reply), None]
    for sign, following in pairwise(signs):
        assert sign
        text = sign[0]
        if text == "{":
            path.append("")
            is_key = True
        elif text == "[":
            if following and following[0] == "]":
                yield Part(tuple(path), sign.start(), following.end() - 1)
            path.append(0)
        elif text in "}]":
            path.pop()
            is_key = False
        elif text == ",":
            if isinstance(path[-1], int):
                path[-1] += 1
            else:
                is_key = True
        elif is_key:
            path[-1] = json.loads(text)
            is_key = False
            yield Part(None, sign.start(), sign.end() - 1)
        else:
            yield Part(tuple(path), sign.start(), sign.end() - 1)


def tokens_of(reply: Any) -> list[Token] | None:
    """Return the tokens of vLLM's CompletionOutput or an EndpointReply; None if they are unknown.

    The token that was chosen stands first among those of its position.
    """
    if not reply.logprobs:
        return None
    tokens = []
    for position in reply.logprobs:
        chosen = next(iter(position.values()))
        tokens.append(Token(chosen.decoded_token or "", chosen.logprob))
    return tokens
