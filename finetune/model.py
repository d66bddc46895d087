"""The model that is trained: base weights, four-bit or not, with or without LoRA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_torch_bf16_gpu_available

from panjue.prompts.plumbing.errors import UserError

Model = PreTrainedModel | PeftModel


def load_base(
    folder: Path,
    dtype: torch.dtype,
    quantization: Mapping[str, Any] | None = None,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """Load the base model's safetensors; four-bit where `quantization` says so.

    Args:
        folder: A transformers model folder.
        dtype: Type of the weights.
        quantization: Arguments of `BitsAndBytesConfig`; None leaves the weights whole.
        attention: What transformers calls `attn_implementation`.

    Raises:
        UserError: The model has no such attention.
    """
    bits = BitsAndBytesConfig(**quantization) if quantization else None
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            quantization_config=bits,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=attention,
        )
    except (ValueError, ImportError) as error:
        if "attention" not in str(error).lower():
            raise
        raise UserError(f"attn_implementation: {str(error).splitlines()[0]}") from None
    # The hub's settings for chatting (Qwen2.5 has a repetition penalty) would skew held-out scores.
    model.generation_config = GenerationConfig()
    return model


ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers that keep the examples of a pack apart by their `position_ids`."""


def check_packing(config: PretrainedConfig) -> None:
    """Refuse packs for a model whose layers would carry one example's state over into the next.

    The linear attention of Qwen3-Next and Qwen3.5 does: logits of a packed example differ by 8e-2
    from those alone, where those of Qwen3 differ by 2e-7.

    Raises:
        UserError: The model has such layers.
    """
    types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if others := sorted(types - ATTENTION):
        raise UserError(
            f"trainer.packing: this model has layers of {others[0]}, through which the examples of "
            "a pack would see each other; set trainer.packing=false"
        )


def resolve_dtype(name: str, *, bf16: bool) -> torch.dtype:
    """Return the torch type of a `dtype` setting; `auto` is bfloat16 if `bf16`, else float32.

    Raises:
        UserError: There is no such type.
    """
    if name == "auto":
        return torch.bfloat16 if bf16 else torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"dtype: {name!r} is no type; write auto, float32, bfloat16 or float16")
    return dtype


def has_bf16() -> bool:
    """Say whether the accelerator, else the CPU (AVX-512 BF16 or AMX), computes in bfloat16."""
    if torch.accelerator.is_available():
        return bool(is_torch_bf16_gpu_available())
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(can.get("avx512_bf16") or can.get("amx_bf16"))


def with_lora(model: PreTrainedModel, settings: Mapping[str, Any]) -> PeftModel:
    """Freeze `model` and put LoRA matrices beside its linear layers.

    A four-bit base needs no more: `prepare_model_for_kbit_training` would bring its embeddings and
    norms to float32, 2.5 GB more for an 8B.

    Raises:
        UserError: The settings do not go with this model: it has no such layers, say.
    """
    before = {weight: weight.data_ptr() for weight in model.parameters()}
    try:
        adapted = get_peft_model(model, LoraConfig(**settings, task_type="CAUSAL_LM"))
    except (ValueError, TypeError, AttributeError, LookupError, ImportError) as error:
        raise UserError(f"lora: {str(error).splitlines()[0]}") from None
    if any(weight.data_ptr() != place for weight, place in before.items()):
        raise UserError(
            "lora: these settings change the base's weights too, and the adapter beside the base "
            "as it was would be another model; leave kasa_config and its like out"
        )
    return adapted
