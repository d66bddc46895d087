"""The model to train: the base model, optionally in four bits, optionally with LoRA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.utils import import_utils

from panjue.prompts.architecture import load_language_model, quantization_of
from panjue.prompts.plumbing.errors import UserError, of_library

Model = PreTrainedModel | PeftModel


def load_base(
    folder: Path,
    dtype: torch.dtype,
    quantization: Mapping[str, Any] | None = None,
    attention: str = "sdpa",
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load the base's language model, quantized if `quantization` is given and it is not yet.

    It goes straight to `device`: by way of the memory of the host, eight processes would need eight
    copies there.
    """
    # On an H100 or H200, cuDNN's attention has NaN gradients if there is a mask, as in packs, and
    # the width is 64 above a multiple of 128 (torch 2.11 and later, pytorch/pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if device:
        settings["device_map"] = {"": device}
    if quantization and not quantization_of(folder):
        four_bits = {"bnb_4bit_compute_dtype": dtype, **quantization}
        settings["quantization_config"] = BitsAndBytesConfig(**four_bits)
    with of_library(f"{folder}, attn_implementation={attention}"):
        model: PreTrainedModel = load_language_model(folder, **settings)
    for module in model.modules():
        # In an evaluation on a CPU with AVX-512 BF16, bitsandbytes repacks its four-bit layers for
        # inference and does not undo it: later steps pass no gradient through them, and no error.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.generation_config = GenerationConfig()  # transformers loads some that it cannot save
    return model


MAX_LEAK = 1e-3
"""Largest `leak` of a model that keeps the examples of a pack apart."""

PROBE_TOKENS = 12


@torch.no_grad()
def leak(model: torch.nn.Module) -> float:
    """Return the largest change of an example's logits when another one precedes it in its pack.

    In units of their standard deviation. With tiny models it was 0 where examples are kept apart,
    in bfloat16 too, and 0.4 to 6 where layers carry a state or ignore `position_ids`.
    """
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    size = (3, 1, PROBE_TOKENS)
    before, other, example = torch.randint(1, vocabulary, size, generator=generator)
    positions = torch.arange(PROBE_TOKENS).repeat(1, 2)
    logits = []
    device = next(model.parameters()).device
    model.eval()  # without dropout
    for first in (before, other):
        pack = torch.cat([first, example], 1)
        out = model(pack.to(device), position_ids=positions.to(device), use_cache=False)
        logits.append(out.logits[:, PROBE_TOKENS:].float())
    return float((logits[0] - logits[1]).abs().max() / logits[0].std())


def resolve_dtype(name: str, args: Any, *, frozen: bool) -> torch.dtype:
    """Return the torch type for `dtype`; `auto` is that of the training if weights are frozen."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if frozen and args.bf16:
        return torch.bfloat16
    if frozen and args.fp16:
        return torch.float16
    return torch.float32


def has_bf16() -> bool:
    """Return whether the GPU computes in bfloat16; without one, whether the CPU does.

    A CPU does so with AVX-512 BF16 or AMX. A GPU before Ampere only emulates it, slowly, which
    torch counts as support unless it is asked (torch/cuda/__init__.py, `is_bf16_supported`).
    """
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def gpu_memory() -> int | None:
    """Return the bytes of this process's GPU; None without one."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def precision(given: Mapping[str, Any]) -> dict[str, bool]:
    """Return trl's `bf16` and `fp16`: those `given`, or the one that this machine computes in."""
    if "bf16" in given or "fp16" in given:
        return {name: bool(given.get(name)) for name in ("bf16", "fp16")}
    bf16 = has_bf16()
    return {"bf16": bf16, "fp16": torch.cuda.is_available() and not bf16}


def lacks_kernels(model: Any) -> bool:
    """Say whether this model has linear attention, and a GPU that is slow with it as installed."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if "linear_attention" not in types or not torch.cuda.is_available():
        return False
    has_attention = import_utils.is_flash_linear_attention_available()
    return not (has_attention and import_utils.is_causal_conv1d_available())


def with_lora(model: PreTrainedModel, settings: Mapping[str, Any]) -> PeftModel:
    """Freeze `model` and add LoRA matrices to its linear layers.

    A four-bit base needs no `prepare_model_for_kbit_training`. That function would convert
    embeddings and norms to float32, which takes 2.5 GB more for an 8B model.
    """
    addresses = {weight: weight.data_ptr() for weight in model.parameters()}
    with of_library("lora"):
        adapted = get_peft_model(model, LoraConfig(**settings, task_type="CAUSAL_LM"))
    if any(weight.data_ptr() != address for weight, address in addresses.items()):
        raise UserError(
            "lora: these settings change the base's weights too, and the adapter does not fit the "
            "original base; remove kasa_config and similar settings"
        )
    return adapted
