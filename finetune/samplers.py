"""Samplers whose order depends only on seed and epoch, so that a resumed run has the same order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices


class EpochSampler(Sampler[int]):
    """Samples again in each epoch, with a generator seeded by seed and epoch.

    The samplers of transformers use a random state that is lost when a run resumes.
    """

    def __init__(
        self, size: int, draw: Callable[[torch.Generator], Iterable[int]], seed: int
    ) -> None:
        """Keep the number of examples and the function that samples their indices."""
        self._size, self._draw, self._seed, self._epoch = size, draw, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Yield indices of examples."""
        yield from self._draw(torch.Generator().manual_seed(self._seed * 100_003 + self._epoch))


def balanced_sampler(groups: Sequence[int], seed: int) -> EpochSampler:
    """Return a sampler that draws all groups equally often.

    It draws as many indices as there are examples, with replacement.

    Args:
        groups: Group index of each example.
        seed: Seed of the run, the same for all epochs.
    """
    counts = torch.bincount(torch.tensor(groups)).double()
    weights = (1 / counts)[torch.tensor(groups)]

    def draw(generator: torch.Generator) -> list[int]:
        drawn = torch.multinomial(weights, len(groups), True, generator=generator)
        return [int(index) for index in drawn]

    return EpochSampler(len(groups), draw, seed)


def length_sampler(lengths: Sequence[int], step: int, seed: int) -> EpochSampler:
    """Return a sampler that puts examples of similar length into the same step.

    Args:
        lengths: Length of each example.
        step: Number of examples in one step.
        seed: Seed of the run, the same for all epochs.
    """

    def draw(generator: torch.Generator) -> list[int]:
        drawn: list[int] = get_length_grouped_indices(lengths, step, generator=generator)
        return drawn

    return EpochSampler(len(lengths), draw, seed)


def row_lengths(rows: Any) -> list[int]:
    """Return the number of tokens of each row or pack."""
    if "length" in rows.column_names:
        return list(rows["length"])
    return [sum(inner) for inner in rows["seq_lengths"]]
