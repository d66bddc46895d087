"""Orders of examples that depend on seed and epoch alone: a resumed epoch is drawn as it was."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices


class ByEpoch(Sampler[int]):
    """Draws anew in every epoch. Transformers' own draw from a state that resuming has not."""

    def __init__(
        self, size: int, draw: Callable[[torch.Generator], Iterable[int]], seed: int
    ) -> None:
        """Take the number of examples, and what draws as many of their places."""
        self._size, self._draw, self._seed, self._epoch = size, draw, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is next."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Yield places of examples."""
        yield from self._draw(torch.Generator().manual_seed(self._seed * 100_003 + self._epoch))


def balanced(groups: Sequence[int], seed: int) -> ByEpoch:
    """Draw every group equally often: as many examples as there are, with replacement.

    Args:
        groups: Of every example, the number of its group.
        seed: Of all epochs.
    """
    counts = torch.bincount(torch.tensor(groups)).double()
    chances = (1 / counts)[torch.tensor(groups)]

    def draw(generator: torch.Generator) -> list[int]:
        drawn = torch.multinomial(chances, len(groups), True, generator=generator)
        return [int(place) for place in drawn]

    return ByEpoch(len(groups), draw, seed)


def by_length(lengths: Sequence[int], step: int, seed: int) -> ByEpoch:
    """Draw examples of like length together.

    Args:
        lengths: Of every example.
        step: Examples that belong together.
        seed: Of all epochs.
    """

    def draw(generator: torch.Generator) -> list[int]:
        drawn: list[int] = get_length_grouped_indices(lengths, step, generator=generator)
        return drawn

    return ByEpoch(len(lengths), draw, seed)
