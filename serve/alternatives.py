"""Token probabilities of a reply -> the places where it might well have gone on otherwise."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp
from typing import Any

ALTERNATIVES = 10
"""Likeliest tokens that are looked at where a reply alternatives."""

CERTAIN = 0.999
"""A token likelier than this is no fork."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of the first bytes of a character."""


def alternatives(
    tokens: Sequence[int], options: Sequence[Mapping[int, float]], tokenizer: Any
) -> list[tuple[int, list[tuple[str, float]]]]:
    """Return where a reply might well have gone on otherwise; see `eval.beliefs.Alternatives`.

    Args:
        tokens: The reply's token ids.
        options: Token id -> log-probability of the likeliest tokens at each of them, the taken one
            among them. They are under the schema: vLLM masks what it forbids before it takes them.
        tokenizer: The model's.
    """
    found = []
    for i, (taken, ways_here) in enumerate(zip(tokens, options, strict=False)):
        chance = exp(ways_here[taken])
        before = tokenizer.decode(tokens[:i]) if chance < CERTAIN else UNFINISHED
        if before.endswith(UNFINISHED):  # certain, or inside a character of several tokens
            continue
        others = sorted(((exp(p), token) for token, p in ways_here.items() if token != taken))[::-1]
        ways = [(chance, taken), *((p, token) for p, token in others if p > 1 - CERTAIN)]
        texts = [(_text(tokenizer, token), round(max(p, 1e-4), 4)) for p, token in ways]
        readable = [way for way in texts[1:] if UNFINISHED not in way[0]]
        if readable and UNFINISHED not in texts[0][0]:
            found.append((len(before), [texts[0], *readable]))
    return found


@lru_cache(maxsize=4096)
def _text(tokenizer: Any, token: int) -> str:
    """Return a token's text; a few tokens are asked for again and again."""
    text: str = tokenizer.decode([token])
    return text
