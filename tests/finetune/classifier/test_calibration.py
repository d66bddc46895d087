"""Confidences in the model's answers follow how often it was right on held-out cases."""

import pytest

from panjue.finetune.classifier.calibration import (
    Judgment,
    scaled_chance,
    scaling_of,
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
