"""Macro F1 as scikit-learn defines it, over one class or a set of classes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.classes import accuracy, macro_f1

THREE = macro_f1(3)
PAIRS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=20)


def value(*pairs: tuple[object, object], key: str = "label") -> float:
    rows = [({key: gold}, None if told is None else {key: told}) for gold, told in pairs]
    return float(THREE.value(np.sum([THREE.counts(gold, told) for gold, told in rows], axis=0)))


def by_definition(pairs: list[tuple[int, int]]) -> float:
    """Mean over the classes in gold or prediction of 2 tp / (2 tp + fp + fn)."""
    scores = []
    for one in {number for pair in pairs for number in pair}:
        right = sum(gold == told == one for gold, told in pairs)
        wrong = sum((gold == one) != (told == one) for gold, told in pairs)
        scores.append(2 * right / (2 * right + wrong))
    return sum(scores) / len(scores)


@given(PAIRS)
def test_it_is_its_definition(pairs: list[tuple[int, int]]) -> None:
    assert value(*pairs) == pytest.approx(by_definition(pairs))


def test_by_hand() -> None:
    # F1 of 0: 2 * 2 / (3 + 2); of 1: 2 * 1 / (1 + 2); 2 never occurs.
    assert value((0, 0), (0, 0), (0, 1), (1, 1)) == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert value((0, 0), (1, None)) == pytest.approx(1 / 2), "no row: class 1 is missed"
    assert value((0, 0)) == 1


def test_sets_and_the_empty_one() -> None:
    assert value(([], []), key="labels") == 1
    # Class 0: 2 / 3; class 1: 0; none: 0 of one predicted.
    assert value(([0], [0]), ([0, 1], []), key="labels") == pytest.approx(2 / 3 / 3)


@pytest.mark.parametrize("told", [{"label": 3}, {"label": -1}, {"label": "1"}, {"label": True}])
def test_what_is_no_class_is_refused(told: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        THREE.counts({"label": 0}, told)


def test_accuracy() -> None:
    assert accuracy({"labels": [1, 2]}, {"labels": [2, 1]}) == 1
    assert accuracy({"labels": [1]}, {"labels": [1, 2]}) == accuracy({"label": 1}, None) == 0
