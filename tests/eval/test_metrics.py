"""What the official scorer does not meet: defendants who are missing, doubled or unknown."""

from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.metric import METRICS, penalty_accuracy

NAMES = load_task("judgment").score.names


def judgment(name: str, charges: str, articles: str, penalty: int) -> dict[str, Any]:
    return {"name": name, "charges": [*charges], "articles": [*articles], "penalty": penalty}


FIRST = judgment("甲", "a", "1", 3)
SECOND = judgment("乙", "ab", "12", 8)


@pytest.mark.parametrize(
    ("predicted", "charge_f1", "article_f1", "penalty"),
    [
        ([judgment("乙", "ab", "1", 8)], 1 / 2, 1 / 3, 1 / 2),  # 甲 is missing
        ([judgment("甲", "b", "1", 3), judgment("甲", "a", "9", 8)], 0, 1 / 2, 1 / 2),  # doubled
        ([judgment("丙", "z", "9", 1), SECOND, FIRST], 1, 1, 1),  # a stranger changes nothing
    ],
)
def test_a_case_by_hand(
    predicted: list[dict[str, Any]], charge_f1: float, article_f1: float, penalty: float
) -> None:
    gold, answer = {"judgments": [FIRST, SECOND]}, {"judgments": predicted}
    found = {name: metric(gold, answer) for name, metric in zip(NAMES, METRICS, strict=True)}
    assert found["charge_f1"] == pytest.approx(charge_f1)
    assert found["article_f1"] == pytest.approx(article_f1)
    assert found["penalty_accuracy"] == pytest.approx(penalty)
    assert found["final"] == pytest.approx(0.3 * charge_f1 + 0.3 * article_f1 + 0.4 * penalty)


@drawn(
    st.lists(st.sampled_from("甲乙丙"), min_size=1, max_size=4),
    st.lists(st.sampled_from("甲乙丙丁"), max_size=4) | st.none(),
)
def test_names_written_otherwise_are_the_same_persons(
    names: list[str], answered: list[str] | None
) -> None:
    """Judgments that are in the order of gold are matched by a shorter way than others."""
    gold = {"judgments": [judgment(name, "ab"[i % 2], "1", i) for i, name in enumerate(names)]}
    given = []
    for i, name in enumerate(names if answered is None else answered):
        given.append(judgment(name, "a", "1", i))
    hidden = [{**one, "name": f"{one['name']}\u200b"} for one in given]
    for metric in METRICS:
        assert metric(gold, {"judgments": given}) == metric(gold, {"judgments": hidden})


def test_false_is_no_class() -> None:
    """In Python False is 0, and class 0 is death."""
    gold = {"judgments": [judgment("甲", "a", "1", 0)]}
    assert penalty_accuracy(gold, gold) == 1
    assert penalty_accuracy(gold, {"judgments": [{**gold["judgments"][0], "penalty": False}]}) == 0
