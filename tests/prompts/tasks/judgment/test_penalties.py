"""The class of a sentence: its borders, the order of its rules, and what is no sentence."""

from typing import Any

import pytest

from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_object
from panjue.prompts.task import load_task, task_folders
from panjue.prompts.tasks.judgment.penalties import (
    BY_SEVERITY,
    PENALTIES,
    penalty_class,
    sentence,
)


def test_the_schema_of_submissions_has_as_many_classes() -> None:
    schema = read_object(task_folders()["judgment"] / "submission.schema.json")
    assert f'"maximum":{len(PENALTIES) - 1}}}' in dump(schema)


def test_reports_have_the_gravest_class_first() -> None:
    order = [PENALTIES.index(penalty) for penalty in BY_SEVERITY]
    assert order == [0, 1, *range(5, 14), 2, 3, 4, 14]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"death_penalty": True, "life_imprisonment": True, "detention": 1}, 0),
        ({"life_imprisonment": True, "detention": 3, "imprisonment": 300}, 1),
        ({"detention": 1, "surveillance": 24, "imprisonment": 36}, 2),
        ({"surveillance": 13, "imprisonment": 121}, 3),
        ({"surveillance": 12}, 4),
        ({"surveillance": 1, "imprisonment": 121}, 4),
        ({"fine": 5000, "fine_without_amount": True}, 14),
    ],
)
def test_class_of_a_sentence(given: dict[str, int], expected: int) -> None:
    assert penalty_class(sentence(**given)) == expected


FEWEST_MONTHS = {5: 121, 6: 85, 7: 61, 8: 37, 9: 25, 10: 13, 11: 10, 12: 7, 13: 1}


@pytest.mark.parametrize("number", FEWEST_MONTHS)
def test_borders_of_imprisonment(number: int) -> None:
    fewest = FEWEST_MONTHS[number]
    assert penalty_class(sentence(imprisonment=fewest)) == number
    assert penalty_class(sentence(imprisonment=fewest - 1)) == number + 1


@pytest.mark.parametrize("months", [-12, float("nan"), float("inf"), True, "12"])
@pytest.mark.parametrize("term", ["surveillance", "detention", "imprisonment"])
def test_what_is_no_number_of_months_has_no_class(term: str, months: Any) -> None:
    with pytest.raises(UserError, match=f"'{term}' must be months, 0 or more, found "):
        penalty_class(sentence(**{term: months}))


def test_a_file_in_which_nobody_has_more_than_36_months_is_doubted() -> None:
    doubts = load_task("judgment").ask.doubts
    short = {PENALTIES[number]: 20 for number in (2, 9, 10, 14)}
    [line] = doubts(Labels(counts={"penalty": short}))
    assert line.startswith("none of 80 persons has a term above 36 months")
    for number in (0, 1, 5, 8):  # one is enough
        assert not [*doubts(Labels(counts={"penalty": {**short, PENALTIES[number]: 1}}))]
    assert not [*doubts(Labels(counts={"penalty": {PENALTIES[10]: 49}}))], "too few to tell"
    assert not [*doubts(Labels())]
