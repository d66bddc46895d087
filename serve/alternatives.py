"""Token probabilities of a reply -> the positions where another token was likely too."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp
from typing import Any

ALTERNATIVES = 10
"""Most likely tokens that are read at each position of a reply."""

CERTAIN = 0.999
"""A position whose token is likelier than this has no alternatives."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes an incomplete character to."""


def alternatives(
    tokens: Sequence[int], options: Sequence[Mapping[int, float]], tokenizer: Any
) -> list[tuple[int, list[tuple[str, float]]]]:
    """Return where a reply could likely have continued differently: `eval.beliefs.Alternatives`.

    Args:
        tokens: The reply's token ids.
        options: For each token, the likeliest ids -> log-probability, the chosen one included. They
            obey the schema: vLLM masks forbidden tokens before it computes them.
        tokenizer: The model's tokenizer.
    """
    positions = []
    for i, (chosen, log_probs) in enumerate(zip(tokens, options, strict=False)):
        probability = exp(log_probs[chosen])
        prefix = tokenizer.decode(tokens[:i]) if probability < CERTAIN else UNFINISHED
        if prefix.endswith(UNFINISHED):  # certain, or inside a character of several tokens
            continue
        rest = sorted(((exp(p), token) for token, p in log_probs.items() if token != chosen))[::-1]
        likely = [(probability, chosen), *((p, token) for p, token in rest if p > 1 - CERTAIN)]
        texts = [(_text(tokenizer, token), round(max(p, 1e-4), 4)) for p, token in likely]
        readable = [option for option in texts[1:] if UNFINISHED not in option[0]]
        if readable and UNFINISHED not in texts[0][0]:
            positions.append((len(prefix), [texts[0], *readable]))
    return positions


@lru_cache(maxsize=4096)
def _text(tokenizer: Any, token: int) -> str:
    """Return a token's text; cached, since few tokens make up most positions."""
    text: str = tokenizer.decode([token])
    return text
