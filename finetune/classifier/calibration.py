"""Platt scaling. It turns scores into probabilities, and corrects them where the model answers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit

MIN_SCALED = 50
"""Items or field answers that a scaling needs; with fewer, probabilities stay as they are."""

TINY = 1e-9
"""Probabilities are clipped to this distance from 0 and from 1."""

UNSURE = 1e-6
"""Confidences in answers are clipped to this distance from 0 and from 1."""

LEAST_SCALE = 0.1
"""Smallest scale of a confidence's log-odds, so that calibration keeps doubt. With a scale near 0,
a chance of 1e-6 and one of .999 may both become .9965 if the model was right on nearly all
cases."""

UNSCALED = (1.0, 0.0)
"""The scale and shift that change nothing."""

FOLDS = 4


def platt(
    logits: NDArray[Any],
    is_right: NDArray[np.bool_],
    weights: NDArray[Any] | None = None,
    *,
    least_scale: float = 0.0,
) -> tuple[float, float]:
    """Return the positive scale and the shift of logits that give the lowest log loss.

    The targets are Platt's instead of 0 and 1. With 0 and 1, the scale of logits that separate
    right from wrong without an error would grow without end ("Probabilistic outputs for support
    vector machines", 1999).

    Args:
        logits: Scores, of any shape.
        is_right: Which logits belong to right answers; of the same shape.
        weights: Weight of each logit, of the same shape; None if all count the same.
        least_scale: Lower bound of the scale.
    """
    from scipy.optimize import minimize  # half a second; answering does not need it

    if not logits.size:
        return UNSCALED
    if weights is None:
        weights = np.ones(logits.shape)
    right = weights[is_right].sum()
    wrong = weights[~is_right].sum()
    targets = np.where(is_right, (right + 1) / (right + 2), 1 / (wrong + 2))

    def loss(parameters: NDArray[Any]) -> float:
        log_scale, shift = parameters
        scaled_logits = logits * max(np.exp(log_scale), least_scale) + shift
        if_right = np.logaddexp(0, -scaled_logits)
        if_wrong = np.logaddexp(0, scaled_logits)
        return float(np.average(targets * if_right + (1 - targets) * if_wrong, weights=weights))

    log_scale, shift = minimize(loss, np.zeros(2), method="Nelder-Mead").x
    return max(float(np.exp(log_scale)), least_scale), float(shift)


def temperature(scores: NDArray[Any], gold: NDArray[np.bool_]) -> float:
    """Return the scale of class scores, [items, classes], that gives the lowest log loss.

    As in `platt`, no target is certain: each class gets one more item than it has.
    """
    from scipy.optimize import minimize  # see `platt`

    items, classes = scores.shape
    targets = (items * gold + 1) / (items + classes)

    def loss(log_scale: NDArray[Any]) -> float:
        logits = scores * np.exp(log_scale)
        return float(np.mean(np.logaddexp.reduce(logits, axis=1) - (targets * logits).sum(axis=1)))

    [log_scale] = minimize(loss, np.zeros(1), method="Nelder-Mead").x
    return float(np.exp(log_scale))


def fit_calibration(
    scores: NDArray[Any], gold: NDArray[np.bool_], is_set: bool
) -> tuple[float, float]:
    """Return the positive scale and the shift of the scores that give the lowest log loss."""
    if len(scores) < MIN_SCALED:
        return UNSCALED
    if is_set:
        return platt(scores, gold)
    return temperature(scores, gold), 0.0


def calibrated(logits: ArrayLike, scale: float, shift: float) -> NDArray[np.float64]:
    """Return the probabilities of logits after scaling; no probability is 0 or 1."""
    scaled_logits = np.asarray(logits, np.float64) * scale + shift
    result: NDArray[np.float64] = np.clip(expit(scaled_logits), TINY, 1 - TINY)
    return result


Calibration = Mapping[str, Mapping[str, tuple[float, float]]]
"""Field -> whether model and classifier `agree` or `differ` -> scale and shift of the log-odds."""


class FieldAnswer(NamedTuple):
    """The answer to a field of an item, and the text classifier's probability that it is right."""

    item: int  # its number in the answer
    field: str
    value: Any  # a list of labels, or one class
    agreement: str  # do model and classifier `agree` or `differ`; empty: the classifier answered
    chance: float  # the classifier's probability that exactly this value is right


def calibration_of(
    field_answers: Iterable[tuple[FieldAnswer, bool]],
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the scalings fitted on field answers of the model, each with whether it is right."""
    groups: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for field_answer, is_right in field_answers:
        groups[field_answer.field, field_answer.agreement].append((field_answer.chance, is_right))
    calibration: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for (name, agreement), group in groups.items():
        if len(group) < MIN_SCALED:
            continue
        believed = np.array([chance for chance, _ in group])
        correct = np.array([is_right for _, is_right in group])
        calibration[name][agreement] = platt(log_odds(believed), correct, least_scale=LEAST_SCALE)
    return dict(calibration)


def confidence_in(calibration: Calibration, field_answer: FieldAnswer) -> float:
    """Return the confidence in an answer to a field: its chance, calibrated if possible."""
    chance = field_answer.chance
    of_field = calibration.get(field_answer.field, {})
    if field_answer.agreement in of_field:
        chance = float(calibrated(log_odds(chance), *of_field[field_answer.agreement]))
    return min(max(chance, UNSURE), 1 - UNSURE)


def log_odds(chance: ArrayLike) -> NDArray[Any]:
    return np.asarray(logit(np.clip(chance, TINY, 1 - TINY)))
