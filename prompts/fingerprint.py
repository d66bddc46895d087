"""The fingerprint of a model: hashes of the files that are read, without other files of its folder.

Copies of the same base may have notes, `configuration.json` from ModelScope, or CRLF line ends.
"""

import hashlib
from collections.abc import Iterator, Mapping
from io import BytesIO
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any, BinaryIO

from panjue.prompts.model import CLASSIFIER, MIB, model_files
from panjue.prompts.plumbing.files import dump, read_json, read_record
from panjue.prompts.plumbing.ours import record_bytes
from panjue.prompts.plumbing.records import MANIFEST, RunRecord

CONFIGS = ("config.json", "generation_config.json")
"""Files that are compared by their values, without `NOT_READ_KEYS`."""

NOT_READ_KEYS = ("transformers_version", "_name_or_path")
"""Keys of configs, at any depth, that only say who saved the model."""

BASE_FILES = (
    *("*.safetensors", "*.safetensors.index.json", *CONFIGS),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tekken.json", "*.model"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files of a base that transformers and vLLM read: weights, configs, tokenizer, template."""

NOT_READ_WEIGHTS = "consolidated"
"""Prefixes of files with the same weights in Mistral's format."""

TRAINED_FILES = (*BASE_FILES, "adapter_config.json", "labels.json", CLASSIFIER, MANIFEST)
"""Files that are read of the result of a training."""

TEXTS = (".json", ".jinja", ".txt")
"""Suffixes of text files, for which LF and CRLF count as the same."""

MAX_SELECTIONS = 4096
"""Most selections of files that are tried to find out which files an old hash covers."""


def base_files(folder: Path) -> dict[str, str]:
    """Return file -> hash for the files of a base that are read."""
    return {path.name: file_sha256(path) for path in _found(folder, BASE_FILES)}


def base_sha256(files: Mapping[str, str]) -> str:
    """Return one hash over the names and hashes of a base's files."""
    return _hash_of_lines(f"{name} {digest}" for name, digest in files.items())


def base_change(record: RunRecord, folder: Path) -> str:
    """Return which files of a base differ from those of a training; empty if none does."""
    if record.is_before_0_5:
        if record.base_sha256 in _hashes_before_0_5(folder):
            return ""
        return "which file differs is not known: a version before 0.5 recorded one hash of them all"
    then = record.base_files
    now = base_files(folder)
    changes = []
    for name in sorted({*then, *now}):
        if name not in now:
            changes.append(f"{name} is missing")
        elif name not in then:
            changes.append(f"{name} is new")
        elif then[name] != now[name]:
            changes.append(f"{name} differs")
    return ", ".join(changes)


def model_sha256(folder: Path) -> str:
    """Return the fingerprint of a trained model or adapter: one hash over the files that are read.

    Versions before 0.5 hashed all files of the folder, and recorded this hash with the answers. So
    a training of such a version, whose record has no `base_files`, is still hashed like that.
    """
    if (folder / MANIFEST).exists() and "base_files" not in read_record(folder / MANIFEST):
        return _hash_of_lines(map(_line_before_0_5, model_files(folder)))
    return base_sha256(trained_files(folder))


def trained_files(folder: Path) -> dict[str, str]:
    """Return file -> hash for the files of a model or adapter that are read."""
    return {path.name: file_sha256(path) for path in _found(folder, TRAINED_FILES)}


def weight_files(folder: Path) -> dict[str, str]:
    """Return file -> hash for the weights of a model."""
    return {path.name: file_sha256(path) for path in _found(folder, ("*.safetensors",))}


def _found(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of a folder with these names, sorted by name."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if not path.name.startswith(NOT_READ_WEIGHTS))


def file_sha256(path: Path) -> str:
    """Return the hash of a config's values, of a text apart from its line ends, or of weights.

    Of weights above 2 MiB, only the size and samples are hashed, since to read all takes long.
    """
    if path.name in CONFIGS:
        content = dump(_sorted_values(read_json(path))).encode()
        return hashlib.sha256(content).hexdigest()
    if path.suffix in TEXTS:
        return hashlib.sha256(_with_lf(path)).hexdigest()
    size = path.stat().st_size
    with path.open("rb") as data:
        return hashlib.sha256(f"{size} {_sampled_sha256(data, size)}".encode()).hexdigest()


def _sorted_values(value: Any) -> Any:
    """Return a value of a config with sorted keys, without `NOT_READ_KEYS`."""
    if isinstance(value, list):
        return [_sorted_values(one) for one in value]
    if isinstance(value, dict):
        names = sorted(value.keys() - set(NOT_READ_KEYS))
        return {name: _sorted_values(value[name]) for name in names}
    return value


def _with_lf(path: Path) -> bytes:
    """Return the content of a text file with LF in place of CRLF."""
    # A command reads a manifest several times, and `record_bytes` keeps it.
    content = record_bytes(path) if path.name == MANIFEST else path.read_bytes()
    return content.replace(b"\r\n", b"\n")


def _hash_of_lines(lines: Iterator[str]) -> str:
    """Return the SHA-256 of lines that LF separates."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sampled_sha256(data: BinaryIO, size: int) -> str:
    """Return the hash of a file; above 2 MiB, of its first and last MiB and of samples.

    A sample is 64 KiB, one every 16 MiB. They suffice, because a training changes whole matrices.
    To read 16 GB takes 19 s, these parts take 1 s.
    """
    digest = hashlib.sha256(data.read(MIB))
    for place in range(16 * MIB, size - MIB, 16 * MIB):
        data.seek(place)
        digest.update(data.read(MIB // 16))
    data.seek(max(MIB, size - MIB))
    digest.update(data.read(MIB))
    return digest.hexdigest()


def _line_before_0_5(path: Path) -> str:
    """Return the entry for a file in the fingerprints that panjue recorded before 0.5."""
    size = path.stat().st_size
    with path.open("rb") as data:
        return f"{path.name} {size} {_sampled_sha256(data, size)}"


def _hashes_before_0_5(folder: Path) -> Iterator[str]:
    """Yield the hashes that a version before 0.5 may have recorded for the base in a folder.

    Those versions hashed all files, also those that are not read (`unread`). Any of these may have
    been added later, so every subset of them is left out in turn. Then all is tried again with LF
    in text files, which may have got CRLF later.
    """
    files = model_files(folder)
    lines = {path: _line_before_0_5(path) for path in files}
    unread = sorted(set(files) - set(_found(folder, BASE_FILES)))
    added_since = chain.from_iterable(combinations(unread, n) for n in range(len(unread) + 1))
    selections = []
    for added in islice(added_since, MAX_SELECTIONS):
        selections.append([path for path in files if path not in added])
    for paths in selections:
        yield _hash_of_lines(lines[path] for path in paths)
    for path in files:
        if path.suffix in TEXTS:
            content = _with_lf(path)
            digest = _sampled_sha256(BytesIO(content), len(content))
            lines[path] = f"{path.name} {len(content)} {digest}"
    for paths in selections:
        yield _hash_of_lines(lines[path] for path in paths)
