"""A group of examples, an attribute of groups, and their measures (Chalkidis et al., 2022)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import entropy

from panjue.prompts.labels import Labels

BANDS = ((100, "100 and more"), (10, "10 to 99"), (1, "1 to 9"), (0, "never"))

Classes = frozenset[str]


@dataclass(frozen=True)
class Group:
    """One group of one attribute.

    Attributes:
        n: Its test examples.
        value: The metric over them, with `low` and `high`, its 95% bootstrap interval; NaN where
            they have nothing that it scores, and then they count for no number over groups.
        flagged: It has too few examples to count for mean, disparity, worst and gap.
        train: Training examples of this group (representation inequality); None where unknown.
        shift: KL divergence of its training from its test class distribution, add-one smoothed,
            in nats (label shift).
        worst_class: The class, of those it has in gold, with its lowest F1; `worst_class_share` is
            the share of its test examples that have that class (worst-class influence).
        recalls: Gold class -> share of its examples in this group that were given it, for classes
            of five or more; equal opportunity asks that these be alike (Hardt et al., NIPS 2016).
        error: Expected calibration error, the mean over the decided fields.
        unweighted: All its examples have weight 0, so that its value is a plain mean.
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
    recalls: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    unweighted: bool = False


@dataclass(frozen=True)
class Attribute:
    """One attribute; numbers are over its groups that are not flagged.

    Of no group there is no mean and no worst one, and of a single one no disparity and no gap.

    Attributes:
        mean: Of the groups' values (FairLex's mF1).
        disparity: Their population standard deviation (group disparity, GD).
        worst: The lowest of them (mF1_W), that of `worst_group`.
        gap: The highest less the lowest.
        recall_gap: The largest difference of a class's recall between two groups that have it.
        recall_class: That class.
        unknown: Examples whose group nobody knows; they are in no group here.
        absent: Groups that training has and the test file has not.
        groups: Name -> group, the largest first.
    """

    mean: float | None
    disparity: float | None
    worst: float | None
    worst_group: str | None
    gap: float | None
    recall_gap: float | None
    recall_class: str | None
    unknown: int
    absent: list[str]
    groups: dict[str, Group]


def frequency(classes: Iterable[str], labels: Labels) -> str:
    """Return the band of the rarest of some classes by how often training saw it."""
    counts = next(iter(labels.counts.values()), {})  # the first field is that of the classes
    rarest = min(counts.get(name, 0) for name in classes)
    return next(band for least, band in BANDS if rarest >= least)


def widest(groups: Sequence[Group]) -> tuple[str | None, float | None]:
    """Return the class whose recalls lie furthest apart between groups, and how far."""
    gaps = {}
    for name in sorted({name for group in groups for name in group.recalls}):
        found = [group.recalls[name] for group in groups if name in group.recalls]
        if len(found) > 1:
            gaps[name] = max(found) - min(found)
    widest_class = max(gaps, key=lambda name: gaps[name], default=None)
    return widest_class, None if widest_class is None else gaps[widest_class]


def worst_class(gold: Sequence[Classes], told: Sequence[Classes]) -> str | None:
    """Return the class with the lowest F1, of those that gold has; the first by name of equals."""
    wanted, given, right = (
        Counter(name for names in sets for name in names)
        for sets in (gold, told, [a & b for a, b in zip(gold, told, strict=True)])
    )
    return min(wanted, key=lambda n: (2 * right[n] / (wanted[n] + given[n]), n), default=None)


def divergence(train: Mapping[str, int], test: Mapping[str, int], support: Sequence[str]) -> float:
    """Return the Kullback-Leibler divergence of the train from the test distribution, in nats.

    Both are add-one smoothed over `support`, the classes of all groups.
    """
    counts = np.array([[of.get(name, 0) + 1.0 for name in support] for of in (train, test)])
    return float(entropy(*counts))  # which scales them to sum to 1
