import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from panjue.finetune.classifier import training_advisor
from panjue.finetune.data import RowMaker, RowReport
from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker, Refusal, Request, row
from panjue.serve.engine import CompletionOutput, Engine, EngineEnded, RequestOutput

TASK = load_task("judgment")


@pytest.fixture(scope="module")
def examples(workshop: Path) -> list[Example]:
    return list(Reader(TASK).read(workshop / "demo/test.jsonl"))


RowsOf = Callable[..., list[dict[str, Any]]]


def outputs(llm: Engine, requests: list[Request]) -> list[tuple[Request, RequestOutput]]:
    """Return each request with its output."""

    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*map(llm.ask, requests))

    return list(zip(requests, llm.runner.run(ask()), strict=True))


def asked(asker: Asker, example: Example, **sampling: Any) -> Request:
    """Return the request for one reply to the example."""
    return Request(example.id, asker.question(example), sampling)


@pytest.fixture(scope="module")
def finished(
    llm: Engine, asker: Asker, examples: list[Example], rows_of: RowsOf
) -> list[dict[str, Any]]:
    return rows_of(llm, asker, examples)


def test_every_example_is_answered_once_and_obeys_its_own_schema(
    finished: list[dict[str, Any]], examples: list[Example], asker: Asker
) -> None:
    assert sorted(row["id"] for row in finished) == sorted(example.id for example in examples)
    by_id = {row["id"]: row for row in finished}
    for example in examples:
        row = by_id[example.id]
        assert row["finish"] == ["stop"]
        jsonschema.validate(json.loads(row["texts"][0]), TASK.ask.schema(example, asker.labels))
        assert TASK.ask.decode(row["texts"][0], example, asker.labels).readable


def test_the_prompt_that_vllm_sees_is_the_one_that_was_trained_on(
    llm: Engine, asker: Asker, trained: Path, examples: list[Example]
) -> None:
    [fitted] = (trained / "rows").glob("classifier-*")
    advisor = training_advisor(fitted, TASK, asker.labels)
    maker = RowMaker(TASK, asker.tokenizer, asker.labels, asker.budget.usual)
    trained_on = maker.rows(map(advisor.show, examples), RowReport())
    trained_prompts = {
        str(example.id): [
            i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100
        ]
        for example, row in zip(examples, trained_on, strict=True)
    }
    every = [asked(asker, example) for example in examples]
    for request, output in outputs(llm, every):
        assert output.prompt_token_ids == trained_prompts[str(request.id)]
        assert "分类器的意见" in asker.tokenizer.decode(output.prompt_token_ids)


def test_samples_follow_the_first_reply(
    llm: Engine,
    asker: Asker,
    examples: list[Example],
    finished: list[dict[str, Any]],
    rows_of: RowsOf,
) -> None:
    passes = [{}, {"n": 4, "temperature": 1.0}]
    for one in rows_of(llm, asker, examples[:4], in_flight=3, passes=passes):
        [greedy] = next(row["texts"] for row in finished if row["id"] == one["id"])
        assert one["texts"][0] == greedy
        assert len(one["texts"]) == len(one["finish"]) == 5


def reply(reason: str | None, text: str) -> CompletionOutput:
    return CompletionOutput(0, text, [1], None, [], finish_reason=reason)


def output(*replies: CompletionOutput) -> RequestOutput:
    return RequestOutput("1", None, [1], None, list(replies), finished=True)


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        (("stop", "{}"), ["{}", "一", "三"]),
        (("error", "{"), ["{", "一", "三"]),
        (("error", ""), None),
    ],
)
def test_a_sample_that_the_engine_fails_at_costs_no_other(
    first: tuple[str, str], kept: list[str] | None, asker: Asker, examples: list[Example]
) -> None:
    samples = [reply("stop", "一"), reply("error", ""), reply("length", "三")]
    question = asker.question(examples[0])
    made = row(question, [output(reply(*first)), output(*samples)])
    assert made.get("texts") == kept
    assert ("refused" in made) == (kept is None)
    assert kept is None or len(made["finish"]) == len(kept)


def test_what_an_ending_engine_breaks_off_is_an_error(
    llm: Engine, asker: Asker, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_off(*_: object, **__: object) -> AsyncIterator[RequestOutput]:
        yield output(reply(None, "{"))
        yield output(reply("stop", "{}"), reply("abort", "{"))

    monkeypatch.setattr(AsyncLLM, "generate", broken_off)
    with pytest.raises(EngineEnded):
        outputs(llm, [asked(asker, examples[0])])


def test_a_schema_that_the_grammar_library_refuses_is_found_before_the_request(
    asker: Asker, trained: Path, merged: Path, examples: list[Example]
) -> None:
    bad = replace(
        TASK,
        ask=replace(
            TASK.ask, schema=lambda _example, _labels: {"type": "array", "uniqueItems": True}
        ),
    )
    sick = Asker(bad, trained / "adapter", merged, asker.budget)
    with pytest.raises(Refusal, match="grammar library"):
        sick.question(examples[0])
