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
from panjue.prompts.plumbing.records import ConfidenceWeights


def judged(field: str, agreement: str, chance: float, logprob: float | None = None) -> FieldAnswer:
    return FieldAnswer(0, field, None, agreement, chance, logprob)


def test_confidences_follow_how_often_the_model_was_right() -> None:
    agreed = judged("penalty", "agree", 0.5)
    differed = judged("penalty", "differ", 0.1)
    few = judged("charges", "agree", 0.5)
    field_answers = [(agreed, n % 10 > 0) for n in range(1000)]
    field_answers += [(differed, n % 10 > 1) for n in range(1000)]
    field_answers += [(few, True)] * 2
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
    assert 0.5 < confidence_in(calibration, few) < 0.75, "two right ones say little"
    never_wrong = confidence_in(calibration, judged("articles", "agree", 0.3))
    assert 0.9 < never_wrong < 1, "but not certain"


def test_where_the_model_knows_better_its_own_certainty_counts() -> None:
    """The classifier always says one half; the model is right as often as it says."""
    draw = np.random.default_rng(0)
    chances = draw.uniform(0.05, 0.95, 4000)
    answers = []
    for chance in chances:
        answer = judged("penalty", "differ", 0.5, float(np.log(chance)))
        answers.append((answer, bool(draw.random() < chance)))
    calibration = calibration_of(answers)
    for chance in (0.1, 0.3, 0.5, 0.7, 0.9):
        answer = judged("penalty", "differ", 0.5, float(np.log(chance)))
        assert confidence_in(calibration, answer) == pytest.approx(chance, abs=0.04)
    without = judged("penalty", "differ", 0.5)
    assert confidence_in(calibration, without) == pytest.approx(0.5, abs=0.04)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["agree", "differ"]),
            st.floats(0, 1),
            st.none() | st.floats(-800, 0),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.floats(0, 1),
    st.none() | st.floats(-800, 0),
)
def test_a_surer_model_or_classifier_never_lowers_a_confidence(
    rows: list[tuple[str, float, float | None, bool]], chance: float, logprob: float | None
) -> None:
    answers = []
    for agreement, of_classifier, of_model, is_right in rows:
        answers.append((judged("penalty", agreement, of_classifier, of_model), is_right))
    calibration = calibration_of(answers)
    for weights in calibration.get("penalty", {}).values():
        assert weights.classifier >= LEAST_SCALE
        assert weights.model >= 0
        assert np.isfinite(weights.shift)
    for agreement in ("agree", "differ"):
        confidence = confidence_in(calibration, judged("penalty", agreement, chance, logprob))
        surer = judged("penalty", agreement, min(1, chance * 1.1), logprob and logprob / 2)
        assert UNSURE <= confidence <= confidence_in(calibration, surer) <= 1 - UNSURE


def test_doubt_is_never_thrown_away() -> None:
    """Where the model was right on nearly all cases, whatever the classifier thought of them."""
    chances = [0.001 + 0.998 * n / 499 for n in range(500)]
    answers = [(judged("penalty", "agree", chance), True) for chance in chances]
    unsure = (judged("penalty", "agree", 0.999), False)
    calibration = calibration_of([*answers, unsure])

    def confidence(chance: float) -> float:
        return confidence_in(calibration, judged("penalty", "agree", chance))

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
    weights = ConfidenceWeights(classifier=5.0, model=3.0, shift=9.0)
    for calibration in ({}, {"penalty": {"agree": weights}}):
        confidence = confidence_in(calibration, FieldAnswer(0, "penalty", None, "agree", chance))
        assert UNSURE <= confidence <= 1 - UNSURE
