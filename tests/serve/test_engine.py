"""The engine is asked what was trained on, and what it returns becomes a row."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from panjue.finetune.classifier.fit import training_advisor
from panjue.finetune.data import RowMaker, RowReport
from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker, Refusal, Request, row
from panjue.serve.engine import CompletionOutput, Engine, EngineEnded, RequestOutput

TASK = load_task("judgment")

RowsOf = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def examples(workshop: Path) -> list[Example]:
    return list(Reader(TASK).read(workshop / "demo/test.jsonl"))[:4]


def outcome(llm: Engine, asker: Asker, example: Example) -> RequestOutput:
    return llm.runner.run(llm.ask(Request(example.id, asker.question(example), {})))


def test_the_prompt_that_vllm_sees_is_the_one_that_was_trained_on(
    llm: Engine, asker: Asker, trained: Path, examples: list[Example]
) -> None:
    [fitted] = (trained / "rows").glob("classifier-*")
    advisor = training_advisor(fitted, TASK, asker.labels)
    maker = RowMaker(TASK, asker.tokenizer, asker.labels, asker.budget.usual)
    trained_on = maker.rows(map(advisor.show, examples), RowReport())
    for example, tokens in zip(examples, trained_on, strict=True):
        prompt = tokens["input_ids"][: tokens["labels"].count(-100)]
        assert outcome(llm, asker, example).prompt_token_ids == prompt
        assert "分类器的意见" in asker.tokenizer.decode(prompt)


def test_samples_follow_the_first_reply(
    llm: Engine, asker: Asker, examples: list[Example], rows_of: RowsOf
) -> None:
    greedy = {row["id"]: row["texts"] for row in rows_of(llm, asker, examples)}
    passes = [{}, {"n": 4, "temperature": 1.0}]
    for one in rows_of(llm, asker, examples, in_flight=3, passes=passes):
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
    first: CompletionOutput, kept: dict[str, Any], asker: Asker, examples: list[Example]
) -> None:
    samples = [reply("stop", "一"), reply("error", ""), reply("length", "三")]
    made = row(asker.question(examples[0]), [output(first), output(*samples)])
    assert made | kept == made
    assert ("refused" in made) == ("refused" in kept)


def test_what_an_ending_engine_breaks_off_is_an_error(
    llm: Engine, asker: Asker, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_off(*_: object, **__: object) -> AsyncIterator[RequestOutput]:
        yield output(reply(None, "{"))
        yield output(reply("stop", "{}"), reply("abort", "{"))

    monkeypatch.setattr(AsyncLLM, "generate", broken_off)
    with pytest.raises(EngineEnded):
        outcome(llm, asker, examples[0])


def test_a_schema_that_the_grammar_library_refuses_is_found_before_the_request(
    asker: Asker, trained: Path, merged: Path, examples: list[Example]
) -> None:
    bad_schema = {"type": "array", "uniqueItems": True}
    bad = replace(TASK, ask=replace(TASK.ask, schema=lambda _example, _labels: bad_schema))
    with pytest.raises(Refusal, match="grammar library"):
        Asker(bad, trained / "adapter", merged, asker.budget).question(examples[0])
