"""Models to train: four bits, variants of LoRA, and settings that would change the base."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config, Qwen3ForCausalLM, Qwen3NextConfig

from panjue.finetune.model import check_packing, load_base, with_lora
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json
from panjue.serve.ask import Budget
from panjue.serve.engine import engine_settings
from panjue.serve.merge import Served, merge, served_model

from .conftest import UNEVALUATED, main


@pytest.mark.parametrize("start", ["pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga"])
def test_a_start_that_changes_the_base_is_refused(start: str) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(UserError, match=r"^lora.init_lora_weights: .* changes the base too"):
        with_lora(model, {"init_lora_weights": start})


def test_packing_is_refused_where_layers_mix_the_examples_of_a_pack() -> None:
    for config in (Qwen2Config(), Qwen3Config()):
        check_packing(config)
    with pytest.raises(UserError, match=r"layers of linear_attention.*set trainer.packing=false"):
        check_packing(Qwen3NextConfig())


def test_a_four_bit_base_stays_as_small_as_it_is_loaded(workshop: Path) -> None:
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model = with_lora(load_base(workshop / "base/model", torch.bfloat16, nf4), {"r": 2})
    whole = {p.dtype for name, p in model.named_parameters() if "lora" not in name}
    assert whole == {torch.bfloat16, torch.uint8}, "no embedding or norm in float32"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora" in name
    }


def test_generating_copies_no_weights_of_the_head(workshop: Path) -> None:
    """Torch folds a batch of states into one product only where they lie side by side."""
    model, seen = load_base(workshop / "base/model", torch.bfloat16).eval(), []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].is_contiguous()))
    model.generate(torch.ones(3, 5, dtype=torch.long), max_new_tokens=2)
    assert seen == [True, True]


def test_an_evaluation_leaves_the_gradients_of_a_four_bit_model(workshop: Path) -> None:
    """On a CPU with AVX-512 BF16, bitsandbytes passes none after it; on others it always does."""
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
    model = with_lora(load_base(workshop / "base/model", torch.bfloat16, nf4), settings)
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
    ("words", "complaint"),
    [
        ({"use_rslora": True}, None),
        ({"rank_pattern": {"q_proj": 24}}, None),
        ({"use_dora": True}, "adapter=lora: vLLM does not yet support DoRA; use adapter=merge"),
    ],
)
def test_variants_are_merged_and_what_vllm_cannot_load_unmerged_is_refused(
    words: dict[str, object], complaint: str | None, workshop: Path, tmp_path: Path
) -> None:
    settings = [f"lora.{key}={value}" for key, value in words.items()]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *UNEVALUATED, *settings])
    adapter = tmp_path / "run/adapter"
    assert words.items() <= read_json(adapter / "adapter_config.json").items()
    merge(adapter, tmp_path / "run/merged")  # compares the outputs with those of base and adapter
    budget = Budget(64, 64)
    assert engine_settings(Served(tmp_path / "run/merged"), 0, budget)["enable_lora"] is False
    served = served_model(adapter, "lora")
    if complaint is None:
        rank = engine_settings(served, 0, budget)["max_lora_rank"]
        assert rank == (32 if "rank_pattern" in words else 8)
    else:
        with pytest.raises(UserError, match=complaint):
            engine_settings(served, 0, budget)
