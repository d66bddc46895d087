"""Tiny bases with random weights of the real classes, as the hub has them today.

Most families need no code. To add one, give it an entry in `FAMILIES`, run tests/test_families.py,
put its name into the sets there that it fails for, and add a row to finetune/README.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from panjue.prompts.model import load_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
HEADS = {**SHAPE, "head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 32}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
DEEPSEEK = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
EYE = {"hidden_size": 32, "intermediate_size": 32}
EYES = {
    "qwen": {**EYE, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    "gemma": {**EYE, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56},
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("Qwen2", SHAPE),
    "qwen3": ("Qwen3", HEADS),
    "qwen3-moe": ("Qwen3Moe", {**HEADS, **EXPERTS}),
    "qwen3-next": ("Qwen3Next", {**HEADS, **LINEAR, **SHARED}),
    "qwen3.5": ("Qwen3_5", {"text_config": {**HEADS, **LINEAR}, "vision_config": EYES["qwen"]}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {"text_config": {**HEADS, **LINEAR, **SHARED}, "vision_config": EYES["qwen"]},
    ),
    "llama3": ("Llama", HEADS),
    "gemma3": (
        "Gemma3",
        {"text_config": {**HEADS, **WINDOW}, "vision_config": EYES["gemma"]},
    ),
    "glm4": ("Glm4", HEADS),
    "phi4": ("Phi3", {**SHAPE, **ROPE}),
    "mistral": ("Mistral", {**HEADS, "sliding_window": None}),
    "deepseek-v3": ("DeepseekV3", {**SHAPE, **DEEPSEEK, "num_key_value_heads": 2}),
    "opt": ("OPT", {**SHAPE, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}),
    "falcon": ("Falcon", {**SHAPE, "alibi": True}),
    "recurrent-gemma": (
        "RecurrentGemma",
        {**HEADS, "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 128},
    ),
}
"""Name of a family -> the name of its class, and its shape."""

TEMPLATES: dict[str, Callable[[str], str]] = {
    "qwen3.5": lambda text: text.replace("<think>\\n\\n</think>\\n\\n", "<think>\\n"),
    "gemma3": lambda text: (
        "{%- if messages[0].role == 'system' -%}"
        "{{ raise_exception('System role not supported') }}{%- endif -%}" + text
    ),
    "llama3": lambda text: "{{ 'Today Date: ' + strftime_now('%d %b %Y') }}" + text,
}
"""Family -> its kind of chat template: always thinks, without a system role, with a date."""


def make_family(
    name: str,
    tokenizer_of: Path,
    folder: Path,
    shape: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random base of a family, with the tokenizer of another model, to `folder`."""
    kind, tiny = FAMILIES[name]
    shape = tiny if shape is None else shape
    tokenizer = load_tokenizer(tokenizer_of)
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    is_whole = "text_config" in shape
    shape = {**shape, "text_config": {**shape["text_config"], **ids}} if is_whole else shape | ids
    config = getattr(transformers, f"{kind}Config")(**shape, dtype=dtype)
    torch.manual_seed(0)
    if is_whole:
        model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)
    if name in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[name](tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    return folder
