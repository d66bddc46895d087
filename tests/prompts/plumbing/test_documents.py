"""A document is a list of items, or has one."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.plumbing.documents import list_items
from panjue.prompts.plumbing.errors import UserError

WORDS = st.text(st.characters(codec="utf-8")) | st.integers() | st.floats(allow_nan=False)
VALUES = st.recursive(
    WORDS | st.none() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@given(st.lists(VALUES), st.dictionaries(st.sampled_from("abc"), VALUES), st.booleans())
def test_items_are_those_of_json(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], beside: Any, marked: bool
) -> None:
    path = tmp_path_factory.mktemp("document") / "x.json"
    for key, document in ((None, items), ("data", {**beside, "data": items, "z": beside})):
        text = json.dumps(document, ensure_ascii=False)
        path.write_text(text, "utf-8-sig" if marked else "utf-8")
        assert list_items(path, key) == items


@pytest.mark.parametrize("key", [None, "data"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON: Expecting value"),
        (b"[1, 2", "not JSON: Expecting"),
        (b"[1]]", "not JSON: Extra data"),
        (b'[{"a": "b]', "not JSON: Unterminated string"),
        (b"[" * 100_000, "it is nested too deeply"),
        ('["中文"]'.encode("gb18030"), "not UTF-8"),
        (b"7", "no .*list"),
        (b'{"data": 3}', "no .*list"),
        (b'{"a": [1]}', "no .*list"),
    ],
)
def test_what_has_no_list_is_named(
    content: bytes, complaint: str, key: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.json: .*{complaint}"):
        list_items(path, key)


def test_half_a_character_is_handed_on_for_the_reader_to_refuse(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('["\\ud800", "\\ud83d\\ude00"]', "utf-8")
    assert list_items(path) == ["\ud800", "😀"]
