"""The language model in a base: checks whether it can be trained and answer, and loads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError, of_library
from panjue.prompts.plumbing.files import read_object

TEXT_KEYS = {
    r"^language_model\.(?=lm_head\.)": "",
    r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)": "model.",
}
"""Patterns of weight names in a multimodal model -> the names in its language model."""


def check_quantization(folder: Path, name: str) -> None:
    """Refuse quantized weights by their config alone, except those of bitsandbytes in four bits.

    transformers would load others as garbage, or replace them by random weights.
    """
    quantization = quantization_of(folder)
    if quantization and not quantization.get("load_in_4bit"):
        method = quantization.get("quant_method", "unknown method")
        raise UserError(
            f"{name}: its weights are quantized ({method}); take the same model in bfloat16"
        )


def quantization_of(folder: Path) -> Mapping[str, Any]:
    """Return how a base's weights are quantized, by its config; empty if they are not.

    A multimodal model has it in `text_config`, and compressed-tensors had its own key.
    """
    config = read_object(folder / "config.json")
    of_text = (config.get("text_config") or {}).get("quantization_config")
    return config.get("quantization_config") or of_text or config.get("compression_config") or {}


def text_config(folder: Path) -> Any:
    """Return transformers' config of a base's language model, without vision or audio."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    with of_library(str(folder)):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
    if text.model_type not in CLASSES:
        raise UserError(
            f"{folder}: transformers has no language model of {config.model_type} alone, which "
            "could be trained; take a text model, such as Qwen/Qwen3-8B"
        )
    if text is not config:  # these two are read from the config of the whole model
        text.tie_word_embeddings = config.tie_word_embeddings
        if hasattr(config, "quantization_config"):
            text.quantization_config = config.quantization_config
    text.architectures = [CLASSES[text.model_type]]
    return text


def is_part(folder: Path) -> bool:
    """Say whether the language model is part of a multimodal model."""
    return "text_config" in read_object(folder / "config.json")


def load_language_model(folder: Path, **settings: Any) -> Any:
    """Load the language model from safetensors, which must contain exactly its weights.

    `settings` are further arguments of transformers' `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import WeightRenaming

    text = text_config(folder)
    is_whole = not is_part(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        config=text,
        key_mapping=None if is_whole else TEXT_KEYS,
        output_loading_info=True,
        use_safetensors=True,
        trust_remote_code=False,
        **settings,
    )
    faults = [f"has no {key}" for key in sorted(loading["missing_keys"])]
    for key in sorted(loading["unexpected_keys"]):
        if is_whole or "language_model" in key:  # others are of vision or audio
            faults.append(f"has {key}, for which the model has no place")
    if faults:
        more = f" ({len(faults)} such weights)" if len(faults) > 1 else ""
        raise UserError(f"{folder}: {faults[0]}{more}; its weights are of another model")
    if not is_whole:
        # Saving would undo the renamings of TEXT_KEYS. The result shall have a text model's names.
        conversions = model._weight_conversions
        kept = [one for one in conversions if not isinstance(one, WeightRenaming)]
        model._weight_conversions = kept
    return model
