"""Whether texts mean the same: cosines of n-grams or embeddings, and a judge of events."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise, product
from math import sqrt

import numpy as np
from scipy.optimize import linear_sum_assignment

from panjue.prompts.plumbing.decode import after_thinking
from panjue.prompts.plumbing.endpoint import asking, parse_endpoint
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.tasks.metrics import Numbers

Similarity = Callable[[Sequence[str], Sequence[str]], Numbers]
"""Texts, as many other texts -> the cosine of each pair; 1 for two empty texts, 0 for one."""

NGRAMS = "ngrams"
"""Name of the built-in similarity, which needs no model."""

EMBEDDINGS_KEY = "PANJUE_EMBEDDINGS_KEY"
JUDGE_KEY = "PANJUE_JUDGE_KEY"
"""Environment variables with the keys of an embeddings endpoint and of a judge's."""

TEXTS_PER_REQUEST = 64


def ngrams(texts: Sequence[str], others: Sequence[str]) -> Numbers:
    """Return cosines of the counts of characters and pairs of characters."""
    return np.array([_ngram_cosine(*pair) for pair in zip(texts, others, strict=True)])


def _ngram_cosine(text: str, other: str) -> float:
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


class Embedded:
    """Cosines of an endpoint's embeddings; each text is embedded once."""

    def __init__(self, url: str, model: str) -> None:
        """Set the address and the model; the key is in `PANJUE_EMBEDDINGS_KEY`."""
        self._url = url
        self._model = model
        self._vectors: dict[str, Numbers] = {}  # of length 1

    def __call__(self, texts: Sequence[str], others: Sequence[str]) -> Numbers:
        wanted = dict.fromkeys([*texts, *others])
        missing = [text for text in wanted if text and text not in self._vectors]
        for start in range(0, len(missing), TEXTS_PER_REQUEST):
            self._embed(missing[start : start + TEXTS_PER_REQUEST])
        return np.array([self._cosine(*pair) for pair in zip(texts, others, strict=True)])

    def _cosine(self, text: str, other: str) -> float:
        if not text or not other:
            return float(text == other)
        return float(self._vectors[text] @ self._vectors[other])

    def _embed(self, texts: list[str]) -> None:
        with asking(self._url, EMBEDDINGS_KEY) as client:
            reply = client.embeddings.create(
                model=self._model, input=texts, encoding_format="float"
            )
            rows = sorted(reply.data, key=lambda row: row.index)
            vectors = np.array([row.embedding for row in rows], dtype=np.float64)
            if vectors.shape[:1] != (len(texts),) or vectors.ndim != 2:
                raise ValueError(f"{len(texts)} texts, vectors of shape {vectors.shape}")
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit_vectors = vectors / np.maximum(norms, 1e-12)
        self._vectors.update(zip(texts, unit_vectors, strict=True))


@lru_cache(maxsize=8)
def similarity(name: str) -> Similarity:
    """Return the similarity of this name: `ngrams`, or `URL#MODEL` of an endpoint."""
    if endpoint := parse_endpoint(name):
        return Embedded(*endpoint)
    if name == NGRAMS:
        return ngrams
    if name.startswith(("http://", "https://")) and "#" not in name:
        raise UserError(f"similarity: add the model: {name}#MODEL")
    raise UserError(f"similarity: {name!r} is neither {NGRAMS} nor URL#MODEL")


def table(similar: Similarity, texts: Sequence[str], others: Sequence[str]) -> Numbers:
    """Return the cosine of every text with every other text, [texts, others]."""
    pairs = list(product(texts, others))
    cosines = similar([text for text, _ in pairs], [other for _, other in pairs])
    return cosines.reshape(len(texts), len(others))


def best_pairs(points: Numbers) -> list[tuple[int, int]]:
    """Return the pairs (row, column) of the one-to-one matching with the maximum sum of points."""
    rows, columns = linear_sum_assignment(points, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


EventJudge = Callable[[str, str], bool]
"""Gold event, predicted event -> whether they are the same event."""

AGREE = "agree"
"""Name of the built-in judge, which answers yes to every pair."""

MAX_REPLY_TOKENS = 1024
"""Maximum number of tokens in a judge's reply, including its think block."""

QUESTION = "下面两个名称说的是同一件事吗？只回答“是”或“否”。\n一：{gold}\n二：{predicted}"


@dataclass(frozen=True)
class Matching:
    """Decides whether two texts mean the same; scores with different names differ in kind."""

    name: str
    similar: Similarity
    judge: EventJudge


def make_matching(embeddings: str, judge: str) -> Matching:
    """Return the `Matching` by this `similarity` and this judge: `agree`, or `URL#MODEL`."""
    cosines = "character 1-2-grams" if embeddings == NGRAMS else embeddings
    name = f"cosine: {cosines}, judge: {judge}"
    if (embeddings, judge) == (NGRAMS, AGREE):
        name += " (built in)"
    return Matching(name, similarity(embeddings), _agree if judge == AGREE else _ask_judge(judge))


def _agree(_gold: str, _predicted: str) -> bool:
    return True


def _ask_judge(name: str) -> EventJudge:
    endpoint = parse_endpoint(name)
    if endpoint is None:
        raise UserError(f"judge: {name!r} is neither {AGREE} nor URL#MODEL")
    url, model = endpoint

    @cache
    def judge(gold: str, predicted: str) -> bool:
        question = QUESTION.format(gold=gold, predicted=predicted)
        with asking(url, JUDGE_KEY) as client:
            reply = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=MAX_REPLY_TOKENS,
            )
            choice = reply.choices[0]
            text = choice.message.content or ""
            is_cut = choice.finish_reason == "length"
        if is_cut:
            reason = f"reply cut off at {MAX_REPLY_TOKENS} tokens; set another judge"
            raise UserError(f"judge {model}: {reason}")
        return says_yes(text, f"judge {model}")

    return judge


def says_yes(reply: str, judge: str) -> bool:
    """Return whether a judge's reply is a yes: it begins with 是 or 否, yes or no."""
    verdict = re.match(r"\W*(是(?!否)|否|不是|yes\b|no\b)", after_thinking(reply).lower())
    if not verdict:
        raise UserError(f"{judge}: answers {reply[:80]!r}, not one of 是 and 否; set another judge")
    return verdict[1] in {"是", "yes"}
