"""Confidences in the model's answers follow how often it was right on held-out cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.finetune.classifier.calibration import (
    LEAST_SCALE,
    UNSURE,
    FieldAnswer,
    calibrated,
    calibration_of,
    confidence_in,
    platt,
    temperature,
)


def test_confidences_follow_how_often_the_model_was_right() -> None:
    def judged(field: str, agreement: str, chance: float) -> FieldAnswer:
        return FieldAnswer(0, field, None, agreement, chance)

    agreed = judged("penalty", "agree", 0.5)
    differed = judged("penalty", "differ", 0.1)
    few = judged("charges", "agree", 0.5)
    field_answers = [(agreed, n % 10 > 0) for n in range(100)]
    field_answers += [(differed, n % 10 > 1) for n in range(100)]
    field_answers += [(few, True)] * 49
    field_answers += [(judged("articles", "agree", n / 100), True) for n in range(1, 100)]
    calibration = calibration_of(field_answers)
    assert confidence_in(calibration, agreed) == pytest.approx(0.9, abs=0.01)
    assert confidence_in(calibration, differed) == pytest.approx(0.8, abs=0.01)
    assert confidence_in(calibration, judged("penalty", "agree", 0.6)) >= confidence_in(
        calibration, agreed
    )
    assert confidence_in(calibration, judged("penalty", "", 0.5)) == 0.5, (
        "the classifier's own answer"
    )
    assert confidence_in(calibration, few) == 0.5, "too few to say"
    never_wrong = confidence_in(calibration, judged("articles", "agree", 0.3))
    assert 0.9 < never_wrong < 1, "but not certain"


def test_doubt_is_never_thrown_away() -> None:
    """Where the model was right on nearly all cases, whatever the classifier thought of them."""
    chances = [0.001 + 0.998 * n / 499 for n in range(500)]
    answers = [(FieldAnswer(0, "penalty", None, "agree", chance), True) for chance in chances]
    unsure = (FieldAnswer(0, "penalty", None, "agree", 0.999), False)
    calibration = calibration_of([*answers, unsure])
    scale, _ = calibration["penalty"]["agree"]
    assert scale >= LEAST_SCALE

    def confidence(chance: float) -> float:
        return confidence_in(calibration, FieldAnswer(0, "penalty", None, "agree", chance))

    assert 1 - confidence(1e-6) > 2 * (1 - confidence(0.5)) > 2.5 * (1 - confidence(0.999))


@pytest.mark.parametrize("gap", [1e-3, 1, 1e3])
def test_of_scores_that_separate_all_items_the_scale_has_an_end(gap: float) -> None:
    """With Platt's targets the best probabilities of 60 right and 40 wrong ones are the targets."""
    is_right = np.arange(100) < 60
    scaled = calibrated(
        np.where(is_right, gap, -gap), *platt(np.where(is_right, gap, -gap), is_right)
    )
    assert scaled[is_right] == pytest.approx(61 / 62, abs=1e-3)
    assert scaled[~is_right] == pytest.approx(1 / 42, abs=1e-3)
    of_classes = np.eye(2, dtype=bool)[is_right.astype(int)]
    scale = temperature(of_classes * gap, of_classes)
    assert 1 / (1 + np.exp(-scale * gap)) == pytest.approx(101 / 102, abs=1e-3)


@pytest.mark.parametrize("is_right", [True, False])
def test_scores_that_are_all_right_or_all_wrong_have_a_scale(is_right: bool) -> None:
    scaled = calibrated(np.ones(60), *platt(np.ones(60), np.full(60, is_right)))
    assert scaled == pytest.approx(61 / 62 if is_right else 1 / 62, abs=1e-3)
    assert platt(np.ones((60, 0)), np.ones((60, 0), bool)) == (1, 0)


@given(st.floats(-1e300, 1e300), st.floats(0, 1))
def test_no_probability_is_0_or_1_and_no_confidence_nearly(logit: float, chance: float) -> None:
    assert 0 < calibrated(logit, 1, 0) < 1
    for calibration in ({}, {"penalty": {"agree": (5.0, 9.0)}}):
        confidence = confidence_in(calibration, FieldAnswer(0, "penalty", None, "agree", chance))
        assert UNSURE <= confidence <= 1 - UNSURE
