"""An adapter that is loaded unmerged answers as the merged one, or the engine does not start."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from panjue.finetune.trained import open_trained, read_trained
from panjue.prompts.architecture import load_language_model
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.prompts.plumbing.run import ADAPTER_WEIGHTS
from panjue.serve.ask import Budget
from panjue.serve.engine import (
    Engine,
    EngineEnded,
    LoRARequest,
    check_adapter,
    engine,
    first_token_logprobs,
)
from panjue.serve.merge import KNOWN_TEXT, logits, merge, served_model
from tests.foreign import adopted

Weights = dict[str, torch.Tensor]


def renamed(weights: Weights) -> Weights:
    return {key.replace(".model.layers", ".language_model.layers"): w for key, w in weights.items()}


@pytest.fixture(scope="module")
def unmerged(trained: Path, small: dict[str, Any]) -> Iterator[Engine]:
    """Return an engine that has checked the adapter of the short training."""
    served = served_model(read_trained(trained / "adapter"), "lora")
    with engine(served, small["engine"], Budget(3072, 3072), 0) as started:
        yield started


def test_unmerged_is_merged(unmerged: Engine, trained: Path, merged: Path) -> None:
    ids = torch.tensor([load_tokenizer(merged).encode(KNOWN_TEXT)])
    expected = torch.log_softmax(logits(load_language_model(merged, dtype="auto"), ids)[0, -1], 0)
    lora = LoRARequest("adapter", 1, str(trained / "adapter"))
    found = unmerged.runner.run(first_token_logprobs(unmerged.llm, lora))
    assert found == pytest.approx({token: expected[token].item() for token in found}, abs=1e-3)


def test_one_engine_answers_with_several_adapters_in_turns(
    unmerged: Engine, trained: Path, tmp_path: Path
) -> None:
    def found() -> dict[int, float]:
        return unmerged.runner.run(first_token_logprobs(unmerged.llm, unmerged.lora))

    first = found()
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    shutil.copy(trained / "checkpoints/checkpoint-6" / ADAPTER_WEIGHTS, adapter)
    unmerged.switch(served_model(read_trained(adapter), "lora"))
    assert found() != first
    unmerged.switch(served_model(read_trained(trained / "adapter"), "lora"))
    assert found() == first


def test_an_adopted_adapter_is_unmerged_what_it_is_merged(
    unmerged: Engine, foreign: Path, workshop: Path, trained: Path, tmp_path: Path
) -> None:
    adopted(tmp_path / "run", workshop, folders=[foreign])
    of_peft = open_trained(tmp_path / "run")
    unmerged.switch(served_model(of_peft, "lora"))
    found = unmerged.runner.run(first_token_logprobs(unmerged.llm, unmerged.lora))
    folder = merge(of_peft)
    ids = torch.tensor([load_tokenizer(folder).encode(KNOWN_TEXT)])
    expected = torch.log_softmax(logits(load_language_model(folder, dtype="auto"), ids)[0, -1], 0)
    assert found == pytest.approx({token: expected[token].item() for token in found}, abs=1e-3)
    unmerged.switch(served_model(read_trained(trained / "adapter"), "lora"))


@pytest.mark.parametrize(
    ("change", "config", "complaint"),
    [
        (renamed, {}, "in vLLM it changes nothing; use"),
        (dict, {"use_dora": True}, "vLLM does not yet support DoRA"),
    ],
)
def test_what_vllm_would_ignore_or_cannot_load_is_refused(
    change: Callable[[Weights], Weights],
    config: dict[str, Any],
    complaint: str,
    unmerged: Engine,
    trained: Path,
    tmp_path: Path,
) -> None:
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    save_file(change(load_file(adapter / ADAPTER_WEIGHTS)), adapter / ADAPTER_WEIGHTS)
    place = adapter / "adapter_config.json"
    write_json(place, {**read_json(place), **config})
    lora = LoRARequest(str(tmp_path), 2 + hash(tmp_path) % 10**6, str(adapter))
    with pytest.raises(UserError, match=f"^adapter=lora: .*{complaint}.* adapter=merge$"):
        unmerged.runner.run(check_adapter(unmerged.llm, lora))


def test_a_first_request_may_take_longer_than_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles: 30 s with caches that are empty, minutes where others use the processor."""

    async def slow(_: Any, lora: LoRARequest | None) -> dict[int, float]:
        await asyncio.sleep(0.1)
        return {1: -2.0 if lora else -1.0}

    async def hanging(_: LoRARequest) -> None:
        await asyncio.sleep(60)

    async def loaded(_: LoRARequest) -> None:
        pass

    monkeypatch.setattr("panjue.serve.engine.CALL_TIMEOUT_S", 0.01)
    monkeypatch.setattr("panjue.serve.engine.first_token_logprobs", slow)
    lora = LoRARequest("adapter", 1, "nowhere")
    asyncio.run(check_adapter(cast("Any", SimpleNamespace(add_lora=loaded)), lora))
    with pytest.raises(EngineEnded):
        asyncio.run(check_adapter(cast("Any", SimpleNamespace(add_lora=hanging)), lora))
