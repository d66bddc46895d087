"""Calibrate the scores of the text classifier: a scale and a shift, by cross-fitted scores."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from panjue.eval.classifier import LabelField
from panjue.eval.scaling import MIN_SCALED, platt
from panjue.finetune.second_stage import FOLDS


def calibrated_apart(
    field: LabelField,
    scores: NDArray[Any],
    gold: NDArray[np.bool_],
    calibrates: NDArray[np.bool_],
    fold: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the probabilities of cross-fitted scores, each calibrated without its own fold.

    In texts that are easy to tell apart, the calibration depends on a few cases: one of them would
    find its own answer in it.
    """
    result = np.zeros(scores.shape)
    for k in range(FOLDS):
        aside = fold == k
        used = calibrates & ~aside
        scale, shift = fit_calibration(scores[used], gold[used], field.is_set)
        of_fold = replace(field, scale=scale, shift=shift)
        result[aside] = of_fold.probabilities(scores[aside])
    return result


def fit_calibration(
    scores: NDArray[Any], gold: NDArray[np.bool_], is_set: bool
) -> tuple[float, float]:
    """Return the scale, which is positive, and shift of the scores with the lowest log loss."""
    if len(scores) < MIN_SCALED:
        return 1.0, 0.0
    if is_set:
        return platt(scores, gold)

    def loss(of: NDArray[Any]) -> float:
        logits = scores * np.exp(of[0])
        return float(np.mean(np.logaddexp.reduce(logits, axis=1) - logits[gold]))

    [log_scale] = minimize(loss, np.zeros(1), method="Nelder-Mead").x
    return float(np.exp(log_scale)), 0.0
