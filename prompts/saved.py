"""What a saved model takes over from its base, so that whatever reads it reads it right.

transformers 5 writes a tokenizer and the settings of rotary positions in a form of its own.
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
"""Settings of rotary positions that transformers 4 reads at the top of a config."""

THETA_OF_SLIDING = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "olmo3": "rope_theta",  # of all layers
}
"""`model_type` of a model whose layers differ in rotary positions -> where transformers 4 reads the
`rope_theta` of those with sliding attention, which have no scaling."""


def keep_readable(base: Path, folder: Path) -> None:
    """Give a model in `folder` its base's tokenizer, and a config that transformers 4 reads too."""
    _take_tokenizer(base, folder)
    config = read_object(folder / "config.json")
    of_base = read_object(base / "config.json")
    write_json(folder / "config.json", with_rope_names(config, of_base))


def _take_tokenizer(base: Path, folder: Path) -> None:
    """Copy the base's tokenizer files; where the copy is read as another tokenizer, save it anew.

    transformers reads config.json too: by `model_type` it chooses the class, and by its own version
    there it mends a tokenizer of Mistral. So that of Qwen3.5 cannot be copied (transformers 5.19).
    """
    _copy_tokenizer(base, folder)
    tokenizer = load_tokenizer(base)
    if _content(load_tokenizer(folder)) != _content(tokenizer):
        _delete_tokenizer(folder)
        tokenizer.save_pretrained(folder)


def _copy_tokenizer(base: Path, folder: Path) -> None:
    _delete_tokenizer(folder)
    for pattern in TOKENIZER_FILES:
        for file in base.glob(pattern):
            place = folder / file.relative_to(base)
            place.parent.mkdir(exist_ok=True)
            shutil.copy(file, place)


def _delete_tokenizer(folder: Path) -> None:
    """Delete the tokenizer that a trainer has saved: an old form must not stay beside a new one."""
    for pattern in TOKENIZER_FILES:
        for file in folder.glob(pattern):
            file.unlink()


def _content(tokenizer: Any) -> Any:
    """Return what a tokenizer does, to compare two."""
    return tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()


def with_rope_names(config: Mapping[str, Any], of_base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that has the settings of rotary positions under the names of transformers 4.

    It would take its default of 10,000 for a `rope_theta` that is in `rope_parameters` alone. Both
    side by side are read right by both, and by vLLM. What the base has under these names counts;
    what they cannot express is left out.

    Args:
        config: As transformers 5 has written it.
        of_base: The config of the base, of any version of transformers.
    """
    of_base = of_base.get("text_config") or of_base
    same = {name: of_base[name] for name in ROPE_NAMES if name in of_base}
    return {**config, **_rope_of(config), **same}


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `rope_parameters` by their names in transformers 4, if it has some."""
    rope = dict(config.get("rope_parameters") or {})
    found = {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        kind = config["model_type"]
        if kind not in THETA_OF_SLIDING:
            return {}
        found[THETA_OF_SLIDING[kind]] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            found[name] = rope.pop(name)
    if found:
        found["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return found
