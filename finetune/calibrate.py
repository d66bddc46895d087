"""Calibrate the scores of the text classifier: a scale and a shift, by cross-fitted scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array

from panjue.eval.classifier import LabelField
from panjue.eval.scaling import MIN_SCALED, platt
from panjue.finetune.second_stage import FOLDS


@dataclass(frozen=True)
class FirstStage:
    """The regressions of one field."""

    field: LabelField
    gold: NDArray[np.bool_]  # [items, labels]
    calibrates: NDArray[np.bool_]
    """Whether the calibration is fitted on an item, [items]."""
    scores: NDArray[np.float32]
    """By regressions that did not see the item's fold, [views, items, labels]."""
    weights: Sequence[csr_array]
    """By view, [columns, labels]: the mean of these regressions. One regression of all items would
    be surer of itself than those on whose scores the second stage is fitted."""
    bias: NDArray[np.float32]  # [labels]


def calibrated_apart(stage: FirstStage, fold: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the probabilities of cross-fitted scores, each calibrated without its own fold.

    In texts that are easy to tell apart, the calibration depends on a few cases: one of them would
    find its own answer in it.
    """
    scores = stage.scores.sum(0)
    result = np.zeros(scores.shape)
    for k in range(FOLDS):
        in_fold = fold == k
        used = stage.calibrates & ~in_fold
        scale, shift = fit_calibration(scores[used], stage.gold[used], stage.field.is_set)
        calibrated = replace(stage.field, scale=scale, shift=shift)
        result[in_fold] = calibrated.probabilities(scores[in_fold])
    return result


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
