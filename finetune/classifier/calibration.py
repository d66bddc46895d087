"""Turn scores into probabilities, and say how likely an answer of the model is right.

Answers of the model are calibrated by field and agreement group. The group says whether the model
and the text classifier agree on the answer or differ, and whether the model's log-probability of it
is known. The four groups are `agree`, `differ`, `agree, with logprob` and `differ, with logprob`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit

from panjue.prompts.plumbing.records import WITH_LOGPROB, ConfidenceWeights

MIN_SCALED = 50
"""Items that a scaling needs; with fewer, probabilities stay as they are."""

TINY = 1e-9
"""Probabilities are clipped to this distance from 0 and from 1."""

UNSURE = 1e-6
"""Confidences in answers are clipped to this distance from 0 and from 1."""

LEAST_SCALE = 0.1
"""Smallest weight of the classifier's log-odds in a confidence, so that calibration keeps doubt.
With a weight near 0, a chance of 1e-6 and one of .999 may both become .9965 if the model was right
on nearly all cases."""

UNSCALED = (1.0, 0.0)
"""The scale and shift that change nothing."""

FOLDS = 4


def platt(
    logits: NDArray[Any],
    is_right: NDArray[np.bool_],
    weights: NDArray[Any] | None = None,
) -> tuple[float, float]:
    """Return the positive scale and the shift of logits that give the lowest log loss.

    The targets are Platt's instead of 0 and 1. With 0 and 1, the scale of logits that separate
    right from wrong without an error would grow without end ("Probabilistic outputs for support
    vector machines", 1999). Logits, `is_right` and weights have the same shape, whatever it is;
    without weights, all logits count the same.
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
        scaled_logits = logits * np.exp(log_scale) + shift
        if_right = np.logaddexp(0, -scaled_logits)
        if_wrong = np.logaddexp(0, scaled_logits)
        return float(np.average(targets * if_right + (1 - targets) * if_wrong, weights=weights))

    log_scale, shift = minimize(loss, np.zeros(2), method="Nelder-Mead").x
    return float(np.exp(log_scale)), float(shift)


def temperature(scores: NDArray[Any], gold: NDArray[np.bool_]) -> float:
    """Return the scale of class scores, [items, classes], that gives the lowest log loss.

    As in `platt`, no target is 0 or 1: with 98 items of 2 classes, they are 0.99 and 0.01.
    """
    from scipy.optimize import minimize  # half a second; answering does not need it

    items, classes = scores.shape
    targets = (items * gold + 1) / (items + classes)  # those of an item sum up to 1

    def loss(log_scale: NDArray[Any]) -> float:
        logits = scores * np.exp(log_scale)
        return float(np.mean(np.logaddexp.reduce(logits, axis=1) - (targets * logits).sum(axis=1)))

    [log_scale] = minimize(loss, np.zeros(1), method="Nelder-Mead").x
    return float(np.exp(log_scale))


def fit_calibration(
    scores: NDArray[Any], gold: NDArray[np.bool_], is_set: bool
) -> tuple[float, float]:
    """Return the positive scale and the shift of the scores that give the lowest log loss.

    Scores and gold are [items, labels]. Classes have no shift: it would change nothing.
    """
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


Calibration = Mapping[str, Mapping[str, ConfidenceWeights]]
"""Field -> group of answers (`FieldAnswer.group`) -> the weights of their confidences."""

UNFITTED = ConfidenceWeights(classifier=1.0, model=0.0, shift=0.0)
"""The weights that leave the classifier's probability as it is, and the mean of the prior."""

PRIOR_DEVIATION = 1.0
"""Standard deviation of the normal prior of each weight."""


class FieldAnswer(NamedTuple):
    """The answer to a field of an item, and how likely it is right to classifier and model."""

    item: int  # its number in the answer
    field: str
    value: Any  # a list of labels, or one class
    agreement: str  # do model and classifier `agree` or `differ`; empty: the classifier answered
    chance: float  # the classifier's probability that exactly this value is right
    logprob: float | None = None  # the model's own, of exactly this value; None: it is not known

    @property
    def group(self) -> str:
        """Return its group of answers with one calibration: `agree` or `agree, with logprob`."""
        return self.agreement if self.logprob is None else self.agreement + WITH_LOGPROB


def calibration_of(
    field_answers: Iterable[tuple[FieldAnswer, bool]],
) -> dict[str, dict[str, ConfidenceWeights]]:
    """Return field -> group -> weights, fitted on answers to fields and whether each is right.

    Answers of the classifier itself are ignored. Those of the model with a log-probability are also
    fitted without it, in another group, for replies that have none.
    """
    by_field: dict[str, list[tuple[FieldAnswer, bool]]] = defaultdict(list)
    for field_answer, is_right in field_answers:
        if field_answer.agreement:  # the model answered
            by_field[field_answer.field].append((field_answer, is_right))
    calibration = {}
    for name, answers in by_field.items():
        with_logprob = [answer for answer in answers if answer[0].logprob is not None]
        without = [(answer._replace(logprob=None), is_right) for answer, is_right in answers]
        calibration[name] = fit_weights(without) | fit_weights(with_logprob)
    return calibration


def fit_weights(answers: Sequence[tuple[FieldAnswer, bool]]) -> dict[str, ConfidenceWeights]:
    """Return group -> weights, by a logistic regression with a normal prior around `UNFITTED`.

    The log-odds that an answer is right are a weighted sum of the classifier's log-odds and the
    model's, plus a shift that depends on the group. Either all given answers have a
    log-probability, or none of them has one.
    """
    from scipy.optimize import minimize  # half a second; answering does not need it

    groups = sorted({answer.group for answer, _ in answers})
    if not groups:
        return {}
    of_classifier = log_odds([answer.chance for answer, _ in answers])
    of_model = np.array([model_log_odds(answer) for answer, _ in answers])
    is_in = np.array([[answer.group == group for group in groups] for answer, _ in answers])
    features = np.column_stack([of_classifier, of_model, is_in])  # [answers, 2 + groups]
    signs = np.array([1 if is_right else -1 for _, is_right in answers])
    means = np.zeros(features.shape[1])
    means[0] = UNFITTED.classifier
    bounds = [(LEAST_SCALE, np.inf), (0.0, np.inf), *[(-np.inf, np.inf)] * len(groups)]

    def loss(weights: NDArray[Any]) -> float:
        from_prior = ((weights - means) ** 2).sum() / (2 * PRIOR_DEVIATION**2)
        return float(np.logaddexp(0, -signs * (features @ weights)).sum() + from_prior)

    classifier, model, *shifts = minimize(loss, means, method="L-BFGS-B", bounds=bounds).x
    return {
        group: ConfidenceWeights(classifier=classifier, model=model, shift=shift)
        for group, shift in zip(groups, shifts, strict=True)
    }


def confidence_in(calibration: Calibration, field_answer: FieldAnswer) -> float:
    """Return the confidence in an answer to a field, from 0 to 1, calibrated if possible.

    If no weights were fitted for `agree, with logprob`, those of `agree` are taken. They ignore the
    log-probability, as their `model` is 0. The same holds for `differ`. An answer of the classifier
    is in no group, and keeps the classifier's probability.
    """
    of_field = calibration.get(field_answer.field, {})
    without_logprob = of_field.get(field_answer.agreement, UNFITTED)
    weights = of_field.get(field_answer.group, without_logprob)
    of_classifier = weights.classifier * log_odds(field_answer.chance)
    of_model = weights.model * model_log_odds(field_answer)
    chance = expit(of_classifier + of_model + weights.shift)
    return float(np.clip(chance, UNSURE, 1 - UNSURE))


def model_log_odds(field_answer: FieldAnswer) -> float:
    """Return the model's own log-odds of an answer; 0, which has no effect, if not known."""
    if field_answer.logprob is None:
        return 0.0
    return float(log_odds(np.exp(field_answer.logprob)))


def log_odds(chance: ArrayLike) -> NDArray[Any]:
    """Return log(p / (1 - p)) of probabilities, clipped so that it is finite."""
    return np.asarray(logit(np.clip(chance, TINY, 1 - TINY)))
