"""Examples of a pack must not see each other: where layers let them, packing is refused."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3NextConfig

from panjue.finetune.model import check_packing
from panjue.prompts.plumbing.errors import UserError

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
HYBRID = Qwen3NextConfig(
    **SMALL,
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
PLAIN = [Qwen2Config(**SMALL), Qwen3Config(**SMALL, head_dim=16)]


def leak(config: Any) -> float:
    """Return how far the logits of an example in a pack are from those alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    one, other = torch.randint(0, 64, (1, 7)), torch.randint(0, 64, (1, 9))
    places = torch.cat([torch.arange(7), torch.arange(9)])[None]
    with torch.no_grad():
        both = torch.cat([one, other], 1)
        packed = model(both, position_ids=places, use_cache=False).logits[:, 7:]
        return float((packed - model(other).logits).abs().max())


@pytest.mark.parametrize("config", PLAIN, ids=["qwen2", "qwen3"])
def test_attention_keeps_examples_apart(config: Any) -> None:
    check_packing(config)
    assert leak(config) < 1e-4


def test_linear_attention_does_not_and_is_refused() -> None:
    assert leak(HYBRID) > 1e-3
    with pytest.raises(UserError, match=r"layers of linear_attention.*set trainer.packing=false"):
        check_packing(HYBRID)
