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

DIGITS = 4  # digits after the point that a row keeps

PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]|[^\s"\[\]{},:]+', re.DOTALL)
"""Pattern of the strings, brackets, commas and other values of JSON."""


class Token(NamedTuple):
    """A token of a reply. `text` is empty if it has only a part of a character."""

    text: str
    logprob: float


class Part(NamedTuple):
    """A value or key of JSON: its keys and positions from the outside in, and its first character.

    A key and the end of a list have no path.
    """

    path: tuple[str | int, ...] | None
    start: int


def field_logprobs(
    reply: str, tokens: Sequence[Token], fields: LabelFields
) -> FieldLogprobs | None:
    """Return the log-probability of each label and class of a reply.

    The numbers of a field add up to the log-probability of its whole value. A label's tokens are
    those from its first character up to the next string: the last one says whether the list goes
    on. A token that is part of two labels counts for the one that it begins in. An empty list has
    one number. Return None if the reply is not JSON alone, or if the tokens do not spell it.
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
            if len(path) < 3 or path[0] != fields.items:
                continue
            number = int(path[1])
            path = path[2:]
        if path and path[0] in fields.fields:
            of_item = items[number]
            of_item.setdefault(str(path[0]), []).append(round(logprob, DIGITS))
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
        if current >= 0:
            sums[current] += token.logprob
        place += len(token.text)
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
                yield Part(tuple(path), sign.start())
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
            yield Part(None, sign.start())
        else:
            yield Part(tuple(path), sign.start())


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
