"""Models to train: four bits, and variants of LoRA."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from panjue.finetune.model import context_of, load_base, with_lora
from panjue.finetune.trained import read_trained
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json
from panjue.serve.ask import Budget
from panjue.serve.merge import Served, merge, served_model

from .conftest import UNEVALUATED, main

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_a_four_bit_base_stays_as_small_as_it_is_loaded(workshop: Path) -> None:
    model = with_lora(load_base(workshop / "base/model", torch.bfloat16, NF4), {"r": 2})
    whole = {p.dtype for name, p in model.named_parameters() if "lora" not in name}
    assert whole == {torch.bfloat16, torch.uint8}, "no embedding or norm in float32"
    assert all(p.requires_grad == ("lora" in name) for name, p in model.named_parameters())


def test_an_evaluation_leaves_the_gradients_of_a_four_bit_model(workshop: Path) -> None:
    """On a CPU with AVX-512 BF16, bitsandbytes passes none after it; on others it always does."""
    settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
    model = with_lora(load_base(workshop / "base/model", torch.bfloat16, NF4), settings)
    ids, norms = torch.arange(1, 9)[None], []
    for _ in range(2):
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        norms.append([p.grad.norm().item() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
    assert norms[1] == norms[0]
    assert min(norms[0]) > 0


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full": {"factor": 8.0}}}, 32768),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),  # Command-R
        ({}, 0),
    ],
)
def test_scaled_positions_lengthen_a_context(config: dict[str, Any], context: int) -> None:
    assert context_of(SimpleNamespace(**config)) == context


@pytest.mark.parametrize(
    ("words", "rank"),
    [({"use_rslora": True}, 8), ({"rank_pattern": {"q_proj": 24}}, 32), ({"use_dora": True}, 0)],
)
def test_variants_of_lora_are_merged(
    words: dict[str, object], rank: int, workshop: Path, tmp_path: Path
) -> None:
    """`rank` is that of the unmerged adapter in vLLM; 0: there it has none."""
    from panjue.serve.engine import engine_settings  # imports vLLM

    settings = [f"lora.{key}={value}" for key, value in words.items()]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *UNEVALUATED, *settings])
    adapter = tmp_path / "run/adapter"
    assert words.items() <= read_json(adapter / "adapter_config.json").items()
    assert (
        merge(read_trained(adapter)) == tmp_path / "run/merged"
    )  # compares the outputs with those of base and adapter
    budget = Budget(64, 64)
    assert engine_settings(Served(tmp_path / "run/merged"), 0, budget)["enable_lora"] is False
    if not rank:
        with pytest.raises(UserError, match=r"adapter: is of DoRA, which vLLM needs merged; use"):
            served_model(read_trained(adapter), "lora")
        return
    served = served_model(read_trained(adapter), "lora")
    assert engine_settings(served, 0, budget)["max_lora_rank"] == rank


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    workshop: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(workshop / "base/model", tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.chat_template = "<|new|>" + tokenizer.chat_template
    tokenizer.save_pretrained(base)
    number = tokenizer.convert_tokens_to_ids("<|new|>")
    words = [f"model={base}", f"run={tmp_path}/run", "dry_run=true"]
    with pytest.raises(UserError, match=rf"has a token {number} \('<\|new\|>'\), and the model"):
        main(workshop / "sft.yaml", words)
