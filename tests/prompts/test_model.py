"""Models: where a base comes from, and the threads it takes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session, constants
from huggingface_hub.utils._paths import filter_repo_objects

from panjue.prompts.model import (
    MODEL_FILES,
    TINY_BYTES,
    _from_hub,
    is_demo,
    model_folder,
    threads_for,
)
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.plumbing.threads import SPINS

OF_A_HUB = ["config.json", "model-00001-of-00001.safetensors", "tokenizer.json", "a.jinja"]


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
    (adapter / "manifest.json").write_text('{"base": "base"}', "utf-8")
    assert is_demo(adapter), "from any working directory"
    for other in ('{"base": "Qwen/Qwen3-8B"}', "{}"):
        (adapter / "manifest.json").write_text(other, "utf-8")
        assert not is_demo(adapter)


def test_an_adapter_is_no_base_model(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen3-8B"})
    with pytest.raises(UserError, match=r"is an adapter; give the base .* \(Qwen/Qwen3-8B\)"):
        model_folder(str(tmp_path))


def test_a_folder_of_the_hubs_cache_is_said_to_have_snapshots(tmp_path: Path) -> None:
    cached = tmp_path / "models--Qwen--Qwen3-0.6B"
    write_json(cached / "snapshots/c1899de/config.json", {})
    with pytest.raises(UserError) as error:
        model_folder(str(cached))
    said = f"has its files in snapshots/; give {cached}/snapshots/c1899de"
    assert str(error.value) == f"{cached}: {said}"


def test_code_of_a_base_is_never_run(folder: Path) -> None:
    (folder / "config.json").write_text("{}", "utf-8")
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_text('{"auto_map": {}}', "utf-8")
        with pytest.raises(UserError, match="needs its own code"):
            model_folder(str(folder))


def test_a_base_that_cannot_be_had_is_one_line_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="`make base` makes that of the demo"):
        model_folder("runs/base/model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub = r"^base model 'Qwen/Qwen3-8B': .*cannot provide it \(http://127.0.0.1:9: .*give a folder$"
    for is_offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        with pytest.raises(UserError, match=hub):
            model_folder("Qwen/Qwen3-8B")


def test_the_same_weights_are_not_fetched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*OF_A_HUB, "consolidated.safetensors", "original/model.safetensors"]
    fetched: list[list[str]] = []

    def fetch(_: str, **patterns: Any) -> str:
        fetched.append([*filter_repo_objects(names, **patterns)])
        raise OSError("no more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(UserError, match="no more"):
        _from_hub("a/b", MODEL_FILES)
    assert fetched == [OF_A_HUB]


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("HTTPS_PROXY", "socks://127.0.0.1:1080", "^HTTPS_PROXY: Unknown scheme"),
        ("SSL_CERT_FILE", "/nowhere.pem", r"^SSL_CERT_FILE: \[Errno 2\]"),
    ],
)
@pytest.mark.usefixtures("without_proxies")
def test_what_keeps_a_request_from_the_hub_is_named_by_its_variable(
    variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_session()
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=problem):
        model_folder("Qwen/Qwen3-8B")
    monkeypatch.setattr(constants, "ENDPOINT", "hf-mirror.com")
    with pytest.raises(UserError, match=r"^HF_ENDPOINT=hf-mirror.com: begins without https://$"):
        model_folder("Qwen/Qwen3-8B")


@pytest.mark.parametrize("wrong", [[], "base"])
def test_a_manifest_that_is_no_object_is_named(folder: Path, wrong: Any) -> None:
    write_json(folder / "manifest.json", wrong)
    for read in (is_demo, RunRecord.read):
        with pytest.raises(UserError, match=r"manifest.json: .*expected a JSON object"):
            read(folder)
    write_json(folder / "adapter_config.json", wrong)
    with pytest.raises(UserError, match=r"adapter_config.json: .*expected a JSON object"):
        model_folder(str(folder))


THREADS = "OMP_NUM_THREADS"


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("size", "spins", "own", "here", "in_processes"),
    [
        (TINY_BYTES, "1000", None, 2, "2"),
        (TINY_BYTES, None, None, 1, "1"),
        (TINY_BYTES + 1, "1000", None, 3, None),
        (TINY_BYTES, "1000", "2", 3, "2"),  # torch has read that when it was imported
    ],
)
def test_a_tiny_model_takes_few_threads_unless_the_user_says_otherwise(  # noqa: PLR0913, PLR0917
    size: int,
    spins: str | None,
    own: str | None,
    here: int,
    in_processes: str | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SPINS, raising=False)
    if spins:
        monkeypatch.setenv(SPINS, spins)
    if own:
        monkeypatch.setenv(THREADS, own)
    os.truncate(folder / "model.safetensors", size - 1)
    (folder / "second.safetensors").write_bytes(b"1")
    with threads_for(folder):
        assert (torch.get_num_threads(), os.environ.get(THREADS)) == (here, in_processes)
    assert (torch.get_num_threads(), os.environ.get(THREADS)) == (3, own)
