"""Samplers that depend only on seed and epoch, so that a resumed epoch has the same order."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices


class ByEpoch(Sampler[int]):
    """Samples anew in each epoch. Transformers' samplers use a random state lost on resuming."""

    def __init__(
        self, size: int, draw: Callable[[torch.Generator], Iterable[int]], seed: int
    ) -> None:
        """Keep the number of examples and the function that samples their indices."""
        self._size, self._draw, self._seed, self._epoch = size, draw, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Yield indices of examples."""
        yield from self._draw(torch.Generator().manual_seed(self._seed * 100_003 + self._epoch))


def balanced(groups: Sequence[int], seed: int) -> ByEpoch:
    """Sample groups equally often: as many examples as there are, with replacement.

    Args:
        groups: Group index of each example.
        seed: The same for all epochs.
    """
    counts = torch.bincount(torch.tensor(groups)).double()
    weights = (1 / counts)[torch.tensor(groups)]

    def draw(generator: torch.Generator) -> list[int]:
        drawn = torch.multinomial(weights, len(groups), True, generator=generator)
        return [int(index) for index in drawn]

    return ByEpoch(len(groups), draw, seed)


def by_length(lengths: Sequence[int], step: int, seed: int) -> ByEpoch:
    """Sample examples of similar length together.

    Args:
        lengths: Length of each example.
        step: Number of examples in one step.
        seed: The same for all epochs.
    """

    def draw(generator: torch.Generator) -> list[int]:
        drawn: list[int] = get_length_grouped_indices(lengths, step, generator=generator)
        return drawn

    return ByEpoch(len(lengths), draw, seed)
