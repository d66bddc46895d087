"""The similarity of texts: cosines of character n-grams, or of a model's embeddings."""

import sqlite3
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.openai import parse_endpoint, post

Numbers = NDArray[np.float64]

Similarity = Callable[[Sequence[str], Sequence[str]], Numbers]
"""Texts, other texts -> cosines, [texts, others]: 1 for two empty texts, 0 for only one empty."""

BUILT_IN = "ngrams"
KEY = "PANJUE_EMBEDDINGS_KEY"
"""Environment variable with the key of an embeddings endpoint."""

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
    """Cosines of a model's embeddings; each text is embedded once, optionally with a file cache."""

    def __init__(self, embed: Callable[[list[str]], Numbers], path: Path | None, name: str) -> None:
        """Set the function that embeds texts, [texts, size], the cache and the model's name."""
        self._embed, self._name = embed, name
        try:
            self._cache = sqlite3.connect(path or ":memory:", check_same_thread=False)
            self._cache.execute(
                "CREATE TABLE IF NOT EXISTS vectors (name, text, vector, PRIMARY KEY (name, text))"
            )
            weakref.finalize(self, self._cache.close)
        except sqlite3.Error as error:
            raise UserError(f"{path}: {error}; delete it, it is only a cache") from None

    def __call__(self, texts: Sequence[str], others: Sequence[str]) -> Numbers:
        """Return cosines, [texts, others]."""
        vectors = self._vectors([*texts, *others])
        cosines = vectors[: len(texts)] @ vectors[len(texts) :].T
        return _with_empty(cosines, texts, others)

    def _vectors(self, texts: list[str]) -> Numbers:
        unique = dict.fromkeys(texts)
        missing = [text for text in unique if text and self._cached(text) is None]
        for start in range(0, len(missing), BATCH_SIZE):
            batch = missing[start : start + BATCH_SIZE]
            for text, vector in zip(batch, self._embed(batch), strict=True):
                row = (self._name, text, np.asarray(vector, np.float32).tobytes())
                self._cache.execute("INSERT OR IGNORE INTO vectors VALUES (?, ?, ?)", row)
            self._cache.commit()
        cached = {text: vec for text in unique if (vec := self._cached(text)) is not None}
        sizes = {len(vector) for vector in cached.values()} or {1}
        if len(sizes) > 1:
            raise UserError(f"{self._name}: its vectors have the sizes {sorted(sizes)}")
        zeros = np.zeros(sizes.pop())
        vectors = np.stack([cached.get(text, zeros) for text in texts])
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(norms, 1e-12))

    def _cached(self, text: str) -> Numbers | None:
        query = "SELECT vector FROM vectors WHERE name = ? AND text = ?"
        row = self._cache.execute(query, (self._name, text)).fetchone()
        return np.frombuffer(row[0], np.float32).astype(np.float64) if row else None


@lru_cache(maxsize=8)
def similarity(name: str = BUILT_IN, path: Path | None = None) -> Similarity:
    """Return the similarity of this name.

    Args:
        name: `ngrams`; a folder with a sentence-transformers model; or `URL#MODEL` of an
            OpenAI-compatible endpoint, such as `http://127.0.0.1:8001/v1#bge`.
        path: The cache file of the embeddings, so that no text is embedded twice.

    Raises:
        UserError: The name is none of these, or the package for it is missing.
    """
    check_similarity(name)
    if name == BUILT_IN:
        return ngrams
    if endpoint := parse_endpoint(name):
        return Embedded(_endpoint(*endpoint), path, name)
    return Embedded(_local(Path(name)), path, name)


def check_similarity(name: str) -> None:
    """Check a name of `similarity` before any text is embedded.

    Raises:
        UserError: The name is invalid.
    """
    if parse_endpoint(name) or name == BUILT_IN or Path(name).is_dir():
        return
    if name.startswith(("http://", "https://")) and "#" not in name:
        raise UserError(f"similarity: add the model: {name}#MODEL")
    raise UserError(f"similarity: {name!r} is neither {BUILT_IN}, nor a folder, nor URL#MODEL")


def _endpoint(url: str, model: str) -> Callable[[list[str]], Numbers]:
    def embed(texts: list[str]) -> Numbers:
        def read(response: Any) -> Numbers:
            rows = sorted(response["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], dtype=np.float64)
            if vectors.shape[:1] != (len(texts),) or vectors.ndim != 2:
                raise ValueError(f"{len(texts)} texts, vectors of shape {vectors.shape}")
            return vectors

        return post(f"{url}/embeddings", {"model": model, "input": texts}, KEY, read)

    return embed


def _local(folder: Path) -> Callable[[list[str]], Numbers]:
    try:
        # This imports torch, so only if a local model is used.
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415
    except ImportError:
        raise UserError(
            "similarity: a local model needs `pip install panjue[embeddings]`"
        ) from None
    model: Any = SentenceTransformer(
        str(folder), trust_remote_code=False, model_kwargs={"use_safetensors": True}
    )

    def embed(texts: list[str]) -> Numbers:
        return np.asarray(model.encode(texts, show_progress_bar=False), dtype=np.float64)

    return embed


def best_pairs(points: Numbers) -> Iterator[tuple[int, int]]:
    """Yield the pairs (row, column) of the one-to-one matching with the maximum sum of points."""
    rows, columns = linear_sum_assignment(points, maximize=True)
    yield from zip(rows.tolist(), columns.tolist(), strict=True)
