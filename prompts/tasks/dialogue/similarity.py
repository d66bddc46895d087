"""Whether texts mean the same: cosines of n-grams, and matchings of texts by them."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import sqrt

import numpy as np
from scipy.optimize import linear_sum_assignment

from panjue.prompts.tasks.metrics import Numbers


def table(texts: Sequence[str], others: Sequence[str]) -> Numbers:
    """Return the cosine of every text with every other text, [texts, others]."""
    cosines = [[cosine(text, other) for other in others] for text in texts]
    return np.array(cosines).reshape(len(texts), len(others))


@lru_cache(maxsize=4096)
def cosine(text: str, other: str) -> float:
    """Return the cosine of the counts of characters and their pairs; of two empty texts it is 1."""
    if not text or not other:
        return float(text == other)
    first = _grams(text)
    second = _grams(other)
    return _product(first, second) / sqrt(_product(first, first) * _product(second, second))


@lru_cache(maxsize=4096)
def _grams(text: str) -> dict[str, int]:
    return dict(Counter(text) + Counter(map("".join, pairwise(text))))


def _product(first: dict[str, int], second: dict[str, int]) -> int:
    return sum(count * second.get(gram, 0) for gram, count in first.items())


def best_pairs(points: Numbers) -> list[tuple[int, int]]:
    """Return the pairs (row, column) of the one-to-one matching with the maximum sum of points."""
    rows, columns = linear_sum_assignment(points, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))
