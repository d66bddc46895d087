"""Compare the meaning of two texts by the cosine of their n-grams."""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from math import sqrt


@lru_cache(maxsize=4096)
def cosine(text: str, other: str) -> float:
    """Return the cosine of the counts of characters and pairs of them; 1 for two empty texts."""
    if text == other:
        return 1.0
    if not text or not other:
        return 0.0
    first = _gram_counts(text)
    second = _gram_counts(other)
    lengths = sqrt(_dot_product(first, first) * _dot_product(second, second))
    return _dot_product(first, second) / lengths


@lru_cache(maxsize=4096)
def _gram_counts(text: str) -> dict[str, int]:
    """Return how often each character and each pair of neighbors occurs: 好, 的, 好的."""
    grams = Counter(text)
    grams.update(map("".join, pairwise(text)))
    return dict(grams)  # a Counter is slow for missing keys


def _dot_product(first: dict[str, int], second: dict[str, int]) -> int:
    return sum(count * second.get(gram, 0) for gram, count in first.items())
