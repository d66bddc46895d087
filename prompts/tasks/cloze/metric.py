"""Ranked cloze answers as CCKS2021's knowledge probing task scores them (after SQuAD)."""

import re
import string
from collections.abc import Iterator

from panjue.prompts.tasks.metrics import Field, Item, Row, overlap_f1, texts

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLE = re.compile(r"\b(a|an|the)\b")

MAX_ANSWERS = 5
"""Number of answers that count; K of the contest."""


def f1(gold: Row, predicted: Row | None) -> float:
    """Best token F1 of any answer against any gold answer; 0 without a row or an answer.

    Raises:
        TypeError: The answers are no list of at most five texts, as the contest requires.
    """
    answers = [] if predicted is None else predicted["ret"]
    if not isinstance(answers, list) or len(answers) > MAX_ANSWERS:
        raise TypeError
    pairs = ((text, answer) for texts in gold["references"] for text in texts for answer in answers)
    return max((token_f1(text, answer) for text, answer in pairs), default=0.0)


def shown(gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield the ranked answers and the gold ones, right if one of the answers is."""
    references = dict.fromkeys(text for texts in gold["references"] for text in texts)
    predicted = texts(row["ret"]) if row else []
    yield "", [Field("answers", list(references), predicted, f1(gold, row) == 1)]


def token_f1(reference: str, answer: str) -> float:
    """F1 of the tokens as a multiset; if one text has no tokens, 1 if both have none, else 0."""
    return overlap_f1(tokens(reference), tokens(answer))


def tokens(text: str) -> list[str]:
    """Return the words of a text: lower case, without ASCII punctuation and articles."""
    return ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split()
