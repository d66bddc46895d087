"""Whether two texts mean the same: the cosine of their n-grams."""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from math import sqrt


@lru_cache(maxsize=4096)
def cosine(text: str, other: str) -> float:
    """Return the cosine of the counts of characters and their pairs; of two empty texts it is 1."""
    if not text or not other:
        return float(text == other)
    first = _grams(text)
    second = _grams(other)
    return _product(first, second) / sqrt(_product(first, first) * _product(second, second))


@lru_cache(maxsize=4096)
def _grams(text: str) -> Counter[str]:
    grams = Counter(text)
    grams.update(first + second for first, second in pairwise(text))
    return grams


def _product(first: Counter[str], second: Counter[str]) -> int:
    return sum(count * second[gram] for gram, count in first.items())
