"""An adapter that is loaded unmerged answers as the merged one, or the engine does not start."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from panjue.prompts.architecture import load_language_model
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.serve.ask import Budget
from panjue.serve.engine import Engine, LoRARequest, check_adapter, engine, first_token
from panjue.serve.merge import KNOWN_TEXT, WEIGHTS, served_model

Weights = dict[str, torch.Tensor]


def other_names(weights: Weights) -> Weights:
    return {key.replace(".model.layers", ".language_model.layers"): w for key, w in weights.items()}


def zeros(weights: Weights) -> Weights:
    return {key: torch.zeros_like(weight) for key, weight in weights.items()}


@pytest.fixture(scope="module")
def unmerged(trained: Path, small: dict[str, Any]) -> Any:
    """Return an engine that has checked the adapter of the short training."""
    with engine(
        served_model(trained / "adapter", "lora"), small["engine"], Budget(3072, 3072), 0
    ) as started:
        yield started


def test_unmerged_is_merged(unmerged: Engine, trained: Path, merged: Path) -> None:
    ids = torch.tensor([load_tokenizer(merged).encode(KNOWN_TEXT)])
    with torch.no_grad():
        logits = load_language_model(merged, dtype="auto")(ids).logits[0, -1]
    logs = torch.log_softmax(logits, 0)
    lora = LoRARequest("adapter", 1, str(trained / "adapter"))
    found = unmerged.runner.run(first_token(unmerged.llm, lora))
    assert found == pytest.approx({token: logs[token].item() for token in found}, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "config", "complaint"),
    [
        (other_names, {}, "in vLLM it changes nothing; use"),
        (zeros, {}, "in vLLM it changes nothing; use"),
        (dict, {"use_dora": True}, "vLLM does not yet support DoRA"),
        (dict, {"r": 64}, "LoRA rank 64 is greater than max_lora_rank"),
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
    save_file(change(load_file(adapter / WEIGHTS)), adapter / WEIGHTS)
    place = adapter / "adapter_config.json"
    write_json(place, {**read_json(place), **config})
    lora = LoRARequest(str(tmp_path), 2 + hash(tmp_path) % 10**6, str(adapter))
    with pytest.raises(UserError, match=f"^adapter=lora: .*{complaint}.* adapter=merge$"):
        unmerged.runner.run(check_adapter(unmerged.llm, lora))
