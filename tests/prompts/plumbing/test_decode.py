"""The tools that read replies, and strict reading of a judgment."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import (
    after_thinking,
    field_text,
    flatten_forms,
    load_json,
    normal,
    snap,
    strings_in,
    value_spans,
)
from panjue.prompts.plumbing.files import dump
from panjue.prompts.tasks.judgment.task import decode, target

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
KNOWN = {
    normal(label): label for label in ("盗窃罪", "诈骗罪", "掩饰、隐瞒犯罪所得、犯罪所得收益罪")
}


@given(st.lists(TEXT))
def test_a_list_of_strings_survives_its_json(texts: list[str]) -> None:
    assert strings_in(dump(texts)) == texts
    assert strings_in(json.dumps(texts, indent=1)) == texts


@pytest.mark.parametrize(
    ("segment", "found"),
    [
        ('"charges":["盗窃罪","诈骗罪"],"x":1', '["盗窃罪","诈骗罪"'),
        ('"charges" : ["a]b", "c"]', '["a]b", "c"'),
        ('"charges":["盗窃罪","诈骗', '["盗窃罪",'),
        ('"charges":[', "["),
        ('"charges":"盗窃罪"', '"盗窃罪"'),
        ('"charges":12}', "12"),
        ('"charges":12', None),
        ('"charges":null,"charges":["a"]', '["a"'),
        ('"charges":', None),
        ('"charge":["a"]', None),
        ("", None),
    ],
)
def test_field_text_by_hand(segment: str, found: str | None) -> None:
    assert field_text(segment, "charges") == found


@given(st.text())
def test_the_tools_take_any_text(text: str) -> None:
    load_json(text)
    field_text(text, "name")
    assert all(isinstance(part, str) for part in strings_in(text))
    assert flatten_forms(flatten_forms(text)) == flatten_forms(text)
    assert normal(normal(text) + "罪") == normal(normal(text))
    assert snap(text, KNOWN) in {None, *KNOWN.values()}
    assert after_thinking(text) in text


@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("<think>\n\n</think>\n\n{}", "\n\n{}"),
        ("让我想想</think>{}", "{}"),
        ("<think>a</think>b</think>c", "b</think>c"),
        ("<think>{}", ""),
        (" <think>\n{}", ""),
        ("a <think>", "a <think>"),
        ("{}", "{}"),
    ],
)
def test_thinking_is_dropped(reply: str, rest: str) -> None:
    assert after_thinking(reply) == rest


def test_a_valid_reply_is_read_without_repair(case: Example, labels: Labels) -> None:
    spaced = json.dumps(json.loads(target(case)), ensure_ascii=True, indent=2)
    for reply in (target(case), spaced, f" {target(case)}\n"):
        decoded = decode(reply, case, labels)
        assert decoded.answer == case.answer
        assert decoded.repairs == ()
        assert decoded.readable


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for i, inner in enumerate(value) for leaf in leaves(inner, (*path, i))]
    return [(path, value)]


@given(JSON)
def test_every_value_is_found_where_it_stands_whatever_the_json(value: Any) -> None:
    text = dump(value)
    found = [(path, json.loads(text[start:end])) for start, end, path in value_spans(text)]
    wanted = [
        # Keys are given as they are written: an escape in a key stays one.
        (tuple(dump(k)[1:-1] if isinstance(k, str) else k for k in path), leaf)
        for path, leaf in leaves(value)
    ]
    assert found == wanted


def test_a_string_that_is_cut_is_one_value_however_many_quotation_marks_it_has() -> None:
    """In a time that grows with its length: 40,000 characters took 8.9 s, their square."""
    for reply in ('["' + '\\"' * 500_000, '["' + '\\"' * 500_000 + "\\"):
        assert list(value_spans(reply)) == [(1, len(reply), (0,))]


def test_what_nests_too_deep_ends_the_search() -> None:
    assert list(value_spans('{"a":' * 500_000 + "1")) == []
    assert len(list(value_spans("[1," * 500_000))) == 64
