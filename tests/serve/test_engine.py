"""The engine is asked what was trained on, and what it returns becomes a row."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3NextConfig

from panjue.finetune.classifier.fit import training_advisor
from panjue.finetune.data import RowMaker, RowReport
from panjue.finetune.trained import open_trained
from panjue.prompts.example import Example
from panjue.prompts.labels import collect
from panjue.prompts.reader import Reader
from panjue.prompts.task import closed_object, load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve import engine
from panjue.serve.ask import QuestionMaker, Refusal, Request, row
from panjue.serve.engine import (
    AsyncEngineArgs,
    CompletionOutput,
    Engine,
    EngineEnded,
    RequestOutput,
    for_this_machine,
)
from panjue.serve.settings import GenerateConfig

# isort: split
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

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
    maker = QuestionMaker(bad, open_trained(trained), merged, question_maker.budget)
    with pytest.raises(Refusal, match="grammar library"):
        maker.question(examples[0])


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


def test_a_large_gpu_answers_as_many_calls_as_vllm_computes_at_once(llm: Engine) -> None:
    assert llm.sequences == llm.llm.vllm_config.scheduler_config.max_num_seqs > 0
    plain = GenerateConfig.model_validate({})
    assert plain.slots(1024) == 1024
    assert plain.slots(32) == plain.slots() == 256, "as on a CPU"
    assert GenerateConfig.model_validate({"in_flight": 64}).slots(1024) == 64
    of_eight = {"engine": {"data_parallel_size": 8}}
    assert GenerateConfig.model_validate(of_eight).slots(1024) == 8192


LIKE_QWEN: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "architectures": ["Qwen3NextForCausalLM"],
}
"""The layers of Qwen3.5-9B, in a class that vLLM loads without the packages for pictures."""


@pytest.fixture
def hybrid(tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of an engine for a base with linear attention and 18 GB of weights."""
    Qwen3NextConfig(**LIKE_QWEN, dtype="bfloat16").save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(18 * 10**9)  # a hole, which takes no room
    return {"model": str(tmp_path), "tokenizer": str(tmp_path), "max_model_len": 4096}


def blocks_of_vllm(arguments: dict[str, Any], available: int) -> int:
    """Return how many cache blocks vLLM has in so many bytes, by its own rules."""
    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    config.cache_config.kv_cache_layout = "LBNHC"
    kind, _ = ModelRegistry.resolve_model_cls(LIKE_QWEN["architectures"], config.model_config)
    shapes = kind.get_mamba_state_shape_from_config(config)
    dtypes = kind.get_mamba_state_dtype_from_config(config)
    state = MambaSpec(shapes=shapes, dtypes=dtypes, block_size=1)
    token = FullAttentionSpec(block_size=1, num_kv_heads=4, head_size=256, dtype=torch.bfloat16)
    tokens = 16 * ceil(state.page_size_bytes / token.page_size_bytes / 16)  # whose page is as large
    attention = replace(token, block_size=tokens)
    padded = replace(state, block_size=tokens, page_size_padded=attention.page_size_bytes)
    of_kind = {"linear_attention": padded, "full_attention": attention}
    specs = {str(n): of_kind[layer] for n, layer in enumerate(LIKE_QWEN["layer_types"])}
    groups = get_kv_cache_groups(config, specs)
    found = get_kv_cache_config_from_groups(config, groups, available)
    assert found.has_mamba_layers, "vLLM compares the sequences with the blocks of these"
    return int(found.num_blocks)


@pytest.mark.parametrize(("gib", "least"), [(22, 20), (24, 45), (32, 150), (80, 250)])
def test_states_of_linear_attention_get_as_many_sequences_as_vllm_does_not_refuse(
    gib: int, least: int, hybrid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert for_this_machine(hybrid) == hybrid, "without a GPU vLLM refuses none"
    total = gib * 2**30
    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: total)
    sequences = for_this_machine(hybrid)["max_num_seqs"]
    rest = int(0.92 * total) - 18 * 10**9 - 3 * 2**30  # what its activations and graphs may take
    assert least < sequences <= blocks_of_vllm(hybrid, rest)
    mine = {**hybrid, "max_num_seqs": 1000}
    assert for_this_machine(mine) == mine


def test_a_gpu_reads_the_config_of_a_base_once_and_once_more_for_its_states(
    hybrid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: 24 * 2**30)
    monkeypatch.setattr(current_platform, "is_device_capability_family", lambda *_: True)
    create = AsyncEngineArgs.create_model_config
    made = []

    def counted(args: AsyncEngineArgs) -> Any:
        made.append(args.model)
        return create(args)

    monkeypatch.setattr(AsyncEngineArgs, "create_model_config", counted)
    found = for_this_machine(hybrid)
    assert found["max_num_seqs"] < 250
    assert len(made) == 2, "the states need the config of the whole engine, which has its own"
    decided = {"max_num_seqs": 9, "enable_flashinfer_autotune": True}
    for more, count in ({"max_num_seqs": 9}, 1), (decided, 0):
        made.clear()
        for_this_machine({**hybrid, **more})
        assert len(made) == count


@pytest.mark.parametrize(
    ("capability", "more", "is_skipped"),
    [
        ((9, 0), {}, True),
        ((9, 0), {"quantization": "fp8"}, False),
        ((9, 0), {"kernel_config": {"enable_flashinfer_autotune": True}}, False),
        ((9, 0), {"enable_flashinfer_autotune": True}, False),
        ((10, 0), {}, False),
        ((8, 9), {}, False),
        (None, {}, False),  # a CPU
    ],
)
def test_flashinfer_is_not_tuned_where_nothing_uses_it(
    capability: tuple[int, int] | None,
    more: dict[str, Any],
    is_skipped: bool,
    trained: Path,
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_family(of: int, device_id: int = 0) -> bool:
        return capability is not None and capability[0] * 10 == of

    monkeypatch.setattr(current_platform, "is_device_capability_family", is_family)
    model = str(workshop / "base/model")
    arguments = {"model": model, "tokenizer": model, **more}
    found = for_this_machine(arguments)
    assert found == {**arguments, **({"enable_flashinfer_autotune": False} if is_skipped else {})}
    assert not is_skipped or AsyncEngineArgs(**found).enable_flashinfer_autotune is False


def test_a_base_with_experts_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "is_device_capability_family", lambda *_: True)
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "architectures": ["Qwen3MoeForCausalLM"]}
    Qwen3MoeConfig(**shape, dtype="bfloat16").save_pretrained(tmp_path)
    arguments = {"model": str(tmp_path), "tokenizer": str(tmp_path)}
    assert for_this_machine(arguments) == arguments
