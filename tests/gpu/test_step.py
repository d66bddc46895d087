"""The figures of the stage `step`, on the processor: what is counted, and where time goes."""

from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.gpu.step import KINDS, kind_of, lora_flops, peak_of, shares

TINY = Qwen3Config(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=331,
)


def test_what_a_step_needs_is_counted_by_hand() -> None:
    """`tests.finetune.test_memory` has torch count the same of Qwen3-8B."""
    one = SimpleNamespace(
        hidden_size=2,
        num_attention_heads=1,
        head_dim=3,
        num_key_value_heads=1,
        intermediate_size=5,
        num_hidden_layers=7,
        vocab_size=11,
    )
    frozen = 2 * 3 + 2 * 3 + 2 * 3 + 3 * 2 + 2 * 5 + 2 * 5 + 5 * 2
    trained = 5 + 5 + 5 + 5 + 7 + 7 + 7
    tokens = 4 * frozen * (2 + 3) + 6 * trained * (2 + 3)
    attention = 12 * 3 * (2**2 + 3**2)
    assert lora_flops(one, 1, [2, 3], 4) == 7 * (tokens + attention) + 4 * 4 * 2 * 11


def test_time_is_shared_among_what_it_is_for() -> None:
    times = {
        ("aten::_flash_attention_forward", 300): [[1, 4]],
        ("aten::_fused_adamw_", 100): [[4]],
        ("aten::mm", 200): [[5, 64], [64, 331]],
        ("aten::embedding", 100): [[331, 64], [5]],
        ("aten::mul", 100): [[5]],
    }
    events = [
        SimpleNamespace(
            name=name,
            self_device_time_total=time_us,
            input_shapes=shapes,
            device_type=DeviceType.CPU,
        )
        for (name, time_us), shapes in times.items()
    ]
    kernel = SimpleNamespace(name="gemm", device_type=DeviceType.CUDA, self_device_time_total=900)
    events.append(kernel)
    found = shares(events, 331, seconds=1e-3, device="cuda")
    expected = {"attention": 0.3, "optimizer": 0.1, "logits": 0.2, "rest": 0.2, "host": 0.2}
    assert found == pytest.approx(expected)


def test_a_step_of_a_model_has_every_kind() -> None:
    model = AutoModelForCausalLM.from_config(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        model(torch.ones(1, 20, dtype=torch.long)).logits.sum().backward()
        optimizer.step()
    found = shares(profiled.events(), TINY.vocab_size, seconds=0.0, device="cpu")
    assert all(found[kind] > 0 for kind in KINDS)
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Tesla T4", 65e12),
        ("no GPU", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_what_an_operation_is_for_is_in_its_name_or_shapes() -> None:
    assert kind_of("aten::_scaled_dot_product_efficient_attention", [], 331) == "attention"
    assert kind_of("_TokenLossesBackward", [[5, 331]], 331) == "logits"
    assert kind_of("aten::mm", [[5, 64], [64, 64]], 331) == "rest"
