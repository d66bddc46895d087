"""The tools that read replies."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.labels import normal, snap
from panjue.prompts.plumbing.decode import (
    after_thinking,
    flatten_forms,
    json_objects,
    last_object,
    load_json,
)
from panjue.prompts.plumbing.files import dump

KNOWN = {
    normal(label): label for label in ("盗窃罪", "诈骗罪", "掩饰、隐瞒犯罪所得、犯罪所得收益罪")
}
WORDS = st.dictionaries(st.text(), st.text() | st.lists(st.text()), min_size=1)


@given(st.text())
def test_the_tools_take_any_text(text: str) -> None:
    load_json(text)
    json_objects(text)
    assert flatten_forms(flatten_forms(text)) == flatten_forms(text)
    assert normal(normal(text) + "罪") == normal(normal(text))
    assert snap(text, KNOWN) in {None, *KNOWN.values()}
    assert len(after_thinking(text)) <= len(text)


@given(st.lists(WORDS), st.text(st.characters(exclude_characters="{"), max_size=5))
def test_objects_are_found_whatever_is_around_them(values: list[object], remark: str) -> None:
    reply = remark + remark.join(map(dump, values)) + remark
    assert [(one.value, one.is_whole) for one in json_objects(reply)] == [(v, True) for v in values]


@pytest.mark.parametrize(
    ("reply", "whole", "cut"),
    [
        ("", [], []),
        ('{见下} {"a":1} }', ['{"a":"1"}'], []),
        ('{"a":{"b":[]},"c":null}', ['{"b":[]}', '{"a":{"b":[]},"c":null}'], []),
        # What is around a valid object is no JSON.
        ('{"a":[{"b":"x"},],"c":{"d":"y"}}', ['{"b":"x"}', '{"d":"y"}'], []),
        ('{"a":"x,"b":"y"},{"c":"z"}', ['{"c":"z"}'], []),
        ('{"a":"1\n"}', ['{"a":"1\\n"}'], []),
        # With two values of one key an object says nothing: they may be of two persons.
        ('{"a":"x","a":"y"}', ["{}"], []),
        ('{"a":{"b":"x","b":"y"}}', ["{}", '{"a":{}}'], []),
        ('{"a":["x"],"a":["x"]}', ['{"a":["x"]}'], []),
        ('{"a":1,"a":true}', ["{}"], []),
        # The reply ends in an object.
        ('{"a":["x","y', [], ['{"a":["x"]}']),
        ('{"a":["x","y"', [], ['{"a":["x","y"]}']),
        ('{"a":"x","b"', [], ['{"a":"x"}']),
        ('{"a":"x","b":"\\', [], ['{"a":"x"}']),
        ('{"a":"x","b":"{y', [], ['{"a":"x"}']),
        ('{"a":"x","b":"{}', [], ['{"a":"x"}']),
        ('{"a":"x" or', [], ["{}"]),
        ('{"a":[1,2', [], ['{"a":["1"]}']),
        ('{"a":1', [], ["{}"]),
        ('{"a":[{"b":1},{"c":"x"', ['{"b":"1"}'], ['{"c":"x"}', '{"a":[{"b":"1"},{"c":"x"}]}']),
        ('{"a":1,}', [], []),
        ('{"a":[}', [], []),
    ],
)
def test_objects_by_hand(reply: str, whole: list[str], cut: list[str]) -> None:
    found = json_objects(reply)
    assert [dump(one.value) for one in found if one.is_whole] == whole
    assert [dump(one.value) for one in found if not one.is_whole] == cut


def test_the_last_whole_object_with_all_keys_counts() -> None:
    whole = '{"a":"1","b":"2"}'
    for other in ('{"a":"3"}', '{"a":"3","b":"4', '{"c":"3"}', ""):
        assert last_object(whole + other, ["a", "b"]).value == {"a": "1", "b": "2"}
    assert last_object('{"a":"1"} {"c":"2"}', ["a", "b"]).value == {"a": "1"}
    assert last_object('{"c":"2"}', ["a", "b"]).value == {}


@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("让我想想</think>{}", "{}"),
        ("<think>a</think>b</think>c", "c"),
        ("<think>a<think>b</think>c</think>d", "d"),
        (" <think>\n{}", " "),
        ("{1}<think>{2}", "{1}"),
        ("{1}<think>{2}</think>{3}<think>{4}", "{1}{3}"),
        ("a < think > b", "a < think > b"),
        ("[thinking about it] {}", "[thinking about it] {}"),
        ("[Analysis] {}", "[Analysis] {}"),
        ("<answer>{}</answer>", "<answer>{}</answer>"),
        ("<|channel|>analysis<|message|>{1}", ""),
        ("</think><think>{1}", ""),
    ],
)
def test_thinking_is_dropped(reply: str, rest: str) -> None:
    assert after_thinking(reply) == rest


@pytest.mark.parametrize(
    "thinking",
    [
        "<THINK>{0}</Think>",
        "[THINK]{0}[/THINK]",
        "<seed:think>{0}</seed:think>",
        "<thought>{0}</thought>",
        "<reasoning>{0}</reasoning>",
        "<analysis><thinking>{0}</thinking></analysis>",
        "<reflection>{0}</reflection>",
        "◁think▷{0}◁/think▷",
        "<|think|>{0}<|/think|>",
        "<|START_THINKING|>{0}<|END_THINKING|>",
        "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>commentary to=x<|message|>{0}<|channel|>analysis<|message|>{0}"
        "<|channel|>final <|constrain|>json<|message|>",
        "analysis{0}assistantfinal",
    ],
)
def test_every_kind_of_think_block_is_dropped(thinking: str) -> None:
    assert after_thinking(thinking + "{1}") == "{1}"


TAGS = ("<think>", "</think>", "[", "<", "<|channel|>final", "<|channel|>", "assistantfinal ")
PIECES = ('{"', "{}", '"{', '"', '\\"', "}", '{"a":', '{"a":[', '{"a":{},', '{"a":1,"a":2,', "[")


@pytest.mark.parametrize("piece", [*TAGS, *PIECES, "{"])
@pytest.mark.parametrize("start", ["", '{"a":[', '{"a":"'])
def test_time_is_linear(start: str, piece: str) -> None:
    """Were it quadratic in the length, this would take minutes."""
    text = start + piece * (1_000_000 // len(piece))
    began = time.process_time()
    after_thinking(text)
    json_objects(text)
    load_json(text)
    assert time.process_time() - began < 5


def test_a_key_that_is_given_twice_is_found_in_linear_time() -> None:
    pairs = [f'"{number}":0' for number in range(50_000)]
    assert load_json("{" + ",".join(pairs) + "}") is not None
    assert load_json("{" + ",".join([*pairs, pairs[0]]) + "}") is None
