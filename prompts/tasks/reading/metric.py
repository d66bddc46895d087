"""The metrics of the official scorer of CAIL2019-CJRC (after CoQA's) for reading comprehension."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain

from panjue.prompts.tasks.metrics import Field, Item, Row, overlap_f1, texts


def f1(gold: Row, predicted: Row | None) -> float:
    """Mean over the sets of references of the best character F1 in each; 0 without a row."""
    return _over_sets(gold, predicted, character_f1)


def em(gold: Row, predicted: Row | None) -> float:
    """Mean over the sets of references of the best exact match, after normalization."""
    return _over_sets(gold, predicted, _is_same)


def shown(gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield the answer with the references; it is right if it matches one reference of each set."""
    references = dict.fromkeys(chain.from_iterable(gold["references"]))
    golds = list(filter(None, references))
    predicted = texts(row["answer"]) if row else []
    is_right = em(gold, row) == 1
    yield "", [Field("answer", golds, predicted, is_right)]


def _over_sets(gold: Row, predicted: Row | None, score: Callable[[str, str], float]) -> float:
    """Return the mean over the sets of references of the best score in each; 0 without a row."""
    if predicted is None:
        return 0.0
    best = []
    for references in gold["references"]:
        best.append(max(score(reference, predicted["answer"]) for reference in references))
    return sum(best) / len(best)


@lru_cache(maxsize=4096)  # several sets have the same references
def character_f1(reference: str, answer: str) -> float:
    """F1 of the characters as a multiset; 1 if both texts have none, 0 if only one has none."""
    return overlap_f1(characters(reference), characters(answer))


def _is_same(reference: str, answer: str) -> float:
    """Return 1 if both texts have the same letters and digits, else 0."""
    return float(characters(reference) == characters(answer))


@lru_cache(maxsize=4096)
def characters(text: str) -> tuple[str, ...]:
    """Return the letters and digits of a text in lower case; Chinese characters are letters."""
    return tuple(sign for sign in text.lower() if sign.isdigit() or sign.isalpha())
