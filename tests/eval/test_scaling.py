"""Confidences in the model's answers follow how often it was right on held-out cases."""

from pathlib import Path

import pytest

from panjue.eval.scaling import Judgment, scaled, scaling_of, scaling_of_run
from panjue.prompts.plumbing.run import AnswersRecord, Run
from tests.eval.records import Write, write_answers


def test_confidences_follow_how_often_the_model_was_right() -> None:
    judgments = [Judgment("penalty", True, 0.5, n % 10 > 0) for n in range(100)]
    judgments += [Judgment("penalty", False, 0.1, n % 10 > 1) for n in range(100)]
    judgments += [Judgment("charges", True, 0.5, True)] * 49
    judgments += [Judgment("articles", True, n / 100, True) for n in range(1, 100)]
    scaling = scaling_of(judgments)
    assert scaled(scaling, "penalty", True, 0.5) == pytest.approx(0.9, abs=0.01)
    assert scaled(scaling, "penalty", False, 0.1) == pytest.approx(0.8, abs=0.01)
    assert scaled(scaling, "penalty", True, 0.6) >= scaled(scaling, "penalty", True, 0.5)
    assert scaled(scaling, "charges", True, 0.5) == 0.5, "too few to say"
    assert 0.9 < scaled(scaling, "articles", True, 0.3) < 1, "never wrong, but not certain"


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
