"""The form of a submission row: the plain check beside the schema that users have."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import read_object
from panjue.prompts.task import task_folders
from panjue.prompts.tasks.judgment.task import TASK, has_form
from tests.prompts.tasks.judgment.test_repair import answered

SCHEMA = Draft202012Validator(
    read_object(task_folders()["judgment"] / "submission.schema.json"),
)
ODD = ["", "甲", "264", -1, 0, 14, 15, 10**30, True, False, 1.0, 11.5, float("nan"), None, {}, []]
ODD += [["盗窃罪"], ["264", "264"], ["264", 264], [None], [[]], [{}], [""], [1, 1.0]]
"""Values of which each field of a row or a judgment takes some and refuses others."""


def changed(level: int, field: str, value: Any) -> dict[str, Any]:
    """Return a row that is right but for one field, of the row (0) or of one of its judgments."""
    judgments = [
        {"name": "甲", "charges": ["盗窃罪", "诈骗罪"], "articles": ["264"], "penalty": 14},
        {"name": "", "charges": [""], "articles": ["264", "266"], "penalty": 0},
    ]
    row = {"id": 1, "judgments": judgments}
    [row, *judgments][level][field] = value
    return row


FIELDS = ["id", "judgments", "name", "charges", "articles", "penalty", "reason"]
JSON = st.recursive(
    st.sampled_from(ODD), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(st.builds(changed, st.integers(0, 2), st.sampled_from(FIELDS), JSON) | JSON)
def test_the_plain_check_takes_nothing_that_the_schema_refuses(row: Any) -> None:
    if isinstance(row, dict) and has_form(row):
        assert SCHEMA.is_valid(row)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("field", FIELDS)
def test_the_plain_check_knows_every_odd_value(level: int, field: str) -> None:
    for value in ODD:
        row = changed(level, field, value)
        assert not has_form(row) or SCHEMA.is_valid(row), row
    row = changed(level, field, None)
    part = [row, *row["judgments"]][level] if field != "judgments" else row
    del part[field]
    assert has_form(row) == SCHEMA.is_valid(row)


@given(answered(st.lists(st.text("张王李", min_size=1), min_size=1, max_size=3)))
def test_the_plain_check_takes_every_row_that_is_written(labels: Labels, example: Example) -> None:
    assert example.answer is not None
    row = json.loads(json.dumps(TASK.data.write(example, example.answer)))
    assert has_form(row)
    assert not list(TASK.data.check(example, row, labels))
