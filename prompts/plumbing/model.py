"""The base model's folder and its tokenizer, as training and serving both need them."""

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256, write_json
from panjue.prompts.render import control_ids, neutralize, prompt_files, shield

PARTS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model")
"""What is fetched, hashed and read of a model: never pickles, never code."""


LARGE = 2**26
"""Bytes from which on a file's hash is remembered: a 16 GB base takes 19 s to read."""

SETTLED_NS = 2 * 10**9
"""How long a file must have been left alone before its hash is remembered."""

DECISION = "decision.json"
"""Beside an adapter's labels.json: how `panjue tune` fitted the deciding of its replies."""


def model_folder(name: str) -> Path:
    """Return the folder of a base model: a folder here, else a model of the hub.

    Raises:
        UserError: It is neither, has no safetensors weights, or wants code of its own to run.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = _from_hub(name)
    tokenizer = folder / "tokenizer_config.json"
    configs = [
        read_json(folder / "config.json"),
        read_json(tokenizer) if tokenizer.exists() else {},
    ]
    if any("auto_map" in config for config in configs):
        raise UserError(
            f"{folder}: wants its own code to run (auto_map); panjue never runs a model's code"
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: has no .safetensors weights; convert the model first")
    return folder


def is_hub_name(name: str) -> bool:
    """Say whether a base model that is no folder here can be one of the hub's."""
    in_hub_form = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return in_hub_form and not Path(name).is_dir()


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    place = f"base model {name!r}"
    if not is_hub_name(name):
        raise UserError(
            f"{place}: there is no such folder; give one, or a hub name like Qwen/Qwen3-8B"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(PARTS)))
    except (OSError, HFValidationError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{place}: no such folder, and the hub does not give it ({reason})"
        ) from None


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model and see to it that no case can forge its markers.

    Raises:
        UserError: It has no chat template or no end token, or a special token that a text
            of a case could forge in spite of `shield`.
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
            continue  # any character that the tokenizer lacks is that
        text = shield(tokenizer, neutralize(f"甲{token}乙"))
        if number in tokenizer(text, add_special_tokens=False).input_ids:
            raise UserError(
                f"{folder}: the special token {token!r} could be forged by a case's text"
            )
    return tokenizer


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model by name: all that is ever read of it."""
    return sorted({path for part in PARTS for path in folder.glob(part)})


def model_sha256(folder: Path) -> str:
    """Return one hash over the names and contents of a model's files.

    What was fitted to its replies afterwards (`DECISION`) is no part of it.
    """
    files = (path for path in model_files(folder) if path.name != DECISION)
    parts = (f"{_file_sha256(path)} {path.name}" for path in files)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    """Return the hash of a file; a large one is read once, and again where it may have changed."""
    now, state = time.time_ns(), path.stat()
    if state.st_size < LARGE:
        return sha256(path)
    place = str(path.resolve())
    changed = max(state.st_mtime_ns, state.st_ctime_ns)  # the latter cannot be set back by hand
    seen = {"file": place, "size": state.st_size, "changed": changed, "inode": state.st_ino}
    note = _cache() / f"{hashlib.sha256(place.encode()).hexdigest()}.json"
    with suppress(UserError):
        known = read_json(note)
        if isinstance(known, dict) and seen.items() <= known.items():
            return str(known["sha256"])
    digest = sha256(path)
    # File systems round times to milliseconds or seconds: a file that was just written could be
    # written again and keep its time.
    if now - changed > SETTLED_NS:
        with suppress(OSError, UserError):  # no place to write: it is read again next time
            write_json(note, {**seen, "sha256": digest})
    return digest


def _cache() -> Path:
    """Return the folder of hashes that are known."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "panjue/sha256"


def prompt_sha256(task: str) -> str:
    """Return the hash of a task's template; of all, where its several calls have one each."""
    own, *steps = prompt_files(task)
    parts = [sha256(own), *(f"{sha256(path)} {path.name}" for path in steps)]
    return parts[0] if not steps else hashlib.sha256("\n".join(parts).encode()).hexdigest()
