"""Confidences in the model's answers follow how often it was right on held-out cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.finetune.classifier.calibration import (
    UNSURE,
    Judgment,
    calibrated,
    platt,
    scaled_chance,
    scaling_of,
    temperature,
)


def test_confidences_follow_how_often_the_model_was_right() -> None:
    def judged(field: str, agreement: str, chance: float) -> Judgment:
        return Judgment(0, field, None, agreement, chance)

    agreed = judged("penalty", "agree", 0.5)
    differed = judged("penalty", "differ", 0.1)
    few = judged("charges", "agree", 0.5)
    judgments = [(agreed, n % 10 > 0) for n in range(100)]
    judgments += [(differed, n % 10 > 1) for n in range(100)]
    judgments += [(few, True)] * 49
    judgments += [(judged("articles", "agree", n / 100), True) for n in range(1, 100)]
    scaling = scaling_of(judgments)
    assert scaled_chance(scaling, agreed) == pytest.approx(0.9, abs=0.01)
    assert scaled_chance(scaling, differed) == pytest.approx(0.8, abs=0.01)
    assert scaled_chance(scaling, judged("penalty", "agree", 0.6)) >= scaled_chance(scaling, agreed)
    assert scaled_chance(scaling, judged("penalty", "", 0.5)) == 0.5, "the classifier's own answer"
    assert scaled_chance(scaling, few) == 0.5, "too few to say"
    never_wrong = scaled_chance(scaling, judged("articles", "agree", 0.3))
    assert 0.9 < never_wrong < 1, "but not certain"


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
    for scaling in ({}, {"penalty": {"agree": (5.0, 9.0)}}):
        confidence = scaled_chance(scaling, Judgment(0, "penalty", None, "agree", chance))
        assert UNSURE <= confidence <= 1 - UNSURE
