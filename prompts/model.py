"""The folder and the tokenizer of a base model, for training and serving."""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256, write_json
from panjue.prompts.render import control_ids, neutralize, neutralize_tokens, prompt_files

CLASSIFIER = "classifier.npz"
"""The text classifier in the folder of an adapter; its hash is in the adapter's manifest."""

MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    CLASSIFIER,
)
"""Files of a model that are downloaded, hashed and read: no pickles, no code."""

MODELSCOPE = "modelscope:"
"""Prefix of the names of models that come from ModelScope instead of the Hugging Face hub."""

MIN_CACHED_SIZE = 2**26
"""Bytes. The hashes of larger files are cached: a 16 GB base model takes 19 s to read."""

SETTLED_NS = 2 * 10**9
"""Time since its last change after which the hash of a file may be cached."""

PATHS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
"""Keys of a model's JSON files that name the folder of a base model."""

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters that vLLM loads unmerged."""

DECISION = "decision.json"
"""The decision rule that `panjue tune` fitted; in the folder of an adapter's labels.json."""


def model_folder(name: str) -> Path:
    """Return the folder of a base model: a local folder, or a model of a hub, downloaded once.

    `modelscope:Qwen/Qwen3-8B` comes from ModelScope, `Qwen/Qwen3-8B` from the Hugging Face hub or
    the mirror in `HF_ENDPOINT`.

    Raises:
        UserError: It is neither, has no safetensors weights, or needs its own code.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = _from_hub(name)
    if (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise UserError(
            f"{folder}: is an adapter; give the base model that is to be trained ({base})"
        )
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: has no config.json; give the folder of the base model")
    tokenizer = folder / "tokenizer_config.json"
    configs = [
        read_json(folder / "config.json"),
        read_json(tokenizer) if tokenizer.exists() else {},
    ]
    if any("auto_map" in config for config in configs):
        raise UserError(
            f"{folder}: needs its own code (auto_map); panjue never runs a model's code"
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: has no .safetensors weights; convert the model first")
    return folder


def is_demo(folder: Path) -> bool:
    """Say whether a model or adapter descends from a base that `panjue base` made.

    A training names its base in its manifest; `start.json` is only in the untrained model of
    `panjue base`.
    """
    manifest = folder / "manifest.json"
    while manifest.exists() and (base := read_json(manifest).get("base")):
        folder = Path(base)
        manifest = folder / "manifest.json"
    return (folder / "start.json").exists()


def is_hub_name(name: str) -> bool:
    """Say whether a base model that is no local folder can be a model of the hub."""
    in_hub_form = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return in_hub_form and not Path(name).is_dir()


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError

    place = f"base model {name!r}"
    if not is_hub_name(name):
        raise UserError(
            f"{place}: there is no such folder; give one, or a hub name like Qwen/Qwen3-8B "
            "(`make base` makes that of the demo)"
        )
    if name.startswith(MODELSCOPE):
        return _from_modelscope(name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except (OSError, HFValidationError, RuntimeError) as error:
        reason = f"{constants.ENDPOINT}: {str(error).strip().splitlines()[0]}"
        raise UserError(
            f"{place}: no such folder, and the hub cannot provide it ({reason}); set HF_ENDPOINT "
            f"to a mirror, or give {MODELSCOPE}{name} or a folder"
        ) from None


def _from_modelscope(name: str) -> Path:
    place = f"base model {name!r}"
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise UserError(
            f"{place}: {error}; run .venv/bin/pip install modelscope, or give a folder"
        ) from None
    repository, files = name.removeprefix(MODELSCOPE), list(MODEL_FILES)
    try:
        return Path(snapshot_download(repository, allow_patterns=files))
    except Exception as error:  # its errors have no common class
        with suppress(Exception):  # without a network, what was downloaded before
            return Path(snapshot_download(repository, allow_patterns=files, local_files_only=True))
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{place}: ModelScope cannot provide it ({reason}); give a folder"
        ) from None


def lora_rank(adapter: Path) -> int | None:
    """Return an adapter's rank, rounded up to one that vLLM has; None if it has none as large."""
    config = read_json(adapter / "adapter_config.json")
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    return next((size for size in VLLM_RANKS if size >= rank), None)


