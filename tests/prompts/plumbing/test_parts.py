import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.plumbing.decode import value_spans
from panjue.prompts.plumbing.files import dump

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
