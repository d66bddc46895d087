"""What the text classifier looks at: n-grams of a case and of its items, and facts about them."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from panjue.prompts.example import Example
from panjue.prompts.names import split_at_names

Hashes = NDArray[np.uint32]

Array = NDArray[Any]

PLACES = ("number", "of", "place", "length", "own length", "named", "first named")
"""Facts that say where an item stands; of these alone the label sets know."""

PERSON = 0xE000  # private-use characters: this one replaces the item's own name

OTHER = 0xE001  # any other name

FIRST_NAME = 0xE010  # the first name of a case; the others follow

FIRST_NUMBER = 0xF000  # the number 0; see `magnitude`

NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)余?(万)?")

CLAUSE = re.compile(r"(?<=[。；，;\n])|(?<=,)(?!\d)")

TOKEN = re.compile(r"[^\W\d_\u4e00-\u9fff]+|[\u4e00-\u9fff\ue000-\uf8ff]")
"""A Chinese character, a word of another script, a name or a number."""


def magnitude(number: re.Match[str]) -> str:
    """Return one character for a match of `NUMBER`; numbers of a third of a decade have the same.

    There are 99 characters, from that of a thousandth and less to that of 10**30, and one for 0.
    """
    value = float(number[1].replace(",", ""))
    if number[2]:
        value *= 10_000
    if value <= 0:
        return chr(FIRST_NUMBER)
    thirds = round(3 * math.log10(min(value, 1e30)))
    return chr(FIRST_NUMBER + max(1, min(99, thirds + 10)))


def grams(text: str, marks: Sequence[str] = ()) -> Hashes:
    """Return the hashes of all tokens of a text, of all pairs of neighbors, and of `marks`."""
    with_magnitudes = NUMBER.sub(magnitude, text.lower())
    tokens = [token.encode() for token in TOKEN.findall(with_magnitudes)]
    single = list(map(crc32, tokens))
    # crc32(b" b", crc32(b"a")) is crc32(b"a b"): the hash of a pair continues that of its first
    # token. The last token begins no pair, and `map` leaves it out.
    with_space = [b" " + token for token in tokens[1:]]
    pairs = map(crc32, with_space, single)
    of_marks = [crc32(mark.encode()) for mark in marks]
    return np.fromiter(chain(single, pairs, of_marks), np.uint32)


def everybody(example: Example) -> range:
    """Return the code points that replace the names of a case."""
    return range(FIRST_NAME, FIRST_NAME + len(example.names))


def own_clauses(example: Example, items: int) -> tuple[str, list[str]]:
    """Return the text with a mark in place of each name, and the clauses that name each item."""
    pieces = []
    for piece, number in split_at_names(example.text, example.names):
        pieces.append(piece if number is None else chr(FIRST_NAME + number))
    text = "".join(pieces)
    marks = set(map(chr, everybody(example)))
    clauses: dict[str, list[str]] = defaultdict(list)
    for clause in CLAUSE.split(text):
        for mark in marks.intersection(clause):
            clauses[mark].append(clause)
    return text, ["".join(clauses[chr(FIRST_NAME + number)]) for number in range(items)]


def views(example: Example, items: int) -> tuple[Hashes, list[Hashes]]:
    """Return the n-grams of the whole text, and for each item those of its own clauses.

    All names are masked. An item's own clauses are those that name its person; its place among the
    items is a mark there.
    """
    text, clauses = own_clauses(example, items)
    others = dict.fromkeys(everybody(example), OTHER)
    whole = grams(text.translate(others))
    of_items = []
    for number, own in enumerate(clauses):
        masked = own.translate({**others, FIRST_NAME + number: PERSON})
        place = f"place {min(number, 6)}"
        of = f"of {min(items, 7)}"
        last = f"last {number == items - 1}"
        of_items.append(grams(masked, (place, of, last)))
    return whole, of_items


def facts(
    example: Example, items: int, evidence: Callable[[str], Sequence[float]]
) -> list[list[float]]:
    """Return for each item its `PLACES`, and the evidence about the case and about itself."""
    text, clauses = own_clauses(example, items)
    length = max(1, len(text))
    of_case = evidence(text)
    rows = []
    for number, own in enumerate(clauses):
        mark = chr(FIRST_NAME + number)
        places = {
            "number": number,
            "of": items,
            "place": number / max(1, items - 1),
            "length": length,
            "own length": len(own),
            "named": text.count(mark),
            "first named": text.find(mark) / length,
        }
        in_order = [places[name] for name in PLACES]
        rows.append([*in_order, *of_case, *evidence(own)])
    return rows


def how_known(shares: ArrayLike, usual_share: float) -> Array:
    """Return from 0 to 1 how far texts are known, by the shares of their n-grams that count.

    A text of the usual share, or of a higher one, is known: 1. So is every text if no n-gram counts
    in usual texts: then nothing was learnt from words.
    """
    if usual_share == 0:
        return np.ones(np.shape(shares))
    return np.minimum(1, np.asarray(shares) / usual_share)


@dataclass(frozen=True)
class View:
    """The n-grams of one view that count."""

    kept: Hashes  # their hashes, ascending, [columns]
    idf: NDArray[np.float32]  # inverse document frequencies, [columns]

    def share_known(self, text: Hashes) -> float:
        """Return the share of a text's distinct n-grams that count; 0 of an empty text."""
        distinct = np.unique(text)
        known = np.isin(distinct, self.kept, assume_unique=True)
        return float(known.sum() / max(1, len(distinct)))

    def rows(self, texts: Sequence[Hashes]) -> csr_array:
        """Return the vectors of texts, [texts, columns]: sublinear TF-IDF, each of length 1."""
        columns = []
        values = []
        ends = [0]
        for hashes in texts:
            distinct, counts = np.unique(hashes, return_counts=True)
            places = np.searchsorted(self.kept, distinct)
            is_kept = np.searchsorted(self.kept, distinct, side="right") > places
            places = places[is_kept]
            vector = (1 + np.log(counts[is_kept])) * self.idf[places]
            vector /= max(float(np.linalg.norm(vector)), 1e-9)
            columns.append(places)
            values.append(vector.astype(np.float32))
            ends.append(ends[-1] + len(vector))
        # scikit-learn takes 32-bit indices only.
        indices = np.concatenate(columns).astype(np.int32)
        starts = np.array(ends, dtype=np.int32)
        shape = (len(texts), len(self.kept))
        return csr_array((np.concatenate(values), indices, starts), shape=shape)
