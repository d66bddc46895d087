"""The fingerprint of a model: what is read counts, and nothing else in its folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.fingerprint import base_change, base_files, base_sha256, model_sha256
from panjue.prompts.model import MIB
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.prompts.plumbing.records import RunRecord
from tests.records import TRAINED

Change = Callable[[Path], object]
OLD = Path(__file__).parents[1] / "version_0_4"
TOKENIZER = {"model": {"type": "BPE"}, "added_tokens": []}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "base"
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"weights")
    (place / "chat_template.jinja").write_text("{{ messages }}\n{{ end }}\n", "utf-8")
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "rope_theta": 1000000,
        "transformers_version": "5",
    }
    write_json(place / "config.json", {**config, "text_config": {"_name_or_path": "a", "size": 1}})
    write_json(place / "generation_config.json", {"top_p": 0.9})
    write_json(place / "tokenizer.json", TOKENIZER)
    return place


def fingerprint(folder: Path) -> str:
    return base_sha256(base_files(folder))


def record_of(folder: Path) -> RunRecord:
    """Return the record of a training on the base in a folder."""
    files = base_files(folder)
    known = {"base_files": files, "base_sha256": base_sha256(files)}
    return RunRecord.model_validate({**TRAINED, **known})


def with_crlf(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def saved_by_another_version(folder: Path) -> None:
    path = folder / "config.json"
    config = read_json(path)
    values = {**config, "transformers_version": "4.57", "_name_or_path": "/home/x/base"}
    values["text_config"] = {"size": 1, "_name_or_path": "b"}
    path.write_text(json.dumps(dict(reversed(values.items()))), "utf-8")


def note(name: str) -> Change:
    return lambda folder: (folder / name).write_text("{}", "utf-8")


NOT_READ: dict[str, Change] = {
    "README": note("README.md"),
    "what ModelScope has": note("configuration.json"),
    "a note": note("说明.txt"),
    "git": note(".gitattributes"),
    "code": note("model.py"),
    "how it was made": note("start.json"),
    "whose labels a base of ours has": note("labels.json"),
    "a record": note("manifest.json"),
    "weights in Mistral's format": note("consolidated.safetensors"),
    "line ends": with_crlf,
    "config": saved_by_another_version,
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_makes_no_other_base(folder: Path, name: str) -> None:
    record = record_of(folder)
    NOT_READ[name](folder)
    assert fingerprint(folder) == record.base_sha256
    assert base_change(record, folder) == ""


def changed(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content, "utf-8")


READ: dict[str, Change] = {
    "model.safetensors differs": changed("model.safetensors", "Weights"),
    "config.json differs": changed("config.json", '{"model_type": "qwen3", "rope_theta": 10000}'),
    "generation_config.json differs": changed("generation_config.json", '{"top_p": 0.8}'),
    "tokenizer.json differs": changed("tokenizer.json", '{"model": {"type": "BPE"}}'),
    "chat_template.jinja differs": changed("chat_template.jinja", "{{ messages }}"),
    "generation_config.json is missing": lambda folder: (
        folder / "generation_config.json"
    ).unlink(),
    "tokenizer_config.json is new": note("tokenizer_config.json"),
    "model.safetensors.index.json is new": note("model.safetensors.index.json"),
    "tokenizer.json is missing, tokenizer.model is new": lambda folder: (
        folder / "tokenizer.json"
    ).rename(folder / "tokenizer.model"),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_that_is_read_makes_another_base_and_is_named(folder: Path, name: str) -> None:
    record = record_of(folder)
    READ[name](folder)
    assert fingerprint(folder) != record.base_sha256
    assert base_change(record, folder) == name


@pytest.mark.parametrize("name", ["labels.json", "classifier.npz", "adapter_config.json"])
def test_of_a_training_more_counts_and_a_note_does_not(folder: Path, name: str) -> None:
    record_of(folder).write(folder)
    first = model_sha256(folder)
    for other in ("opinions.jsonl", "README.md", "说明.txt", "configuration.json"):
        note(other)(folder)
    assert model_sha256(folder) == first
    note(name)(folder)
    assert model_sha256(folder) != first


@pytest.mark.parametrize("size", [1, MIB, MIB + 1, 3 * MIB])
def test_the_first_and_last_mebibyte_and_the_size_of_a_file_count(folder: Path, size: int) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(size)
    weights.write_bytes(content)
    first = fingerprint(folder)
    for place in {0, min(size - 1, MIB - 1), max(0, size - MIB), size - 1}:
        content[place] = 1
        weights.write_bytes(content)
        assert fingerprint(folder) != first
        content[place] = 0
    weights.write_bytes(content + b"0")
    assert fingerprint(folder) != first
    weights.write_bytes(content)
    assert fingerprint(folder) == first


@pytest.mark.parametrize("place", [16 * MIB, 32 * MIB + 2**16 - 1])
def test_a_large_file_counts_between_its_ends_too(folder: Path, place: int) -> None:
    """A merged adapter of the MLPs alone leaves its first and last MiB as they are."""
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(48 * MIB)
        first = fingerprint(folder)
        weights.seek(place)
        weights.write(b"1")
    assert fingerprint(folder) != first


@pytest.fixture
def old(tmp_path: Path) -> tuple[RunRecord, Path]:
    """Return the record of a training by version 0.4, and its base."""
    base = shutil.copytree(OLD / "base/model", tmp_path / "old")
    return RunRecord.read(OLD / "run/adapter"), base


def notes_and_crlf(folder: Path) -> None:
    for name in ("configuration.json", "说明.txt", "LICENSE.txt"):
        note(name)(folder)
    with_crlf(folder)


@pytest.mark.parametrize(
    "change",
    [lambda _: None, note("configuration.json"), note("说明.txt"), with_crlf, notes_and_crlf],
)
def test_an_old_record_is_of_the_same_base_whatever_came_since(
    old: tuple[RunRecord, Path], change: Change
) -> None:
    record, base = old
    change(base)
    assert base_change(record, base) == ""


def test_an_old_record_is_not_of_other_weights(old: tuple[RunRecord, Path]) -> None:
    record, base = old
    with (base / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"x")
    assert "a version before 0.5 recorded one hash" in base_change(record, base)


def test_an_old_training_keeps_its_fingerprint(tmp_path: Path) -> None:
    """The records of its answers have it."""
    answers = read_json(OLD / "run/answers/test/manifest.json")
    assert model_sha256(OLD / "run/adapter") == answers["trained_sha256"]
