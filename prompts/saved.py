"""Give a saved model files of its base, so that every program reads it correctly.

transformers 5 writes a tokenizer and the settings of rotary positions in its own form.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.files import read_object, write_json

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "tekken.json"),
    *("*.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)

ROPE_NAMES = (
    *("rope_theta", "rope_scaling", "partial_rotary_factor"),
    *("rope_local_base_freq", "global_rope_theta", "local_rope_theta"),
    *("rotary_emb_base", "rotary_pct"),
)
"""Settings of rotary positions that transformers 4 reads at the top level of a config."""

THETA_OF_SLIDING = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "olmo3": "rope_theta",  # for all layers
}
"""`model_type` of a model whose layers differ in rotary positions -> key at which transformers 4
reads the `rope_theta` of layers with sliding attention, which have no scaling."""


def keep_readable(base: Path, folder: Path) -> None:
    """Give a model in `folder` its base's tokenizer, and a config that transformers 4 can read."""
    _take_tokenizer(base, folder)
    config = read_object(folder / "config.json")
    of_base = read_object(base / "config.json")
    write_json(folder / "config.json", with_rope_names(config, of_base))


def _take_tokenizer(base: Path, folder: Path) -> None:
    """Copy the base's tokenizer files. If the copy is read as another tokenizer, save it anew.

    transformers also looks into config.json when it loads a tokenizer, and the config in `folder`
    differs from the base's. Its `model_type` chooses the tokenizer's class, which is another one
    for Qwen3.5's language model. Its version decides whether a tokenizer of Mistral is corrected.
    """
    _delete_tokenizer(folder)
    for pattern in TOKENIZER_FILES:
        for file in base.glob(pattern):
            place = folder / file.relative_to(base)
            place.parent.mkdir(exist_ok=True)
            shutil.copy(file, place)
    tokenizer = load_tokenizer(base)
    if _content(load_tokenizer(folder)) != _content(tokenizer):
        _delete_tokenizer(folder)
        tokenizer.save_pretrained(folder)


def _delete_tokenizer(folder: Path) -> None:
    """Delete the tokenizer that a trainer has saved, so that no old form stays beside a new one."""
    for pattern in TOKENIZER_FILES:
        for file in folder.glob(pattern):
            file.unlink()


def _content(tokenizer: Any) -> Any:
    """Return the content of a tokenizer, to compare two tokenizers."""
    return tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()


def with_rope_names(config: Mapping[str, Any], of_base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that also has the settings of rotary positions under transformers 4's names.

    If `rope_theta` is only in `rope_parameters`, transformers 4 takes its default of 10,000. With
    both names, both versions and vLLM read it correctly. Values of the base under these names count
    first. Settings that the old names cannot express are left out. transformers 5 has written
    `config`; any version may have written `of_base`.
    """
    of_base = of_base.get("text_config") or of_base
    same = {name: of_base[name] for name in ROPE_NAMES if name in of_base}
    return {**config, **_rope_of(config), **same}


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `rope_parameters` under transformers 4's names, if there are any.

    `{"rope_theta": 1e6, "rope_type": "default"}` -> `{"rope_theta": 1e6, "rope_scaling": None}`.
    """
    rope = dict(config.get("rope_parameters") or {})
    found = {}
    if any(isinstance(value, Mapping) for value in rope.values()):  # one for each kind of layer
        kind = config["model_type"]
        if kind not in THETA_OF_SLIDING:  # transformers 4 has no names for them
            return {}
        found[THETA_OF_SLIDING[kind]] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            found[name] = rope.pop(name)
    if found:  # what is left is the scaling
        found["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return found
