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
    """A key, a simple value or an empty list of JSON, and where it stands in the text."""

    path: tuple[str | int, ...] | None
    """Of a value: the keys and positions that lead to it, as ("judgments", 0, "charges", 1). None
    for a key."""
    start: int  # its first character
    end: int  # its last character

    @property
    def is_key(self) -> bool:
        return self.path is None


def field_logprobs(
    reply: str, tokens: Sequence[Token], fields: LabelFields
) -> FieldLogprobs | None:
    """Return the log-probability of each label and class of a reply.

    For example `{"judgments": [{"charges": ["盗窃罪", "诈骗罪"], "penalty": 9}]}` gives
    `[{"charges": [-0.02, -1.3], "penalty": [-0.7]}]`. An empty list has one number.

    The numbers of a field add up to the log-probability of its whole value: a label also has the
    tokens after it, up to the next part, since they say whether the list has another label. Return
    None if the reply is not JSON alone, or if the tokens do not spell it.
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

    A part reaches up to the next one. A token that has the last character of a key, or comes after
    it, counts for the part after the key: `": "盗` has the start of that part. After `end`, the
    length of the reply, comes the token that ends it.
    """
    sums = [0.0] * len(parts)
    current = -1  # index of the part that the token begins in; -1 before the first part
    place = 0  # where the token begins
    for token in tokens:
        if place >= end:
            break
        while current + 1 < len(parts) and parts[current + 1].start <= place:
            current += 1
        place += len(token.text)
        owner = current
        if current >= 0 and parts[current].is_key and place > parts[current].end:
            owner += 1  # it reaches the end of this key
        if 0 <= owner < len(parts):
            sums[owner] += token.logprob
    return sums


def parts_of(reply: str) -> Iterator[Part]:
    """Yield the keys, the simple values and the empty lists of valid JSON, in order.

    `{"charges": ["盗窃罪"], "articles": []}` has four parts. Their paths are None, ("charges", 0),
    None and ("articles",). An empty list is a part, since its tokens decide that it has no label.
    """
    path: list[str | int] = []  # of the next value: in each list a position, in each object a key
    is_key = False  # whether the next string is a key
    signs = [*PARTS.finditer(reply), None]
    for sign, following in pairwise(signs):
        assert sign
        text = sign[0]
        if text == "{":
            path.append("")  # its key comes next
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
