"""Platt scaling: of scores into probabilities, and of these where the model answers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit

MIN_SCALED = 50
"""Items or judgments that a scaling needs; with fewer the probabilities stay as they are."""

TINY = 1e-9
"""No probability counts as less, and none as closer to 1."""

FOLDS = 4


def platt(
    logits: NDArray[Any], gold: NDArray[Any], weights: NDArray[Any] | None = None
) -> tuple[float, float]:
    """Return the scale, which is positive, and shift of logits with the lowest log loss.

    `gold` has the probability that each is right: 0 and 1, or what is known of it. `weights` are
    those of the items if all logits are not alike.
    """
    right = gold.astype(float)

    def loss(parameters: NDArray[Any]) -> float:
        log_scale, shift = parameters
        scaled_logits = logits * np.exp(log_scale) + shift
        if_right = np.logaddexp(0, -scaled_logits)
        if_wrong = np.logaddexp(0, scaled_logits)
        return float(np.average(right * if_right + (1 - right) * if_wrong, weights=weights))

    log_scale, shift = minimize(loss, np.zeros(2), method="Nelder-Mead").x
    return float(np.exp(log_scale)), float(shift)


def fit_calibration(
    scores: NDArray[Any], gold: NDArray[np.bool_], is_set: bool
) -> tuple[float, float]:
    """Return the scale, which is positive, and shift of the scores with the lowest log loss."""
    if len(scores) < MIN_SCALED:
        return 1.0, 0.0
    if is_set:
        return platt(scores, gold)

    def loss(log_scale: NDArray[Any]) -> float:
        logits = scores * np.exp(log_scale)
        return float(np.mean(np.logaddexp.reduce(logits, axis=1) - logits[gold]))

    [log_scale] = minimize(loss, np.zeros(1), method="Nelder-Mead").x
    return float(np.exp(log_scale)), 0.0


Scaling = Mapping[str, Mapping[str, tuple[float, float]]]
"""Field -> `agree` or `differ`, as model and classifier do -> scale and shift of the log-odds."""


class Judgment(NamedTuple):
    """What was answered to one field of one item, as the text classifier sees it."""

    item: int  # its number in the answer
    field: str
    value: Any  # a list of labels, or one class
    agreement: str  # `agree` or `differ`, as model and classifier do; empty: the latter answered
    chance: float  # the classifier's probability that exactly this value is right


def scaling_of(
    judgments: Iterable[tuple[Judgment, bool]],
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the scaling that fits judgments of the model best; each has whether it is right.

    Platt's targets in place of 0 and 1 keep a group without an error from being certain (Platt,
    "Probabilistic outputs for support vector machines", 1999).
    """
    groups: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for judgment, is_right in judgments:
        groups[judgment.field, judgment.agreement].append((judgment.chance, is_right))
    scaling: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for (name, agreement), group in groups.items():
        if len(group) < MIN_SCALED:
            continue
        chances = np.array([chance for chance, _ in group])
        correct = np.array([is_right for _, is_right in group])
        right = correct.sum()
        wrong = len(group) - right
        targets = np.where(correct, (right + 1) / (right + 2), 1 / (wrong + 2))
        scaling[name][agreement] = platt(log_odds(chances), targets)
    return dict(scaling)


def scaled_chance(scaling: Scaling, judgment: Judgment) -> float:
    """Return the chance of a judgment after scaling; unchanged where there is no scaling for it."""
    of_field = scaling.get(judgment.field, {})
    if judgment.agreement not in of_field:
        return judgment.chance
    scale, shift = of_field[judgment.agreement]
    return float(expit(scale * log_odds(judgment.chance) + shift))


def log_odds(chance: ArrayLike) -> NDArray[Any]:
    return np.asarray(logit(np.clip(chance, TINY, 1 - TINY)))
