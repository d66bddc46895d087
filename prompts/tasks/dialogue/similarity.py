"""Whether texts mean the same: cosines of n-grams or embeddings, and a judge of events."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from panjue.prompts.plumbing.decode import after_thinking
from panjue.prompts.plumbing.endpoint import asking, parse_endpoint
from panjue.prompts.plumbing.errors import UserError

Numbers = NDArray[np.float64]

Similarity = Callable[[Sequence[str], Sequence[str]], Numbers]
"""Texts, other texts -> cosines, [texts, others]: 1 for two empty texts, 0 for only one empty."""

BUILT_IN = "ngrams"
KEY = "PANJUE_EMBEDDINGS_KEY"
JUDGE_KEY = "PANJUE_JUDGE_KEY"
"""Environment variables with the keys of an embeddings endpoint and of a judge's."""

BATCH_SIZE = 64
"""Texts per request."""


def ngrams(texts: Sequence[str], others: Sequence[str]) -> Numbers:
    """Return cosines of the counts of characters and pairs of characters; needs no model.

    Not scikit-learn's CountVectorizer: it merges white space, refuses empty texts, and nothing else
    here needs that package.
    """
    columns: dict[str, int] = {}
    first, second = (_counts(side, columns) for side in (texts, others))
    for side in (first, second):
        side.resize((side.shape[0], len(columns)))
    return _with_empty(np.asarray((first @ second.T).todense()), texts, others)


def _counts(texts: Sequence[str], columns: dict[str, int]) -> csr_array:
    """Return unit rows, [texts, columns]; new n-grams are added to `columns`."""
    counters = [Counter(chain(text, map("".join, pairwise(text)))) for text in texts]
    for gram in chain.from_iterable(counters):
        columns.setdefault(gram, len(columns))
    ends = np.cumsum([0, *map(len, counters)])
    values = np.fromiter(chain.from_iterable(c.values() for c in counters), np.float64)
    indices = np.fromiter((columns[gram] for gram in chain.from_iterable(counters)), np.int32)
    norms = np.array([max(np.sqrt(sum(n * n for n in c.values())), 1e-12) for c in counters])
    values /= np.repeat(norms, np.diff(ends))
    return csr_array((values, indices, ends), shape=(len(texts), len(columns)))


def _with_empty(cosines: Numbers, texts: Sequence[str], others: Sequence[str]) -> Numbers:
    """Set the cosines of empty texts: 1 for two empty texts, else 0."""
    rows, columns = (np.array([not text for text in side], dtype=bool) for side in (texts, others))
    cosines[rows, :] = cosines[:, columns] = 0.0
    cosines[np.ix_(rows, columns)] = 1.0
    return cosines


class Embedded:
    """Cosines of an endpoint's embeddings; each text is embedded once."""

    def __init__(self, url: str, model: str) -> None:
        """Set the address and the model; the key is in `PANJUE_EMBEDDINGS_KEY`."""
        self._url, self._model = url, model
        self._vectors: dict[str, Numbers] = {}

    def __call__(self, texts: Sequence[str], others: Sequence[str]) -> Numbers:
        """Return cosines, [texts, others]."""
        vectors = self._unit_vectors([*texts, *others])
        cosines = vectors[: len(texts)] @ vectors[len(texts) :].T
        return _with_empty(cosines, texts, others)

    def _unit_vectors(self, texts: list[str]) -> Numbers:
        missing = [text for text in dict.fromkeys(texts) if text and text not in self._vectors]
        for start in range(0, len(missing), BATCH_SIZE):
            batch = missing[start : start + BATCH_SIZE]
            self._vectors.update(zip(batch, self._embed(batch), strict=True))
        zeros = np.zeros(len(next(iter(self._vectors.values()), [0.0])))
        vectors = np.stack([self._vectors.get(text, zeros) for text in texts])
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(norms, 1e-12))

    def _embed(self, texts: list[str]) -> Numbers:
        with asking(self._url, KEY) as client:
            reply = client.embeddings.create(
                model=self._model, input=texts, encoding_format="float"
            )
            rows = sorted(reply.data, key=lambda row: row.index)
            vectors = np.array([row.embedding for row in rows], dtype=np.float64)
            if vectors.shape[:1] != (len(texts),) or vectors.ndim != 2:
                raise ValueError(f"{len(texts)} texts, vectors of shape {vectors.shape}")
            return vectors


@lru_cache(maxsize=8)
def similarity(name: str = BUILT_IN) -> Similarity:
    """Return the similarity of this name: `ngrams`, or `URL#MODEL` of an endpoint."""
    if endpoint := parse_endpoint(name):
        return Embedded(*endpoint)
    if name == BUILT_IN:
        return ngrams
    if name.startswith(("http://", "https://")) and "#" not in name:
        raise UserError(f"similarity: add the model: {name}#MODEL")
    raise UserError(f"similarity: {name!r} is neither {BUILT_IN} nor URL#MODEL")


def best_pairs(points: Numbers) -> Iterator[tuple[int, int]]:
    """Yield the pairs (row, column) of the one-to-one matching with the maximum sum of points."""
    rows, columns = linear_sum_assignment(points, maximize=True)
    yield from zip(rows.tolist(), columns.tolist(), strict=True)


Judge = Callable[[str, str], bool]
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
    judge: Judge


def make_matching(embeddings: str = BUILT_IN, judge: str = AGREE) -> Matching:
    """Return the `Matching` by this `similarity` and this judge: `agree`, or `URL#MODEL`."""
    cosines = "character 1-2-grams" if embeddings == BUILT_IN else embeddings
    built_in = " (built in)" if (embeddings, judge) == (BUILT_IN, AGREE) else ""
    decide: Judge = (lambda _gold, _predicted: True) if judge == AGREE else _endpoint_judge(judge)
    name = f"cosine: {cosines}, judge: {judge}{built_in}"
    return Matching(name, similarity(embeddings), decide)


def says_yes(reply: str, judge: str) -> bool:
    """Return whether a judge's reply is a yes: it begins with 是 or 否, yes or no."""
    verdict = re.match(r"\W*(是(?!否)|否|不是|yes\b|no\b)", after_thinking(reply).lower())
    if not verdict:
        raise UserError(f"{judge}: answers {reply[:80]!r}, not one of 是 and 否; set another judge")
    return verdict[1] in {"是", "yes"}


def _endpoint_judge(name: str) -> Judge:
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
                max_tokens=MAX_REPLY_TOKENS,  # enough for a think block
            )
            choice = reply.choices[0]
            text, finish_reason = choice.message.content or "", choice.finish_reason
        if finish_reason == "length":
            reason = f"reply cut off at {MAX_REPLY_TOKENS} tokens; set another judge"
            raise UserError(f"judge {model}: {reason}")
        return says_yes(text, f"judge {model}")

    return judge
