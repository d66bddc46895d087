"""The tools that read replies, and strict reading of a judgment."""

import json

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
