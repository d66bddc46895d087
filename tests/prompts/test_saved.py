"""A saved model is read right by transformers 4, whose names for rotary positions are others."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.files import read_json, read_object, write_json
from panjue.prompts.saved import keep_readable, with_rope_names

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
FULL = {"rope_type": "linear", "factor": 8.0}
SIZE = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 320}


def by_layer(theta: float, theta_of_sliding: float, **of_full: Any) -> dict[str, Any]:
    """Return `rope_parameters` of a model whose layers differ."""
    sliding = {"rope_type": "default", "rope_theta": theta_of_sliding}
    full = {"rope_type": "default", "rope_theta": theta, **of_full}
    return {"sliding_attention": sliding, "full_attention": full}


def flat(theta: float, **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **others}


PLAIN = {"rope_theta": 1e6, "rope_scaling": None}
LOCAL = {"rope_local_base_freq": 1e4}

BASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "of transformers 4": ("qwen3", PLAIN, PLAIN),
    "of transformers 5": ("qwen3", {"rope_parameters": flat(1e6)}, PLAIN),
    "merged by us": ("qwen3", {"rope_parameters": flat(1e6), **PLAIN}, PLAIN),
    "of a default": ("llama", {}, {"rope_theta": 10_000.0, "rope_scaling": None}),
    "stretched, of 4": (
        "qwen2",
        {"rope_theta": 1e6, "rope_scaling": YARN},
        {"rope_theta": 1e6, "rope_scaling": YARN},
    ),
    "stretched, of 5": (
        "llama",
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA},
    ),
    "in part, of 4": (
        "qwen3_next",
        {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": None},
    ),
    "in part, of 5": (
        "glm4",
        {"rope_parameters": flat(1e7, partial_rotary_factor=0.5)},
        {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    "long": ("phi3", {"rope_scaling": LONG}, {"rope_theta": 10_000.0, "rope_scaling": LONG}),
    "by layer, of 4": (
        "gemma3_text",
        {"rope_theta": 1e6, "rope_scaling": FULL, **LOCAL},
        {"rope_theta": 1e6, "rope_scaling": FULL, **LOCAL},
    ),
    "by layer, of 5": (
        "gemma3_text",
        {"rope_parameters": by_layer(1e6, 1e4, **FULL)},
        {"rope_theta": 1e6, "rope_scaling": FULL, **LOCAL},
    ),
    "by layer, one theta": (
        "olmo3",
        {"rope_parameters": by_layer(5e5, 5e5, **YARN)},
        {"rope_theta": 5e5, "rope_scaling": YARN},
    ),
    "other names, of 4": (
        "modernbert-decoder",
        {"global_rope_theta": 2e5, "local_rope_theta": 3e4},
        {"global_rope_theta": 2e5, "local_rope_theta": 3e4},
    ),
    "of no model of 4": ("gemma4_text", {"rope_parameters": by_layer(1e6, 1e4)}, {}),
}
"""Name -> model type, what the base's config says of rotary positions, and what is found at the top
of the written one."""


def read_by_vllm(folder: str, **settings: Any) -> Any:
    from vllm.transformers_utils.config import get_config

    return get_config(folder, **settings)


@pytest.mark.parametrize("reader", [AutoConfig.from_pretrained, read_by_vllm], ids=["5", "vllm"])
@pytest.mark.parametrize("name", BASES)
def test_transformers_4_finds_its_names_and_5_and_vllm_read_what_they_read_before(
    name: str, reader: Callable[..., Any], tmp_path: Path
) -> None:
    kind, rope, wanted = BASES[name]
    base = {"model_type": kind, **SIZE, **rope}
    write_json(tmp_path / "base/config.json", base)
    read = AutoConfig.from_pretrained(tmp_path / "base")
    read.save_pretrained(tmp_path / "before")
    saved = read_object(tmp_path / "before/config.json")
    made = with_rope_names(saved, base)
    assert made.items() >= saved.items(), "as saved, and more"
    assert made.items() >= wanted.items()
    if not wanted:
        assert made == saved
    write_json(tmp_path / "after/config.json", made)
    before, after = (
        reader(str(tmp_path / place), trust_remote_code=False) for place in ("before", "after")
    )
    assert after.rope_parameters == before.rope_parameters == read.rope_parameters


def test_a_part_of_a_model_has_the_settings_of_that_part() -> None:
    saved = {"model_type": "qwen3_5_text", "rope_parameters": flat(1e7, mrope_section=[1, 2])}
    base = {"rope_theta": 5.0, "text_config": {"rope_theta": 10_000_000}}
    assert with_rope_names(saved, base) == {
        **saved,
        "rope_theta": 10_000_000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]},
    }


@pytest.fixture
def base(workshop: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny base in the form of transformers 4: the template is in JSON."""
    write_json(tmp_path / "manifest.json", {"task": "", "prompt_sha256": "", "seed": 0})  # ours
    folder = shutil.copytree(workshop / "base/model", tmp_path / "base")
    template = folder / "chat_template.jinja"
    config = folder / "tokenizer_config.json"
    write_json(config, {**read_json(config), "chat_template": template.read_text("utf-8")})
    template.unlink()
    write_json(folder / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    return folder


def saved_by_5(base: Path, folder: Path) -> Path:
    """Return a folder with the config and the tokenizer of a base, as a trainer writes them."""
    AutoConfig.from_pretrained(base).save_pretrained(folder)
    load_tokenizer(base).save_pretrained(folder)
    return folder


def test_a_training_of_all_weights_takes_both_over(workshop: Path) -> None:
    untrained, trained = workshop / "base/untrained", workshop / "base/model"
    for path in (*untrained.glob("tokenizer*"), *untrained.glob("*.jinja")):
        assert (trained / path.name).read_bytes() == path.read_bytes()
    config = read_json(trained / "config.json")
    assert (config["rope_theta"], config["rope_scaling"]) == (10_000, None)


def test_the_tokenizer_is_the_base_s_byte_for_byte(base: Path, tmp_path: Path) -> None:
    made = saved_by_5(base, tmp_path / "made")
    assert (made / "chat_template.jinja").exists()
    keep_readable(base, made)
    assert not (made / "chat_template.jinja").exists()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (made / name).read_bytes() == (base / name).read_bytes()


def test_a_tokenizer_that_would_be_read_otherwise_is_saved_as_it_was_read(
    base: Path, tmp_path: Path
) -> None:
    """By the type of the whole model transformers takes another class than by that of its part."""
    config = read_json(base / "config.json")
    config.pop("rope_scaling")  # a whole model has none
    made = saved_by_5(base, tmp_path / "made")
    write_json(base / "config.json", {**config, "model_type": "qwen3_5"})
    of_base = read_json(base / "tokenizer_config.json")
    write_json(base / "tokenizer_config.json", {**of_base, "tokenizer_class": "Qwen2Tokenizer"})
    write_json(made / "config.json", {**config, "model_type": "qwen3_5_text"})
    wanted = load_tokenizer(base).backend_tokenizer.to_str()
    keep_readable(base, made)
    assert load_tokenizer(made).backend_tokenizer.to_str() == wanted
    assert (made / "chat_template.jinja").exists()
