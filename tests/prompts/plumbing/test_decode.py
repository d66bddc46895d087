"""The tools that read replies, and strict reading of a judgment."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import (
    after_thinking,
    closed_objects,
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
    assert len(after_thinking(text)) <= len(text)
    assert sum(end - start for start, end in closed_objects(text)) <= len(text)


@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("<think>\n\n</think>\n\n{}", "\n\n{}"),
        ("让我想想</think>{}", "{}"),
        ("<think>a</think>b</think>c", "c"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<think>{}", ""),
        (" <think>\n{}", " "),
        ("{1}<think>{2}", "{1}"),
        ("{1}<think>{2}</think>{3}<think>{4}", "{1}{3}"),
        ("{}", "{}"),
        ("a < think > b", "a < think > b"),
        ("[thinking about it] {}", "[thinking about it] {}"),
        ("<answer>{}</answer>", "<answer>{}</answer>"),
        *(
            (text.format(inner="{0}") + "{1}", "{1}")
            for text in (
                "<THINK>{inner}</Think>",
                "<thinking>{inner}</thinking>",
                "[THINK]{inner}[/THINK]",
                "<seed:think>{inner}</seed:think>",
                "<thought>{inner}</thought>",
                "<reasoning>{inner}</reasoning>",
                "◁think▷{inner}◁/think▷",
                "<|think|>{inner}<|/think|>",
                "<|START_THINKING|>{inner}<|END_THINKING|>",
                "{inner}</thought>",
                "<|channel|>analysis<|message|>{inner}<|end|><|start|>assistant"
                "<|channel|>final<|message|>",
                "<|channel|>commentary to=x<|message|>{inner}<|channel|>analysis<|message|>{inner}"
                "<|channel|>final <|constrain|>json<|message|>",
                "analysis{inner}assistantfinal",
            )
        ),
        *(
            (text + "{1}", "")
            for text in (
                "[THINK]",
                "<thought>",
                "◁think▷",
                "<seed:think>",
                "<|channel|>analysis<|message|>",
                "</think><think>",
            )
        ),
    ],
)
def test_thinking_is_dropped(reply: str, rest: str) -> None:
    assert after_thinking(reply) == rest


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("{1}", ["{1}"]),
        ('5" {"a":"}{"} 6" {"b":{"c":[]}} }', ['{"a":"}{"}', '{"b":{"c":[]}}']),
        ('{"a":[{"b":1},{"c":2},', ['{"b":1}', '{"c":2}']),  # what is around them is not closed
        ('{"a":"\\"}"}', ['{"a":"\\"}"}']),
        ('{"a":"}', []),
        ("{{{1}", ["{1}"]),
    ],
)
def test_closed_objects_by_hand(text: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in closed_objects(text)] == found


LENGTH = 300_000
TAGS = ("<think>", "</think>", "[", "<", "<|channel|>final", "<|channel|>", '"', '\\"', "{", "}")


@pytest.mark.parametrize("piece", [*TAGS, '{"', "{}", '"{', "<a:", "start_", "assistantfinal "])
def test_time_is_linear(piece: str) -> None:
    # Were it quadratic in the length, this would take minutes.
    text = piece * (LENGTH // len(piece))
    assert len(after_thinking(text)) <= LENGTH
    assert sum(end - start for start, end in closed_objects(text)) <= LENGTH


def test_a_key_that_is_given_twice_is_found_in_linear_time() -> None:
    pairs = [f'"{number}":0' for number in range(50_000)]
    assert load_json("{" + ",".join(pairs) + "}") is not None
    assert load_json("{" + ",".join([*pairs, pairs[0]]) + "}") is None


def test_a_valid_reply_is_read_without_repair(case: Example, labels: Labels) -> None:
    spaced = json.dumps(json.loads(target(case)), ensure_ascii=True, indent=2)
    for reply in (target(case), spaced, f" {target(case)}\n"):
        decoded = decode(reply, case, labels)
        assert decoded.answer == case.answer
        assert decoded.repairs == ()
        assert decoded.readable
