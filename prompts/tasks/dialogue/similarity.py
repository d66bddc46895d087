"""How alike two texts are: cosines of character n-grams, or of vectors that a model makes."""

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
from panjue.prompts.plumbing.openai import named, post

Numbers = NDArray[np.float64]

Similarity = Callable[[Sequence[str], Sequence[str]], Numbers]
"""Texts, other texts -> cosines, [texts, others]. Two empty texts are alike, one and none are not.
"""

BUILT_IN = "ngrams"
KEY = "PANJUE_EMBEDDINGS_KEY"
"""Environment variable with the key that an embeddings endpoint wants."""

AT_ONCE = 64
"""Texts of one request."""


def ngrams(texts: Sequence[str], others: Sequence[str]) -> Numbers:
    """Return cosines of the counts of characters and pairs of characters; needs no model.

    Not scikit-learn's CountVectorizer: it joins white space, refuses texts without a character, and
    nothing else here needs that package.
    """
    columns: dict[str, int] = {}
    first, second = (_counts(side, columns) for side in (texts, others))
    for side in (first, second):
        side.resize((side.shape[0], len(columns)))
    return _both_empty(np.asarray((first @ second.T).todense()), texts, others)


def _counts(texts: Sequence[str], columns: dict[str, int]) -> csr_array:
    """Return rows of length one; unseen n-grams become new `columns`."""
    counted = [Counter(chain(text, map("".join, pairwise(text)))) for text in texts]
    for gram in chain.from_iterable(counted):
        columns.setdefault(gram, len(columns))
    ends = np.cumsum([0, *map(len, counted)])
    values = np.fromiter(chain.from_iterable(c.values() for c in counted), np.float64)
    places = np.fromiter((columns[gram] for gram in chain.from_iterable(counted)), np.int32)
    norms = np.array([max(np.sqrt(sum(n * n for n in c.values())), 1e-12) for c in counted])
    values /= np.repeat(norms, np.diff(ends))
    return csr_array((values, places, ends), shape=(len(texts), len(columns)))


def _both_empty(cosines: Numbers, texts: Sequence[str], others: Sequence[str]) -> Numbers:
    empty, also = (np.array([not text for text in side], dtype=bool) for side in (texts, others))
    cosines[empty, :] = cosines[:, also] = 0.0
    cosines[np.ix_(empty, also)] = 1.0
    return cosines


class Embedded:
    """Cosines of a model's vectors, each text embedded once; they are kept in a file if wished."""

    def __init__(self, embed: Callable[[list[str]], Numbers], kept: Path | None, name: str) -> None:
        """Take what embeds texts, [texts, size]; `name` says which model, in the file too."""
        self._embed, self._name = embed, name
        try:
            self._kept = sqlite3.connect(kept or ":memory:", check_same_thread=False)
            self._kept.execute(
                "CREATE TABLE IF NOT EXISTS vectors (name, text, vector, PRIMARY KEY (name, text))"
            )
            weakref.finalize(self, self._kept.close)
        except sqlite3.Error as error:
            raise UserError(f"{kept}: {error}; delete it, its vectors can be made again") from None

    def __call__(self, texts: Sequence[str], others: Sequence[str]) -> Numbers:
        """Return cosines, [texts, others]."""
        vectors = self._vectors([*texts, *others])
        cosines = vectors[: len(texts)] @ vectors[len(texts) :].T
        return _both_empty(cosines, texts, others)

    def _vectors(self, texts: list[str]) -> Numbers:
        wanted = [text for text in dict.fromkeys(texts) if text and self._known(text) is None]
        for start in range(0, len(wanted), AT_ONCE):
            batch = wanted[start : start + AT_ONCE]
            for text, vector in zip(batch, self._embed(batch), strict=True):
                row = (self._name, text, np.asarray(vector, np.float32).tobytes())
                self._kept.execute("INSERT OR IGNORE INTO vectors VALUES (?, ?, ?)", row)
            self._kept.commit()
        found = {
            text: known for text in dict.fromkeys(texts) if (known := self._known(text)) is not None
        }
        sizes = {len(vector) for vector in found.values()} or {1}
        if len(sizes) > 1:
            raise UserError(f"{self._name}: its vectors have the sizes {sorted(sizes)}")
        nothing = np.zeros(sizes.pop())
        made = np.stack([found.get(text, nothing) for text in texts])
        lengths = np.linalg.norm(made, axis=1, keepdims=True)
        return np.asarray(made / np.maximum(lengths, 1e-12))

    def _known(self, text: str) -> Numbers | None:
        query = "SELECT vector FROM vectors WHERE name = ? AND text = ?"
        row = self._kept.execute(query, (self._name, text)).fetchone()
        return np.frombuffer(row[0], np.float32).astype(np.float64) if row else None


@lru_cache(maxsize=8)
def similarity(name: str = BUILT_IN, kept: Path | None = None) -> Similarity:
    """Return what `name` says.

    Args:
        name: `ngrams`; a folder with a sentence-transformers model; or `URL#MODEL` of an
            OpenAI-compatible endpoint, such as `http://127.0.0.1:8001/v1#bge`.
        kept: Where vectors are kept, so that none is made twice.

    Raises:
        UserError: It is none of these, or the package for it is missing.
    """
    check_similarity(name)
    if name == BUILT_IN:
        return ngrams
    if found := named(name):
        return Embedded(_endpoint(*found), kept, name)
    return Embedded(_local(Path(name)), kept, name)


def check_similarity(name: str) -> None:
    """Refuse what `similarity` would, before anything is embedded.

    Raises:
        UserError: The name means nothing.
    """
    if named(name) or name == BUILT_IN or Path(name).is_dir():
        return
    if name.startswith(("http://", "https://")) and "#" not in name:
        raise UserError(f"similarity: say which model: {name}#MODEL")
    raise UserError(f"similarity: {name!r} is neither {BUILT_IN}, nor a folder, nor URL#MODEL")


def _endpoint(url: str, model: str) -> Callable[[list[str]], Numbers]:
    place = f"{url}/embeddings"

    def embed(texts: list[str]) -> Numbers:
        def read(reply: Any) -> Numbers:
            rows = sorted(reply["data"], key=lambda row: row["index"])
            made = np.array([row["embedding"] for row in rows], dtype=np.float64)
            if made.shape[:1] != (len(texts),) or made.ndim != 2:
                raise ValueError(f"{len(texts)} texts, vectors of shape {made.shape}")
            return made

        return post(place, {"model": model, "input": texts}, KEY, read)

    return embed


def _local(folder: Path) -> Callable[[list[str]], Numbers]:
    try:
        # Brings torch: only for whoever asks for it.
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
    """Yield the pairs (row, column) of the one-to-one matching with the most points together."""
    rows, columns = linear_sum_assignment(points, maximize=True)
    yield from zip(rows.tolist(), columns.tolist(), strict=True)
