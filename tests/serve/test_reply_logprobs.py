"""The model's own probability of each answer: every token counts once, for the label it is in."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.torch import (
    allocate_token_bitmask,
    apply_token_bitmask_inplace,
    fill_next_token_bitmask,
)
from transformers import AutoModelForCausalLM

from panjue.finetune.classifier.opinions import model_logprobs
from panjue.prompts.example import Example, LabelFields
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.ask import QuestionMaker, Request, ask
from panjue.serve.endpoint import token_logprobs
from panjue.serve.engine import Engine
from panjue.serve.reply_logprobs import FieldLogprobs, Token, field_logprobs

TASK = load_task("judgment")
FIELDS = TASK.answer
ONE_CLASS = LabelFields(classes=("label",))

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
LABELS = st.lists(TEXT, max_size=3)
PENALTY = PENALTIES[-1]
GOLD = [
    {"name": name, "charges": ["盗窃罪"], "articles": ["264"], "penalty": PENALTY}
    for name in ("甲某", "乙某")
]
CASE = Example(1, "甲某、乙某盗窃。", ("甲某", "乙某"), answer={"judgments": GOLD})
KNOWN = TASK.ask.labels([CASE])

PERSON = st.fixed_dictionaries(
    {"name": TEXT, "charges": LABELS, "articles": LABELS, "penalty": TEXT}
)
ANSWER = st.fixed_dictionaries({"judgments": st.lists(PERSON, min_size=1, max_size=3)})


def cut(text: str, chance: Random) -> list[Token]:
    """Return tokens that spell a text, some of which spell nothing."""
    tokens = []
    while text:
        size = chance.randrange(7)
        tokens.append(Token(text[:size], -3 * chance.random()))
        text = text[size:]
    return tokens


def summed(found: FieldLogprobs) -> float:
    return sum(sum(numbers) for item in found for numbers in item.values())


@given(st.integers(), ANSWER)
def test_every_token_counts_at_most_once(seed: int, answer: dict[str, Any]) -> None:
    reply = dump(answer)
    tokens = cut(reply, Random(seed))
    found = field_logprobs(reply, tokens, FIELDS)
    assert found is not None
    total = sum(token.logprob for token in tokens)
    numbers = [number for item in found for field in item.values() for number in field]
    assert total - 1e-3 * len(numbers) <= summed(found) <= 1e-3 * len(numbers)
    for item, person in zip(found, answer["judgments"], strict=True):
        assert item.keys() == set(FIELDS.fields)
        assert len(item["charges"]) == max(1, len(person["charges"]))
        assert len(item["articles"]) == max(1, len(person["articles"]))
        assert len(item["penalty"]) == 1


def test_the_numbers_of_a_field_are_those_of_its_labels() -> None:
    pieces = [
        ('{"judgments":[{"name":"甲","charges":["', -9.0),  # before the first label: no field's
        ("盗窃", -0.5),
        ("罪", -0.25),
        ('","', -1.0),  # the list goes on: counts for 盗窃罪
        ("诈骗罪", -2.0),
        ('"],"articles":[', -0.125),  # it ends: counts for 诈骗罪
        ('"264', -0.75),
        ('","266', -1.5),  # two labels in a token: counts for the one that it begins in
        ('"],"penalty":"', 0.0),
        ("拘役", -3.0),
        ('"}]}', 0.0),
    ]
    tokens = [Token(text, logprob) for text, logprob in pieces]
    reply = "".join(text for text, _ in pieces)
    assert field_logprobs(reply, [*tokens, Token("<end>", -8.0)], FIELDS) == [
        {"charges": [-1.75, -2.125], "articles": [-2.25, 0.0], "penalty": [-3.0]}
    ]


def test_an_empty_list_has_a_number_too() -> None:
    tokens = [
        Token('{"judgments":[{"name":"a\\"[,{","charges":', -9.0),
        Token("[", -0.5),
        Token('],"articles":[]', -0.25),
        Token(',"penalty":"x"}]}', -0.125),
    ]
    reply = "".join(token.text for token in tokens)
    # The token that ends the list of charges has the whole list of articles.
    assert field_logprobs(reply, tokens, FIELDS) == [
        {"charges": [-0.75], "articles": [-0.125], "penalty": [0.0]}
    ]


def test_a_token_with_the_end_of_a_key_counts_for_the_value() -> None:
    tokens = [Token('{"labels', -9.0), Token('":', -0.5), Token("[]}", -0.25)]
    several = LabelFields(sets=("labels",))
    assert field_logprobs('{"labels":[]}', tokens, several) == [{"labels": [-0.75]}]
    tokens = [Token('{"labels', -9.0), Token('":["', -3.0), Token("1", 0.0), Token('"]}', -0.5)]
    assert field_logprobs('{"labels":["1"]}', tokens, several) == [{"labels": [-3.5]}]


def test_what_is_nearly_certain_does_not_become_certain() -> None:
    tokens = [Token('{"label":"', 0.0), Token("a", -0.0000412345), Token('"}', 0.0)]
    assert field_logprobs('{"label":"a"}', tokens, ONE_CLASS) == [{"label": [-0.00004123]}]


def test_replies_of_other_forms_have_no_numbers() -> None:
    forms = [
        {"judgments": {"3000000": {"charges": ["盗窃罪"]}}},
        {"judgments": None},
        {"judgments": 5},
        {"name": "甲", "charges": ["盗窃罪"]},
    ]
    for form in forms:
        reply = dump(form)
        assert field_logprobs(reply, [Token(reply, -1.0)], FIELDS) == [], form


JUNK = st.recursive(
    st.none() | st.integers(0, 9) | st.sampled_from(["甲", "盗窃罪", "264", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["judgments", "name", "charges", "articles", "penalty", "0"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JUNK, st.integers())
def test_no_reply_ends_asking_or_reading(value: Any, seed: int) -> None:
    reply = dump(value)
    row = {"texts": [reply], "logprobs": field_logprobs(reply, cut(reply, Random(seed)), FIELDS)}
    decoded = TASK.ask.decode(reply, CASE, KNOWN)
    assert model_logprobs(row, decoded, FIELDS).keys() <= {
        (number, name) for number in (0, 1) for name in FIELDS.fields
    }


def test_each_person_has_the_numbers_of_their_own_values() -> None:
    numbers = [{name: [number] for name in FIELDS.fields} for number in (-1.0, -2.0)]

    def found(written: list[Any]) -> Any:
        reply = dump({"judgments": written})
        decoded = TASK.ask.decode(reply, CASE, KNOWN)
        return model_logprobs({"texts": [reply], "logprobs": numbers}, decoded, FIELDS)

    assert found(GOLD) == {
        (number, name): -1.0 - number for number in (0, 1) for name in FIELDS.fields
    }
    assert found(GOLD[::-1]) == {}, "they stand in another order"
    assert found(GOLD[:1]) == {(0, name): -1.0 for name in FIELDS.fields}
    other = {**GOLD[1], "charges": ["盗窃"]}
    assert (1, "charges") not in found([GOLD[0], other]), "repair has changed it"


def test_a_task_of_one_class_has_one_number() -> None:
    tokens = [Token('{"label":"', 0.0), Token("over 12", -0.5), Token('"}', 0.0)]
    assert field_logprobs('{"label":"over 12"}', tokens, ONE_CLASS) == [{"label": [-0.5]}]


@pytest.mark.parametrize("reply", ['{"label":"a"', 'I say {"label":"a"}', '["a"]', ""])
def test_what_is_not_the_json_alone_has_no_numbers(reply: str) -> None:
    assert field_logprobs(reply, [Token(reply, -1.0)], ONE_CLASS) is None


def test_tokens_that_do_not_spell_the_reply_give_no_numbers() -> None:
    assert field_logprobs('{"label":"a"}', [Token('{"label":"b"}', -1.0)], ONE_CLASS) is None


def test_an_endpoints_tokens_may_be_parts_of_characters() -> None:
    spelled = "罪".encode()
    content = [
        {"token": "\\xe7\\xbd", "logprob": -1.0, "bytes": list(spelled[:2])},
        {"token": "\\xaa", "logprob": -2.0, "bytes": list(spelled[2:])},
        {"token": "a", "logprob": -3, "bytes": None},
    ]
    found = token_logprobs({"content": content})
    assert found is not None
    assert [(one.decoded_token, one.logprob) for [one] in map(dict.values, found)] == [
        ("", -1.0),
        ("罪", -2.0),
        ("a", -3.0),
    ]


@pytest.mark.parametrize(
    "other",
    [
        *(None, {}, {"content": None}, {"content": []}, {"content": ["a"]}, [1], "none"),
        {"content": [{"token": "a", "logprob": math.nan}]},
        {"content": [{"token": "a", "logprob": -math.inf}]},
        {"content": [{"token": "a", "logprob": None}]},
    ],
)
def test_an_endpoint_may_send_no_or_other_log_probabilities(other: Any) -> None:
    assert token_logprobs(other) is None


def test_they_are_those_of_the_masked_model(
    llm: Engine, question_maker: QuestionMaker, workshop: Path
) -> None:
    """Recompute each number with transformers and the grammar's mask, and compare replies."""
    model = AutoModelForCausalLM.from_pretrained(
        llm.llm.model_config.model, dtype=torch.float32
    ).eval()
    size = model.config.vocab_size
    for example in list(Reader(TASK).read(workshop / "demo/test.jsonl"))[:3]:
        question = question_maker.question(example)
        row = llm.runner.run(ask(llm, question, f"logprobs {example.id}", FIELDS))
        plain = llm.runner.run(llm.ask(Request(f"plain {example.id}", question, {})))
        reply = plain.outputs[0]
        assert row["texts"] == [reply.text]
        assert reply.logprobs is None
        ids = torch.tensor([[*question.prompt, *reply.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(question.prompt) - 1 : -1].float()
        options = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(question.schema), defaults=options)
        matcher = LLMatcher(question_maker._grammar_tokenizer, grammar)
        mask = allocate_token_bitmask(1, size)
        tokens = []
        for token, of_token in zip(reply.token_ids, logits, strict=True):
            fill_next_token_bitmask(matcher, mask)
            masked = of_token[None, :].clone()
            apply_token_bitmask_inplace(masked, mask)
            logprob = float(masked.log_softmax(-1)[0, token])
            tokens.append((token, logprob))
            matcher.consume_token(token)
        spelled = [question_maker.tokenizer.decode([token]) for token, _ in tokens]
        if any("\ufffd" in text for text in spelled):
            expected_total = sum(logprob for _, logprob in tokens)
            assert summed(row["logprobs"]) >= expected_total - 1e-2
            continue
        texts = [Token(text, logprob) for text, (_, logprob) in zip(spelled, tokens, strict=True)]
        expected = field_logprobs(reply.text, texts, FIELDS)
        assert expected is not None
        for item, other in zip(row["logprobs"], expected, strict=True):
            for name in FIELDS.fields:
                assert item[name] == pytest.approx(other[name], abs=2e-3)
        assert math.isfinite(summed(row["logprobs"]))
