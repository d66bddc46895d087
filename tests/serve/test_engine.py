import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.v1.engine.async_llm import AsyncLLM

from panjue.finetune.data import RowMaker, RowReport
from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.repair import PENALTIES
from panjue.serve.ask import ALTERNATIVES, UNFINISHED, Asker, Refusal, Request, requests, row
from panjue.serve.engine import CompletionOutput, Engine, EngineEnded, RequestOutput, text_of

TASK = load_task("judgment")


@pytest.fixture(scope="module")
def examples(workshop: Path) -> list[Example]:
    return list(Reader(TASK).read(workshop / "demo/test.jsonl"))


RowsOf = Callable[..., list[dict[str, Any]]]


def outputs(llm: Engine, requests: list[Request]) -> list[tuple[Request, RequestOutput]]:
    """Return each request with its output."""

    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*map(llm.ask, requests))

    assert llm.runner
    return list(zip(requests, llm.runner.run(ask()), strict=True))


def asked(asker: Asker, example: Example, **sampling: Any) -> Request:
    """Return the request for one reply to the example."""
    [request] = requests(example.id, asker.question(example), [sampling])
    return request


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
    llm: Engine, asker: Asker, examples: list[Example]
) -> None:
    maker = RowMaker(TASK, asker.tokenizer, asker.labels, asker.max_tokens)
    trained_on = maker.rows(examples, RowReport())
    trained_prompts = {
        str(example.id): [
            i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100
        ]
        for example, row in zip(examples, trained_on, strict=True)
    }
    every = [asked(asker, example) for example in examples]
    for request, output in outputs(llm, every):
        assert output.prompt_token_ids == trained_prompts[str(request.id)]


@pytest.fixture(scope="module")
def sampled(
    llm: Engine, asker: Asker, examples: list[Example], rows_of: RowsOf
) -> list[dict[str, Any]]:
    """Return rows of a few examples with four samples each behind the greedy reply."""
    turns: list[dict[str, Any]] = [{"logprobs": ALTERNATIVES}]
    turns.append({**turns[0], "n": 4, "temperature": 1.0})
    return rows_of(llm, asker, examples[:4], in_flight=3, passes=turns)


def test_samples_stand_behind_the_greedy_reply_and_forks_where_it_may_part(
    asker: Asker,
    examples: list[Example],
    finished: list[dict[str, Any]],
    sampled: list[dict[str, Any]],
) -> None:
    greedy = {row["id"]: row["texts"][0] for row in finished}
    assert {row["id"] for row in sampled} == {example.id for example in examples[:4]}
    assert any(row["alternatives"][0] for row in sampled)
    for one in sampled:
        assert len(one["texts"]) == len(one["alternatives"]) == 5
        assert one["texts"][0] == greedy[one["id"]]
        for text, of_text in zip(one["texts"], one["alternatives"], strict=True):
            for place, ways in of_text:
                assert (text + asker.tokenizer.eos_token)[place:].startswith(ways[0][0])
                assert len(ways) > 1
                assert sum(chance for _, chance in ways) < 1.01


def test_the_probabilities_at_a_fork_are_the_models_under_the_schema(
    asker: Asker, merged: Path, examples: list[Example], sampled: list[dict[str, Any]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    by_id = {example.id: example for example in examples}
    key, before, value, ways = next(
        (row["id"], row["texts"][0][:place], value, ways)
        for row in sampled
        for place, ways in row["alternatives"][0]
        for value in [row["texts"][0][:place].rpartition('"penalty":"')[2]]
        if any(penalty.startswith(value) for penalty in PENALTIES)
    )
    request = asked(asker, by_id[key])
    so_far = asker.tokenizer(before, add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([request.question.prompt + so_far])).logits[0, -1]
    # The schema allows only the rest of the name of a class.
    classes = [p.removeprefix(value) + '"' for p in PENALTIES if p.startswith(value)]
    texts = {token: asker.tokenizer.decode([token]) for token in range(len(asker.tokenizer))}
    allowed = [t for t, text in texts.items() if text and any(c.startswith(text) for c in classes)]
    shares = logits[allowed].softmax(-1).tolist()
    chances = {texts[token]: share for token, share in zip(allowed, shares, strict=True)}
    # And the first bytes of characters, so that only ratios are known here.
    taken, its_chance = ways[0]
    assert its_chance <= chances[taken] + 2e-3
    for text, chance in ways:
        wanted = its_chance * chances[text] / chances[taken]
        assert chance == pytest.approx(wanted, abs=2e-3)


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
    turns = requests("1", asker.question(examples[0]), [{}, {"n": 3, "temperature": 1.0}])
    samples = [reply("stop", "一"), reply("error", ""), reply("length", "三")]
    made = row(list(zip(turns, [output(reply(*first)), output(*samples)], strict=True)), None)
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


def test_the_text_made_at_the_end_is_the_one_that_vllm_makes_as_it_grows(
    llm: Engine, asker: Asker, merged: Path, examples: list[Example]
) -> None:
    free = Asker(TASK, asker.labels, merged, asker.max_tokens, constrained=False)
    hot = {"n": 16, "temperature": 1.5, "detokenize": True}
    every = [asked(asker, e, **hot) for e in examples[:4]]
    # A character of three tokens may be cut anywhere.
    every += [asked(free, e, **hot, max_tokens=n) for n in range(1, 9) for e in examples[4:8]]
    ends = set()
    for _, output in outputs(llm, every):
        for reply in output.outputs:
            text = text_of(reply, asker.tokenizer)
            if UNFINISHED in text:
                continue  # bytes of no character: vLLM's own text depends on where they were cut
            of_text = list(reply.token_ids)[: -1 if reply.finish_reason == "stop" else None]
            is_cut = asker.tokenizer.decode(of_text).endswith(UNFINISHED)
            # Of a last token with a character and the beginning of one, vLLM leaves out both.
            assert text.startswith(reply.text) if is_cut else text == reply.text
            ends.add((reply.finish_reason, is_cut))
    assert ends >= {("stop", False), ("length", False), ("length", True)}


def test_a_half_character_before_the_end_token_is_no_text(asker: Asker) -> None:
    whole = asker.tokenizer("龘", add_special_tokens=False).input_ids
    assert len(whole) > 1
    tokens = [*whole[:-1], asker.tokenizer.eos_token_id]
    cut = CompletionOutput(0, "", tokens, None, None, finish_reason="stop")
    assert text_of(cut, asker.tokenizer) == ""


@pytest.mark.parametrize("setting", [{"stop": ["罪"]}, {"skip_special_tokens": False}], ids=str)
def test_settings_of_the_text_hold(
    llm: Engine, asker: Asker, examples: list[Example], setting: dict[str, Any]
) -> None:
    every = [asked(asker, examples[0], **setting, **more) for more in ({}, {"detokenize": True})]
    found = [output.outputs[0].text for _, output in outputs(llm, every)]
    assert found[0] == found[1] != ""


def test_a_schema_that_the_grammar_library_refuses_is_found_before_the_request(
    asker: Asker, merged: Path, examples: list[Example]
) -> None:
    bad = replace(
        TASK,
        ask=replace(
            TASK.ask, schema=lambda _example, _labels: {"type": "array", "uniqueItems": True}
        ),
    )
    sick = Asker(bad, asker.labels, merged, asker.max_tokens)
    with pytest.raises(Refusal, match="grammar library"):
        sick.question(examples[0])
