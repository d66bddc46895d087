"""What the text classifier looks at: n-grams of cases and of their items, and facts about them.

An item is the part of an answer about one person, or the whole answer if it lists no persons. There
are two views of an item: the whole text of its case, and its own clauses, which name its person.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from panjue.finetune.classifier.grams import FIRST_NAME, Hashes, Text, grams, places_among
from panjue.prompts.example import Example
from panjue.prompts.names import Place, name_key, places_in_plain
from panjue.prompts.plain import Rewritten, plain_text

Array = NDArray[Any]

PLACES = ("number", "of", "place", "length", "own length", "named", "first named")
"""Facts about the position of an item in its case. Label sets use only these facts."""

MANY_PERSONS = 7
"""Lists of so many persons or more count as one length, and positions from this on as one."""

CLAUSE_END = re.compile(r"[。；，;\n]|,(?!\d)")


class MarkedCase(NamedTuple):
    """The plain text of a case; characters from `FIRST_NAME` on replace its names."""

    text: str
    names: int
    persons: Sequence[int]  # number of each item's name; of equal names, that of the first one
    own: Sequence[str]  # the clauses that name each item
    own_bounds: Sequence[Sequence[tuple[int, int]]]  # starts and ends of these clauses in the text
    plain: Rewritten  # the text before the names were replaced
    name_places: Sequence[Place]  # where it has names


def marked(example: Example, items: int) -> MarkedCase:
    """Replace each name in a case by one character, and find the clauses that name each item.

    For example, 甲某偷车，乙某望风。 gets `FIRST_NAME` in place of the first name, 甲某, and the
    next character in place of the second one. The own clauses of the first item are then the first
    four characters, up to the comma. `items` is the number of items.
    """
    plain = plain_text(example.text)
    name_places = places_in_plain(plain.text, example.names)
    pieces = []
    end_of_last = 0
    for start, end, number in name_places:
        pieces += [plain.text[end_of_last:start], chr(FIRST_NAME + number)]
        end_of_last = end
    text = "".join([*pieces, plain.text[end_of_last:]])

    names = len(example.names)
    keys = list(map(name_key, example.names))
    persons = []
    for number in range(items):
        # Persons of equal names have one character in the text, that of the first of them, so their
        # items get its number. If the answer is no list, a case without names has one item: 0.
        persons.append(keys.index(keys[number]) if number < names else number)

    ends = [found.end() for found in CLAUSE_END.finditer(text)]
    bounds = [0, *ends, len(text)]
    clauses: dict[str, list[tuple[int, int]]] = defaultdict(list)  # character of a name -> clauses
    # At least the first character: without names, the range would end before it starts, an error.
    any_name = re.compile(f"[{chr(FIRST_NAME)}-{chr(FIRST_NAME + max(1, names) - 1)}]")
    for found in any_name.finditer(text):
        number = bisect_right(ends, found.start())
        clause = (bounds[number], bounds[number + 1])
        of_name = clauses[found[0]]
        if of_name[-1:] != [clause]:  # a clause may name a person twice
            of_name.append(clause)
    own_bounds = [clauses[chr(FIRST_NAME + person)] for person in persons]
    own = ["".join(text[start:end] for start, end in of_item) for of_item in own_bounds]
    return MarkedCase(text, names, persons, own, own_bounds, plain, name_places)


def views(cases: Sequence[MarkedCase]) -> tuple[list[Hashes], list[Hashes]]:
    """Return the n-grams of the whole text of each case, and those of each item's own clauses.

    All names are masked. With the own clauses go tokens for the item's position in its list.
    """
    texts = [Text(case.text, case.names) for case in cases]
    for case in cases:
        items = len(case.own)
        for number, own in enumerate(case.own):
            place = f"place {min(number, MANY_PERSONS - 1)}"
            of = f"of {min(items, MANY_PERSONS)}"
            last = f"last {number == items - 1}"
            texts.append(Text(own, case.names, case.persons[number], (place, of, last)))
    hashes = grams(texts)
    return hashes[: len(cases)], hashes[len(cases) :]


def facts(case: MarkedCase, evidence: Callable[[str], Sequence[float]]) -> list[list[float]]:
    """Return for each item its `PLACES`, and the evidence in the whole text and in its own clauses.

    `evidence` turns a text into numbers, such as its largest amount of money.
    """
    text = case.text
    items = len(case.own)
    length = max(1, len(text))
    of_case = evidence(text)
    rows = []
    for number, own in enumerate(case.own):
        name = chr(FIRST_NAME + case.persons[number])  # the text has it in place of the name
        places = {
            "number": number,
            "of": items,
            "place": number / max(1, items - 1),
            "length": length,
            "own length": len(own),
            "named": text.count(name),
            "first named": text.find(name) / length,
        }
        in_order = [places[fact] for fact in PLACES]
        rows.append([*in_order, *of_case, *evidence(own)])
    return rows


def how_known(shares: ArrayLike, usual_share: float) -> Array:
    """Return from 0 to 1 how far each text is known, by the share of its n-grams with a weight.

    A text with `usual_share` or more is fully known: 1. If that is 0, nothing was learnt from
    words, and every text counts as known.
    """
    if usual_share == 0:
        return np.ones(np.shape(shares))
    return np.minimum(1, np.asarray(shares) / usual_share)


@dataclass(frozen=True)
class View:
    """The n-grams of one view that have a weight."""

    kept: Hashes  # their hashes, ascending, [columns]
    idf: NDArray[np.float32]  # inverse document frequencies, [columns]

    def rows_and_shares(self, texts: Sequence[Hashes]) -> tuple[csr_array, Array]:
        """Return the vectors of texts, [texts, columns]: sublinear TF-IDF, each of length 1.

        Also return the share of each text's distinct n-grams that have a column, or 0, [texts].
        """
        text_of, distinct, counts = distinct_grams(texts)
        places, is_kept = places_among(self.kept, distinct)
        columns = places[is_kept]
        row_of = text_of[is_kept]
        values = (1 + np.log(counts[is_kept])) * self.idf[columns]
        lengths = np.sqrt(np.bincount(row_of, values * values, minlength=len(texts)))
        values /= np.maximum(lengths, 1e-9)[row_of]
        starts = np.searchsorted(row_of, np.arange(len(texts) + 1))
        # scikit-learn takes 32-bit indices only.
        parts = (values.astype(np.float32), columns.astype(np.int32), starts.astype(np.int32))
        rows = csr_array(parts, shape=(len(texts), len(self.kept)))
        shares = np.diff(starts) / np.maximum(1, np.bincount(text_of, minlength=len(texts)))
        return rows, shares


def distinct_grams(texts: Sequence[Hashes]) -> tuple[Array, Hashes, Array]:
    """Return the distinct n-grams of each text, ascending: number of the text, hash, count."""
    text_of = np.repeat(np.arange(len(texts), dtype=np.uint64), list(map(len, texts)))
    hashes = np.concatenate(texts).astype(np.uint64)
    # One sort of numbers with the text in the upper 32 bits and the hash in the lower ones.
    both, counts = np.unique(text_of << np.uint64(32) | hashes, return_counts=True)
    numbers = (both >> np.uint64(32)).astype(np.int64)
    return numbers, both.astype(np.uint32), counts
