from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.tasks.judgment.read import penalty_class, sentence_of_class

NOTHING = {
    "surveillance": 0,
    "detention": 0,
    "imprisonment": 0,
    "death_penalty": False,
    "life_imprisonment": False,
    "fine": 0,
    "fine_without_amount": False,
}


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ({"death_penalty": True}, 0),
        ({"death_penalty": True, "life_imprisonment": True, "detention": 1}, 0),
        ({"life_imprisonment": True}, 1),
        ({"life_imprisonment": True, "detention": 3, "imprisonment": 300}, 1),
        ({"detention": 1}, 2),
        ({"detention": 6, "surveillance": 24}, 2),
        ({"detention": 6, "imprisonment": 36}, 2),
        ({"surveillance": 24}, 3),
        ({"surveillance": 13}, 3),
        ({"surveillance": 13, "imprisonment": 121}, 3),
        ({"surveillance": 12}, 4),
        ({"surveillance": 1}, 4),
        ({"surveillance": 1, "imprisonment": 121}, 4),
        ({"imprisonment": 300}, 5),
        ({"imprisonment": 121}, 5),
        ({"imprisonment": 120}, 6),
        ({"imprisonment": 85}, 6),
        ({"imprisonment": 84}, 7),
        ({"imprisonment": 61}, 7),
        ({"imprisonment": 60}, 8),
        ({"imprisonment": 37}, 8),
        ({"imprisonment": 36}, 9),
        ({"imprisonment": 25}, 9),
        ({"imprisonment": 24}, 10),
        ({"imprisonment": 13}, 10),
        ({"imprisonment": 12}, 11),
        ({"imprisonment": 10}, 11),
        ({"imprisonment": 9}, 12),
        ({"imprisonment": 7}, 12),
        ({"imprisonment": 6}, 13),
        ({"imprisonment": 1}, 13),
        ({}, 14),
        ({"fine": 5000}, 14),
        ({"fine_without_amount": True}, 14),
    ],
)
def test_class_of_a_sentence(sentence: dict[str, int], expected: int) -> None:
    assert penalty_class({**NOTHING, **sentence}) == expected


@given(st.integers(0, 400), st.integers(0, 400))
def test_longer_imprisonment_is_never_a_milder_class(one: int, other: int) -> None:
    short, long = sorted((one, other))
    milder = penalty_class({**NOTHING, "imprisonment": short})
    assert 5 <= penalty_class({**NOTHING, "imprisonment": long}) <= milder <= 14


@given(st.integers(0, 10**9), st.booleans())
def test_fines_do_not_count(fine: int, unknown: bool) -> None:
    sentence = {**NOTHING, "imprisonment": 8, "fine": fine, "fine_without_amount": unknown}
    assert penalty_class(sentence) == 12


@pytest.mark.parametrize("months", [-12, float("nan"), float("inf"), True, "12", None])
@pytest.mark.parametrize("term", ["surveillance", "detention", "imprisonment"])
def test_what_is_no_number_of_months_has_no_class(term: str, months: Any) -> None:
    with pytest.raises(UserError, match=f"'penalty' has {term} .*; it must be months, 0 or more"):
        penalty_class({**NOTHING, term: months})


@pytest.mark.parametrize("number", range(15))
def test_the_sentence_of_a_class_has_this_class(number: int) -> None:
    assert penalty_class(sentence_of_class(number)) == number
