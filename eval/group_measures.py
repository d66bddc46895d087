"""Groups, attributes, and the measures over them (Chalkidis et al., 2022)."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import entropy

from panjue.prompts.labels import Labels

FREQUENCY_BANDS = ((100, "100 and more"), (10, "10 to 99"), (1, "1 to 9"), (0, "never"))

Classes = frozenset[str]


@dataclass(frozen=True)
class Group:
    """One group of one attribute.

    Attributes:
        n: Its test examples.
        value: The metric over them; NaN if it has nothing to score there, and then the group is
            left out of all numbers over groups.
        low, high: The 95% bootstrap interval of `value`.
        flagged: It has too few examples to count for mean, disparity, worst and gap.
        train: Training examples of this group (representation inequality); None if unknown.
        shift: KL divergence of its training from its test class distribution, add-one smoothed,
            in nats (label shift).
        worst_class: Its gold class with the lowest F1.
        worst_class_share: Share of its test examples with that class (worst-class influence).
        unweighted: All its examples have weight 0, so `value` is an unweighted mean.
    """

    n: int
    value: float
    low: float
    high: float
    flagged: bool
    train: int | None = None
    shift: float | None = None
    worst_class: str | None = None
    worst_class_share: float | None = None
    unweighted: bool = False


@dataclass(frozen=True)
class Attribute:
    """One attribute; its numbers are over its groups that are not flagged.

    Mean and worst are None without a group, disparity and gap with fewer than two groups.

    Attributes:
        mean: Mean of the groups' values (FairLex's mF1).
        disparity: Their population standard deviation (group disparity, GD).
        worst: The lowest value (mF1_W), that of `worst_group`.
        gap: The highest value minus the lowest.
        unknown: Number of examples without a known group; they are in no group.
        absent: Groups in the training file that the test file does not have.
        groups: Name -> group, the largest first.
    """

    mean: float | None
    disparity: float | None
    worst: float | None
    worst_group: str | None
    gap: float | None
    unknown: int
    absent: list[str]
    groups: dict[str, Group]


class ClassCounts:
    """The classes of every example in gold, in the submission, and in both, in flat arrays."""

    def __init__(self) -> None:
        """Start without examples."""
        self.names: dict[str, int] = {}
        self._pairs = [(array("q"), array("q")) for _ in range(3)]

    def add(self, row: int, gold: Classes, predicted: Classes) -> None:
        """Append the classes of example number `row`."""
        kinds = (gold, predicted, gold & predicted)
        for (rows, numbers), classes in zip(self._pairs, kinds, strict=True):
            rows.extend([row] * len(classes))
            numbers.extend(self.names.setdefault(name, len(self.names)) for name in classes)

    def by_group(self, groups: NDArray[np.int32], size: int) -> list[list[Counter[str]]]:
        """Return for every group the counts in gold, in the submission, and in both."""
        names, width = list(self.names), len(self.names)
        counts = [[Counter[str]() for _ in self._pairs] for _ in range(size)]
        for kind, (rows, numbers) in enumerate(self._pairs):
            flat = np.bincount(groups[np.asarray(rows)] * width + np.asarray(numbers))
            for place in np.flatnonzero(flat).tolist():
                counts[place // width][kind][names[place % width]] = int(flat[place])
        return counts


def frequency_band(classes: Iterable[str], labels: Labels) -> str:
    """Return the frequency band, in training, of the rarest of some classes."""
    counts = next(iter(labels.counts.values()), {})  # the first field has the classes
    rarest = min(counts.get(name, 0) for name in classes)
    return next(band for minimum, band in FREQUENCY_BANDS if rarest >= minimum)


def worst_class(gold: Counter[str], predicted: Counter[str], correct: Counter[str]) -> str | None:
    """Return the gold class with the lowest F1; of equal ones the first by name."""
    return min(gold, key=lambda n: (2 * correct[n] / (gold[n] + predicted[n]), n), default=None)


def divergence(train: Mapping[str, int], test: Mapping[str, int], support: Sequence[str]) -> float:
    """Return the Kullback-Leibler divergence of the train from the test distribution, in nats.

    Both are add-one smoothed over `support`, the classes of all groups.
    """
    smoothed = np.array([[n.get(name, 0) + 1.0 for name in support] for n in (train, test)])
    return float(entropy(*smoothed))  # `entropy` scales both to sum to 1
