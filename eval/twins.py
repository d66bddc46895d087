"""Near twins: training cases with the text of a test case, exactly or almost word for word.

A text is compared by its n-grams: single tokens and pairs of neighbors, hashed to numbers. The
answers may be a vote of the runs of several trainings; then the cases of all are looked through.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from panjue.eval.metric_values import MetricValues, Summary, summarize
from panjue.finetune.classifier.features import marked
from panjue.finetune.classifier.grams import Hashes, Text, grams, places_among
from panjue.finetune.examples import check_files, trained_on
from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.plumbing.records import DATA, RunRecord
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task
from panjue.serve.decoding import BATCH, batches

NEAR = 0.8
"""Two texts are near twins if both have this share of the n-grams that either has."""

RAREST = 64
"""Number of a text's n-grams that serve to find its twin: those that are rarest in training. With
64, no twin of a text of up to 160 n-grams is missed."""

MOST_CASES = 100_000
"""Largest number of training cases whose n-grams are kept, 3 kB each."""


@dataclass(frozen=True)
class NearTwins:
    """The effect of near twins in the training on a score."""

    examples: int = 0  # number of examples with a near twin
    without: Summary | None = None  # scores of the others; None if all or none have twins
    unknown: str = ""  # why it is unknown which have one; else empty


class TwinCounter:
    """Collects which examples have a near twin among the cases of a training."""

    def __init__(self, trainings: Sequence[RunRecord], task: Task) -> None:
        """Read the cases of the trainings; if that fails, `found()` returns why."""
        self._finder = None
        self._unknown = ""  # why the cases of a training could not be read; else empty
        self._waiting: list[Example] = []
        self._has_twin: list[bool] = []  # of each example, in the order of `add`
        # The trainings of a vote mostly have the same data, which is read once.
        by_data = {dump(training.part(DATA)): training for training in trainings}.values()
        try:
            for training in by_data:
                check_files(training)
            examples = chain.from_iterable(trained_on(training, task) for training in by_data)
            self._finder = TwinFinder(examples)
        except UserError as error:
            self._unknown = str(error)

    def add(self, example: Example) -> None:
        """Add the next example. Twins are looked for once a whole batch is waiting."""
        if self._finder:
            self._waiting.append(example)
        if len(self._waiting) == BATCH:
            self._look()

    def _look(self) -> None:
        """Find out which of the waiting examples have a twin."""
        if self._finder and self._waiting:
            self._has_twin += self._finder.have_twins(self._waiting)
            self._waiting.clear()

    def found(self, values: MetricValues) -> NearTwins:
        """Return how many examples have a near twin, and the scores of the others.

        `values` has the metric values of all added examples. If their training could not be read,
        the result says why.
        """
        self._look()
        others = np.flatnonzero(~np.array(self._has_twin, bool))
        count = len(self._has_twin) - len(others)
        without = summarize(values, others) if count and len(others) else None
        if without and without.unweighted and values.weights.any():
            without = None  # only examples with twins have a weight: the others have no score
        return NearTwins(count, without, self._unknown)


class TwinFinder:
    """Finds texts that have a near twin among the texts of a training."""

    def __init__(self, examples: Iterable[Example]) -> None:
        """Keep the n-grams of the training's cases; UserError if there are too many."""
        self._texts: set[str] = set()
        self._grams: list[Hashes] = []
        for batch in batches(examples):
            self._texts.update(map(text_hash, batch))
            self._grams += distinct_grams_of(batch)
            if len(self._grams) > MOST_CASES:
                raise UserError(f"training has more than {MOST_CASES:,} cases")
        everything = np.concatenate([*self._grams, np.zeros(0, np.uint32)])
        self._known, self._texts_with = np.unique(everything, return_counts=True)
        columns = np.searchsorted(self._known, everything).astype(np.int32)
        starts = np.cumsum([0, *map(len, self._grams)])
        # 8 bits are enough: `have_twins` adds up at most `RAREST` of these ones for a case.
        ones = np.ones(len(columns), np.uint8)
        shape = (len(self._grams), len(self._known))
        # Stored by column, so that each n-gram leads to the cases that have it.
        self._cases = csc_array(csr_array((ones, columns, starts), shape=shape))

    def have_twins(self, examples: Sequence[Example]) -> list[bool]:
        """Say which of some hundred examples have a near twin.

        A twin is looked for among the cases that have at least half of the text's 64 rarest n-grams
        (`RAREST`). A twin lacks at most a fifth of the text's n-grams (`NEAR` is 0.8). If the text
        has 160, that is 32; even if all 32 are among the 64 rarest, the other 32 remain. No twin
        of a shorter text is missed either, and almost none of a longer one.
        """
        grams_of = distinct_grams_of(examples)
        rarest = [self._rarest(one) for one in grams_of]
        columns = np.concatenate(rarest)
        starts = np.cumsum([0, *map(len, rarest)])
        ones = np.ones(len(columns), np.uint8)
        wanted = csr_array((ones, columns, starts), shape=(len(rarest), len(self._known)))
        shared = csr_array(wanted @ self._cases.T)  # n-grams in both, [examples, cases]
        found = []
        for number, example in enumerate(examples):
            row = slice(shared.indptr[number], shared.indptr[number + 1])
            has_half = shared.data[row] >= len(rarest[number]) / 2
            candidates = shared.indices[row][has_half]
            is_same = text_hash(example) in self._texts
            shares = (share_of_both(grams_of[number], self._grams[case]) for case in candidates)
            found.append(is_same or any(share >= NEAR for share in shares))
        return found

    def _rarest(self, of_text: Hashes) -> NDArray[np.int32]:
        """Return the columns of a text's n-grams that fewest cases have, but at least one."""
        places, is_known = places_among(self._known, of_text)
        columns = places[is_known]
        order = np.argsort(self._texts_with[columns], kind="stable")
        rarest: NDArray[np.int32] = columns[order[:RAREST]].astype(np.int32)
        return rarest


def distinct_grams_of(examples: Sequence[Example]) -> list[Hashes]:
    """Return the distinct n-grams of texts, with masked names as for the text classifier."""
    texts = []
    for example in examples:
        case = marked(example, items=0)  # masks the names; the clauses of persons are not needed
        texts.append(Text(case.text, case.names))
    return [np.unique(hashes) for hashes in grams(texts)]


def share_of_both(one: Hashes, other: Hashes) -> float:
    """Return the number of n-grams in both texts divided by the number in either."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / max(1, len(one) + len(other) - both)
