from collections.abc import Mapping
from typing import Any

import pytest

from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment import metric as metrics

NAMES = load_task("judgment").score.names
Answer = Mapping[str, Any]


def judgment(name: str, charges: list[str], articles: list[str], penalty: int) -> dict[str, Any]:
    return {"name": name, "charges": charges, "articles": articles, "penalty": penalty}


def values(gold: Answer, predicted: Answer | None) -> dict[str, float]:
    return {name: getattr(metrics, name)(gold, predicted) for name in NAMES}


TWO = {"judgments": [judgment("甲", ["a"], ["1"], 3), judgment("乙", ["a", "b"], ["1", "2"], 8)]}


@pytest.mark.parametrize(
    ("predicted", "charge_f1", "article_f1", "penalty"),
    [
        ([judgment("乙", ["a", "b"], ["1"], 8)], 1 / 2, 1 / 3, 1 / 2),  # 甲 is missing
        ([judgment("丙", ["a"], ["1"], 3), judgment("乙", ["b"], ["2"], 8)], 1 / 3, 1 / 3, 1 / 2),
        (  # doubled: the first counts
            [judgment("甲", ["b"], ["1"], 3), judgment("甲", ["a"], ["9"], 8)],
            0,
            1 / 2,
            1 / 2,
        ),
        (  # a stranger changes nothing
            [*TWO["judgments"], judgment("丙", ["z"], ["9"], 1)],
            1,
            1,
            1,
        ),
    ],
)
def test_a_case_by_hand(
    predicted: list[dict[str, Any]], charge_f1: float, article_f1: float, penalty: float
) -> None:
    found = values(TWO, {"judgments": predicted})
    assert found["charge_f1"] == pytest.approx(charge_f1)
    assert found["article_f1"] == pytest.approx(article_f1)
    assert found["penalty_accuracy"] == pytest.approx(penalty)
    assert found["final"] == pytest.approx(0.3 * charge_f1 + 0.3 * article_f1 + 0.4 * penalty)


def test_false_is_no_class() -> None:
    """In Python False is 0, and class 0 is death."""
    gold = {"judgments": [{"name": "甲", "charges": ["a"], "articles": ["1"], "penalty": 0}]}
    told = {"judgments": [{**gold["judgments"][0], "penalty": False}]}
    assert metrics.penalty_accuracy(gold, gold) == 1
    assert metrics.penalty_accuracy(gold, told) == 0
