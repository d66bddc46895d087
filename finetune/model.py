"""The model that is trained: base weights, four-bit or not, with or without LoRA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, PreTrainedModel

from panjue.prompts.errors import UserError

Model = PreTrainedModel | PeftModel


def load_base(
    folder: Path, dtype: torch.dtype, quantization: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Load the base model's safetensors; four-bit where `quantization` says so.

    Args:
        folder: A transformers model folder.
        dtype: Type of the weights.
        quantization: Arguments of `BitsAndBytesConfig`; None leaves the weights whole.
    """
    bits = BitsAndBytesConfig(**quantization) if quantization else None
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        quantization_config=bits,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation="sdpa",
    )
    # The hub's settings for chatting (Qwen2.5 has a repetition penalty) would skew held-out scores.
    model.generation_config = GenerationConfig()
    return model


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
    """Say whether the GPU, else the CPU (AVX-512 BF16 or AMX), computes in bfloat16."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(can.get("avx512_bf16") or can.get("amx_bf16"))


def with_lora(model: PreTrainedModel, settings: Mapping[str, Any], *, quantized: bool) -> PeftModel:
    """Freeze `model` and put LoRA matrices beside its linear layers.

    Raises:
        UserError: The settings do not go with this model: it has no such layers, say.
    """
    if quantized:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    try:
        return get_peft_model(model, LoraConfig(**settings, task_type="CAUSAL_LM"))
    except (ValueError, TypeError, AttributeError, LookupError, ImportError) as error:
        raise UserError(f"lora: {str(error).splitlines()[0]}") from None
