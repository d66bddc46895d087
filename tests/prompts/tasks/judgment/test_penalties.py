"""The class of a sentence: its borders, the order of its rules, and what is no sentence."""

from typing import Any

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_object
from panjue.prompts.task import task_folders
from panjue.prompts.tasks.judgment.penalties import PENALTIES, penalty_class, sentence


def test_the_schema_of_submissions_has_as_many_classes() -> None:
    schema = read_object(task_folders()["judgment"] / "submission.schema.json")
    assert f'"maximum":{len(PENALTIES) - 1}}}' in dump(schema)


@pytest.mark.parametrize(
    ("given", "expected"),
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
        ({}, 14),
        ({"fine": 5000}, 14),
        ({"fine_without_amount": True}, 14),
    ],
)
def test_class_of_a_sentence(given: dict[str, int], expected: int) -> None:
    assert penalty_class(sentence(**given)) == expected


MONTHS = {
    5: (121, 300), 6: (85, 120), 7: (61, 84), 8: (37, 60), 9: (25, 36), 10: (13, 24),
    11: (10, 12), 12: (7, 9), 13: (1, 6),
}  # fmt: skip


@pytest.mark.parametrize("number", MONTHS)
def test_class_of_a_term_of_imprisonment(number: int) -> None:
    for months in range(MONTHS[number][0], MONTHS[number][1] + 1):
        assert penalty_class(sentence(imprisonment=months)) == number


@pytest.mark.parametrize("months", [-12, float("nan"), float("inf"), True, "12", None])
@pytest.mark.parametrize("term", ["surveillance", "detention", "imprisonment"])
def test_what_is_no_number_of_months_has_no_class(term: str, months: Any) -> None:
    with pytest.raises(UserError, match=f"'{term}' must be months, 0 or more, found "):
        penalty_class(sentence(**{term: months}))
