"""Documents are read item by item as a whole reading would read them, and no looser."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panjue.prompts import documents
from panjue.prompts.documents import list_items
from panjue.prompts.errors import UserError

WORDS = st.text(st.characters(codec="utf-8")) | st.integers() | st.floats(allow_nan=False)
VALUES = st.recursive(
    WORDS | st.none() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK", 7)


@settings(max_examples=200)
@given(
    st.lists(VALUES), st.dictionaries(st.sampled_from("abc"), VALUES), st.sampled_from([None, 2])
)
def test_items_are_those_of_json(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], beside: Any, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("document") / "x.json"
    for key, document in ((None, items), ("data", {**beside, "data": items, "z": beside})):
        path.write_text(json.dumps(document, ensure_ascii=False, indent=indent), "utf-8")
        assert list(list_items(path, key)) == items


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "it ends instead of"),
        ("[1, 2", "not JSON: it ends too early"),
        ("[1, 2,]", "not JSON: Expecting value"),
        ("[1 2]", "found '2' instead of"),
        ("[1]]", "goes on behind its end with ']'"),
        ('[{"a": "b]', "not JSON: Unterminated string"),
        ("7", "found '7' instead of"),
    ],
)
def test_what_is_no_list_is_told(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, "utf-8")
    with pytest.raises(UserError, match=complaint):
        list(list_items(path))
    with pytest.raises(UserError, match=r"x\.json: .*instead of"):
        list(list_items(path, "data"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"a": 1}', "has no 'data'"),
        ('{"data": 3}', "found '3' instead of"),
        ('{"data": []', "it ends instead of"),
        ('{"data": [], "a"}', "found '}' instead of ':'"),
    ],
)
def test_what_has_no_such_list_is_told(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, "utf-8")
    with pytest.raises(UserError, match=complaint):
        list(list_items(path, "data"))


def test_an_item_that_never_ends_is_not_taken_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LARGEST_LINE", 1000)
    path = tmp_path / "x.json"
    path.write_text('[1, "' + "a" * 10_000 + '"]', "utf-8")
    with pytest.raises(UserError, match="an item is longer than"):
        list(list_items(path))


def test_half_a_character_is_handed_on_for_the_reader_to_refuse(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('["\\ud800", "\\ud83d\\ude00"]', "utf-8")
    assert list(list_items(path)) == ["\ud800", "😀"]
