"""Confidences in the model's answers follow how often it was right on held-out cases."""

from pathlib import Path

import pytest

from panjue.finetune.classifier.calibration import (
    Judgment,
    scaled_chance,
    scaling_of,
    scaling_of_run,
)
from panjue.prompts.plumbing.run import AnswersRecord, Run
from tests.records import Write, write_answers


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


def test_a_scaling_is_of_one_training(write: Write, tmp_path: Path) -> None:
    test = write("cases.jsonl", [])
    scaling = {"penalty": {"agree": (2.0, 1.0)}}
    for name, trained, recorded in (("a", "1", scaling), ("b", "2", {}), ("c", "1", {})):
        folder = tmp_path / "run/answers" / name
        folder.mkdir(parents=True)
        write_answers(folder, test)
        changed = {"trained_sha256": trained, "scaling": recorded}
        AnswersRecord.read(folder).model_copy(update=changed).write(folder)
    assert scaling_of_run(Run(tmp_path / "run"), "1") == scaling
    assert scaling_of_run(Run(tmp_path / "run"), "2") == {}, "retrained since"
