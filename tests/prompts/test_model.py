"""The hash of a model: that of what its files hold now, though large ones are read once."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts import model
from panjue.prompts.model import PATHS, is_demo, model_folder, model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256, write_json


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are read, where all count as large and as settled."""
    names: list[str] = []

    def counted(path: Path) -> str:
        names.append(path.name)
        return sha256(path)

    monkeypatch.setattr("panjue.prompts.model.sha256", counted)
    monkeypatch.setattr(model, "MIN_CACHED_SIZE", 0)
    monkeypatch.setattr(model, "SETTLED_NS", -1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "base"
    place.mkdir()
    for name in ("model.safetensors", "config.json"):
        (place / name).write_text(name, "utf-8")
    return place


def test_what_descends_from_the_tiny_base_is_of_the_demo(tmp_path: Path) -> None:
    untrained, base, adapter = (tmp_path / name for name in ("untrained", "base", "adapter"))
    write_json(base / "manifest.json", {"base": str(untrained)})
    write_json(adapter / "manifest.json", {"base": str(base)})
    assert not is_demo(adapter)
    write_json(untrained / "start.json", {})
    assert is_demo(adapter)
    assert is_demo(base)
    write_json(adapter / "manifest.json", {"base": "Qwen/Qwen3-8B"})
    assert not is_demo(adapter)
    write_json(adapter / "manifest.json", {})
    assert not is_demo(adapter)


def test_a_large_file_is_read_once(folder: Path, read: list[str]) -> None:
    first = model_sha256(folder)
    assert read == ["config.json", "model.safetensors"]
    assert model_sha256(folder) == first
    assert len(read) == 2


def test_a_file_that_changed_is_read_again(folder: Path, read: list[str]) -> None:
    weights = folder / "model.safetensors"
    first, state = model_sha256(folder), weights.stat()
    weights.write_bytes(weights.read_bytes()[::-1])  # as long as before
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))  # and as old, says who copied it
    assert model_sha256(folder) != first
    assert read[2:] == ["model.safetensors"]


def test_what_is_remembered_is_what_would_be_read(
    folder: Path, read: list[str], tmp_path: Path
) -> None:
    first = model_sha256(folder)
    for note in (tmp_path / "cache").rglob("*.json"):
        note.write_text("torn", "utf-8")
    assert model_sha256(folder) == first
    assert len(read) == 4


def test_what_was_written_just_now_is_not_remembered(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "SETTLED_NS", 10**12)
    assert model_sha256(folder) == model_sha256(folder)
    assert len(read) == 4


def test_without_a_place_to_write_it_is_read_again(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert model_sha256(folder) == model_sha256(folder)
    assert len(read) == 4


ADAPTER: dict[str, dict[str, Any]] = {
    "adapter_config.json": {"r": 8, "base_model_name_or_path": "/a", "bias": "none"},
    "tokenizer_config.json": {"eos_token": "x", "_name_or_path": "/a"},
    "manifest.json": {"base": "/a", "base_sha256": "1", "train": "/a", "train_sha256": "2"},
    "labels.json": {"counts": {"charges": {"盗窃罪": 1, "诈骗罪": 1}}},
}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    for name, content in ADAPTER.items():
        write_json(folder / name, content)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", dict(reversed(ADAPTER["adapter_config.json"].items()))),
        ("adapter_config.json", {**ADAPTER["adapter_config.json"], PATHS[0]: "/b/c"}),
        ("adapter_config.json", {"r": 8, "bias": "none"}),
        ("tokenizer_config.json", {"_name_or_path": "/b", "eos_token": "x"}),
        ("manifest.json", {**ADAPTER["manifest.json"], "base": "/b", "train": "/b"}),
    ],
)
def test_an_adapter_with_other_paths_or_order_of_keys_is_the_same(
    name: str, content: dict[str, Any], adapter: Path
) -> None:
    first = model_sha256(adapter)
    (adapter / name).write_text(json.dumps(content, indent=7), "utf-8")
    assert model_sha256(adapter) == first


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", {**ADAPTER["adapter_config.json"], "r": 9}),
        ("tokenizer_config.json", {"eos_token": "y", "_name_or_path": "/a"}),
        ("manifest.json", {**ADAPTER["manifest.json"], "base_sha256": "3"}),
        ("labels.json", {"counts": {"charges": {"诈骗罪": 1, "盗窃罪": 1}}}),  # the first counts
        ("labels.json", "{"),
    ],
)
def test_an_adapter_with_other_settings_is_another(
    name: str, content: object, adapter: Path
) -> None:
    first = model_sha256(adapter)
    write_json(adapter / name, content)
    assert model_sha256(adapter) != first
    (adapter / name).write_text("{", "utf-8")
    assert model_sha256(adapter) != first


def test_the_files_of_a_base_count_by_their_bytes(folder: Path) -> None:
    write_json(folder / "config.json", {"a": 1, "b": 2})
    first = model_sha256(folder)
    write_json(folder / "config.json", {"b": 2, "a": 1})
    assert model_sha256(folder) != first


def test_the_hash_in_an_older_record_is_accepted(adapter: Path) -> None:
    names = sorted(path.name for path in adapter.iterdir())
    parts = "\n".join(f"{sha256(adapter / name)} {name}" for name in names)
    recorded = hashlib.sha256(parts.encode()).hexdigest()
    assert model_sha256(adapter) != recorded
    assert model_sha256(adapter, recorded) == recorded
    assert model_sha256(adapter, "another") == model_sha256(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"changed")
    assert model_sha256(adapter, recorded) != recorded


def test_an_adapter_is_no_base_model(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen3-8B"})
    with pytest.raises(UserError, match=r"is an adapter; give the base .* \(Qwen/Qwen3-8B\)"):
        model_folder(str(tmp_path))


def test_a_missing_base_of_the_demo_is_told_how_it_is_made() -> None:
    with pytest.raises(UserError, match="`make base` makes that of the demo"):
        model_folder("runs/base/model")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        model_folder(str(tmp_path))
    told = f"{tmp_path}: has no config.json; give the folder of the base model"
    assert str(error.value) == told
