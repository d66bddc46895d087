"""The engine is asked what was trained on, and what it returns becomes a row."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from panjue.finetune.classifier.fit import training_advisor
from panjue.finetune.data import RowMaker, RowReport
from panjue.prompts.example import Example
from panjue.prompts.labels import collect
from panjue.prompts.reader import Reader
from panjue.prompts.task import closed_object, load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.ask import QuestionMaker, Refusal, Request, row
from panjue.serve.engine import CompletionOutput, Engine, EngineEnded, RequestOutput

TASK = load_task("judgment")

RowsOf = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def examples(workshop: Path) -> list[Example]:
    return list(Reader(TASK).read(workshop / "demo/test.jsonl"))[:4]


def outcome(llm: Engine, question_maker: QuestionMaker, example: Example) -> RequestOutput:
    return llm.runner.run(llm.ask(Request(example.id, question_maker.question(example), {})))


def test_the_prompt_that_vllm_sees_is_the_one_that_was_trained_on(
    llm: Engine, question_maker: QuestionMaker, trained: Path, examples: list[Example]
) -> None:
    [fitted] = (trained / "rows").glob("classifier-*")
    advisor = training_advisor(fitted, TASK, question_maker.labels)
    maker = RowMaker(
        TASK, question_maker.tokenizer, question_maker.labels, question_maker.budget.usual
    )
    trained_on = maker.rows(map(advisor.show, examples), RowReport())
    for example, tokens in zip(examples, trained_on, strict=True):
        prompt = tokens["input_ids"][: tokens["labels"].count(-100)]
        assert outcome(llm, question_maker, example).prompt_token_ids == prompt
        assert "分类器的意见" in question_maker.tokenizer.decode(prompt)


def test_a_row_has_the_opinions_that_its_case_alone_has(
    llm: Engine, question_maker: QuestionMaker, examples: list[Example], rows_of: RowsOf
) -> None:
    assert question_maker.advisor
    made = {row["id"]: row["opinions"] for row in rows_of(llm, question_maker, examples)}
    for example in examples:
        alone = question_maker.advisor.opinions(example)
        for opinion, expected in zip(made[example.id], alone, strict=True):
            assert opinion["answer"] == expected.answer
            for name, probabilities in expected.probabilities.items():
                assert opinion["probabilities"][name] == pytest.approx(probabilities, abs=1e-9)


def test_samples_follow_the_first_reply(
    llm: Engine, question_maker: QuestionMaker, examples: list[Example], rows_of: RowsOf
) -> None:
    greedy = {row["id"]: row["texts"] for row in rows_of(llm, question_maker, examples)}
    passes = [{}, {"n": 4, "temperature": 1.0}]
    for one in rows_of(llm, question_maker, examples, in_flight=3, passes=passes):
        assert one["texts"][:1] == greedy[one["id"]]
        assert len(one["texts"]) == len(one["finish"]) == 5


def reply(reason: str | None, text: str) -> CompletionOutput:
    return CompletionOutput(0, text, [1], None, [], finish_reason=reason)


def output(*replies: CompletionOutput) -> RequestOutput:
    return RequestOutput("1", None, [1], None, list(replies), finished=True)


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        (reply("stop", "{}"), {"texts": ["{}", "一", "三"], "finish": ["stop", "stop", "length"]}),
        (reply("error", "{"), {"texts": ["{", "一", "三"], "finish": ["error", "stop", "length"]}),
        (reply("error", ""), {"refused": "the engine failed on this request"}),
    ],
)
def test_a_sample_that_the_engine_fails_at_costs_no_other(
    first: CompletionOutput,
    kept: dict[str, Any],
    question_maker: QuestionMaker,
    examples: list[Example],
) -> None:
    samples = [reply("stop", "一"), reply("error", ""), reply("length", "三")]
    made = row(question_maker.question(examples[0]), [output(first), output(*samples)])
    assert made | kept == made
    assert ("refused" in made) == ("refused" in kept)


def test_what_an_ending_engine_breaks_off_is_an_error(
    llm: Engine,
    question_maker: QuestionMaker,
    examples: list[Example],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken_off(*_: object, **__: object) -> AsyncIterator[RequestOutput]:
        yield output(reply(None, "{"))
        yield output(reply("stop", "{}"), reply("abort", "{"))

    monkeypatch.setattr(AsyncLLM, "generate", broken_off)
    with pytest.raises(EngineEnded):
        outcome(llm, question_maker, examples[0])


def test_a_schema_that_the_grammar_library_refuses_is_found_before_the_request(
    question_maker: QuestionMaker, trained: Path, merged: Path, examples: list[Example]
) -> None:
    bad_schema = {"type": "array", "uniqueItems": True}
    bad = replace(TASK, ask=replace(TASK.ask, schema=lambda _example, _labels: bad_schema))
    with pytest.raises(Refusal, match="grammar library"):
        QuestionMaker(bad, trained / "adapter", merged, question_maker.budget).question(examples[0])


ODD = (
    *(
        "a/b",
        '引"号',
        "反\\斜",
        "制\t表",
        "换\n行",
        "é",
        "𠮷",
        "a\u2028b",
        "{",
        "</think>",
        "<|im_end|>",
    ),
    *("null", "true", "1", "1.0", "01", "264-1", "287.2"),
)
"""Texts that JSON and grammar libraries spell in more than one way, or might take for others."""


@pytest.mark.parametrize("odd", ODD)
def test_the_engine_writes_every_label_and_name_so_that_it_is_read_as_itself(
    llm: Engine, merged: Path, question_maker: QuestionMaker, odd: str
) -> None:
    """Beside labels that it could be taken for: which of them it writes, the model decides."""
    others = {odd, f"{odd}0", odd.replace("/", "\\/"), odd.upper()}
    one = {"articles": ["264"], "penalty": [PENALTIES[8]]}
    own = QuestionMaker(TASK, None, merged, question_maker.budget)
    own.labels = collect({"charges": [label], **one} for label in sorted(others))
    example = TASK.data.read({"id": 0, "fact": "事实。", "defendants": [odd, "乙"]})
    told = outcome(llm, own, example).outputs[0].text
    decoded = TASK.ask.decode(told, example, own.labels)
    judgments = decoded.answer["judgments"]
    assert decoded.readable
    assert not decoded.from_fallback
    assert [judgment["name"] for judgment in judgments] == [*example.names]
    for judgment in judgments:
        assert set(judgment["charges"]) <= others
        assert judgment["charges"]


def test_a_number_in_an_answer_is_written_in_its_one_spelling(
    llm: Engine, question_maker: QuestionMaker
) -> None:
    """`1` and `1.0` in an enum are one value, of which the library writes the first."""
    example = TASK.data.read({"id": 0, "fact": "事实。", "defendants": ["甲"]})
    for numbers in ([1, 1.0], [1.0], [12], [-3]):
        schema = closed_object({"number": {"enum": numbers}})
        question = question_maker.question(example)._replace(schema=schema)
        told = llm.runner.run(llm.ask(Request(0, question, {}))).outputs[0].text
        assert json.loads(told)["number"] in numbers