def has_classifier(trained: Path) -> bool:
    """Say whether the training of an adapter or model fitted a classifier."""
    path = trained / "manifest.json"
    return path.exists() and "classifier_sha256" in read_json(path)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model; check that no text can forge its control tokens.

    Raises:
        UserError: It has no chat template or no end token, or a control token that the text of a
            case could forge despite `neutralize_tokens`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise UserError(
            f"{folder}: its tokenizer has no chat template; take an instruction-tuned model"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: its tokenizer has no end token")
    for token, number in control_ids(tokenizer).items():
        if number == tokenizer.unk_token_id:
            continue  # any unknown character gives this token
        text = neutralize_tokens(tokenizer, neutralize(f"甲{token}乙"))
        if number in tokenizer(text, add_special_tokens=False).input_ids:
            raise UserError(
                f"{folder}: the special token {token!r} could be forged by a case's text"
            )
    return tokenizer


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model that panjue reads, sorted by name."""
    return sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})


def model_sha256(folder: Path, recorded: str | None = None) -> str:
    """Return one hash over the names and contents of a model's files.

    The decision rule (`DECISION`) is left out: it is fitted after training. In the JSON files of an
    adapter, the order of keys, white space and paths (`PATHS`) do not count: an adapter that is
    restored from elsewhere may differ in them.

    Args:
        folder: The model or adapter.
        recorded: An earlier hash; it is returned if it fits by the earlier rule, for which the
            bytes of the JSON files counted.
    """
    files = [path for path in model_files(folder) if path.name != DECISION]
    hashes = {path.name: _file_sha256(path) for path in files}
    by_bytes = _joined(hashes)
    if recorded == by_bytes or "adapter_config.json" not in hashes:
        return by_bytes
    return _joined({**hashes, **{p.name: _json_sha256(p) for p in files if p.suffix == ".json"}})


def _joined(hashes: Mapping[str, str]) -> str:
    parts = (f"{digest} {name}" for name, digest in hashes.items())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _json_sha256(path: Path) -> str:
    """Return the hash of a JSON file's content without paths; of a broken file, that of its bytes.

    In `labels.json` the order counts: it is that of the most frequent labels.
    """
    with suppress(ValueError):
        value = json.loads(path.read_bytes(), object_hook=_without_paths)
        text = json.dumps(value, sort_keys=path.name != "labels.json")
        return hashlib.sha256(text.encode()).hexdigest()
    return sha256(path)


def _without_paths(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out the paths of an object, and what has its hash in a further entry."""
    return {k: v for k, v in value.items() if k not in PATHS and f"{k}_sha256" not in value}


def _file_sha256(path: Path) -> str:
    """Return the hash of a file; the hash of a large, unchanged file comes from the cache."""
    now, stat = time.time_ns(), path.stat()
    if stat.st_size < MIN_CACHED_SIZE:
        return sha256(path)
    name = str(path.resolve())
    changed = max(stat.st_mtime_ns, stat.st_ctime_ns)  # users can set mtime back, but not ctime
    state = {"file": name, "size": stat.st_size, "changed": changed, "inode": stat.st_ino}
    entry = _cache() / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
    with suppress(UserError):
        cached = read_json(entry)
        if isinstance(cached, dict) and state.items() <= cached.items():
            return str(cached["sha256"])
    digest = sha256(path)
    # File systems round times to milliseconds or seconds: a file that was just written could be
    # written again and keep its time.
    if now - changed > SETTLED_NS:
        with suppress(OSError, UserError):  # no place to write: the file is read again next time
            write_json(entry, {**state, "sha256": digest})
    return digest


def _cache() -> Path:
    """Return the folder of cached hashes."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "panjue/sha256"


def prompt_sha256(task: str) -> str:
    """Return the hash of a task's template, or of all templates if it has several."""
    first, *others = prompt_files(task)
    parts = [sha256(first), *(f"{sha256(path)} {path.name}" for path in others)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if others else parts[0]
