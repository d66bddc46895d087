"""A bundle answers by itself, as the run did that was packed; and says what was changed in it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from panjue.prompts.errors import UserError
from panjue.prompts.files import sha256
from panjue.serve.bundle import alone, bundle, pins, scrubbed, verify

PANJUE = str(Path(sys.executable).with_name("panjue"))


@pytest.fixture(scope="module")
def run(trained: Path, workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of the tiny adapter."""
    run = tmp_path_factory.mktemp("bundle") / "run"
    shutil.copytree(trained, run)
    config = run.parent / "generate.yaml"
    engine = "{dtype: float32, max_num_seqs: 32, enforce_eager: true}"
    test = workshop / "demo/test.jsonl"
    config.write_text(f"run: {run}\ntest: {test}\nengine: {engine}\n", "utf-8")
    done = subprocess.run(
        [PANJUE, "generate", str(config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def packed(run: Path) -> Path:
    bundle(run, run.parent / "bundle.zip", "base")
    return run.parent / "bundle.zip"


def test_it_has_everything_and_no_data(packed: Path, workshop: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        names = set(archive.namelist())
        contents = {name: archive.read(name) for name in names}
    wanted = {
        "MANUAL.md",
        "answer.py",
        "generate.yaml",
        "requirements.txt",
        "sft.yaml",
        "sums.json",
    }
    assert wanted <= names
    assert {"adapter/adapter_model.safetensors", "adapter/labels.json"} <= names
    assert {"base/model.safetensors", "base/tokenizer.json"} <= names
    assert "code/panjue/prompts/templates/judgment.md" in names
    assert not any(name.endswith((".jsonl", ".pyc", ".bin")) for name in names)
    first = (workshop / "demo/test.jsonl").read_text("utf-8").splitlines()[0]
    fact = first.split('"fact":"')[1][:40].encode()
    for name, content in contents.items():
        assert fact not in content, name
        assert str(workshop).encode() not in content, name
        assert b"a key of the tests" not in content, name
    assert "python answer.py TEST OUT" in contents["MANUAL.md"].decode()


def test_equal_bundles_are_equal_byte_for_byte(run: Path, packed: Path, tmp_path: Path) -> None:
    bundle(run, tmp_path / "again.zip", "base")
    assert sha256(tmp_path / "again.zip") == sha256(packed)


@pytest.mark.slow
def test_it_answers_by_itself(packed: Path, workshop: Path) -> None:
    done = subprocess.run(
        [PANJUE, "bundle", "--verify", str(packed), "--cases", str(workshop / "demo/test.jsonl")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "runs by itself and answers as it did" in done.stdout


def tampered(packed: Path, place: Path, name: str, content: bytes | None) -> Path:
    """Copy a bundle, one file of it changed, added or (None) left out."""
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(place, "w") as new:
        for entry in old.namelist():
            if entry != name:
                new.writestr(entry, old.read(entry))
        if content is not None:
            new.writestr(name, content)
    return place


def test_what_was_changed_is_named(packed: Path, workshop: Path, tmp_path: Path) -> None:
    cases, weights = workshop / "demo/test.jsonl", "adapter/adapter_model.safetensors"
    with zipfile.ZipFile(packed) as archive:
        content = bytearray(archive.read(weights))
    content[-1] ^= 1
    for name, change, told in (
        (weights, bytes(content), f"{weights} is not what was packed"),
        ("adapter/labels.json", None, "adapter/labels.json is missing"),
        ("code/panjue/extra.py", b"", "code/panjue/extra.py was not packed"),
    ):
        with pytest.raises(UserError, match=told):
            verify(tampered(packed, tmp_path / "other.zip", name, change), cases)
    with pytest.raises(UserError, match="is not the test file of the run"):
        verify(packed, workshop / "demo/train.jsonl")
    (tmp_path / "none.zip").write_bytes(b"no archive")
    with pytest.raises(UserError, match="not a zip file"):
        verify(tmp_path / "none.zip", cases)


def test_a_run_without_answers_is_no_bundle(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was not answered"):
        bundle(trained, tmp_path / "none.zip")
    assert not list(tmp_path.iterdir())


def test_pins_are_what_is_installed() -> None:
    found = dict(line.split("==") for line in pins())
    assert {"torch", "transformers", "peft", "pydantic", "llguidance"} <= set(found)
    assert "panjue" not in found
    assert "pytest" not in found


def test_no_absolute_path_stays() -> None:
    given = {"a": "/x/y.jsonl", "b": ["~/z", "runs/q"], "c": 3}
    assert scrubbed(given) == {"a": "y.jsonl", "b": ["z", "runs/q"], "c": 3}


def test_the_network_is_off_where_it_can_be() -> None:
    if not alone():
        pytest.skip("may not leave the network here")
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
    done = subprocess.run(
        [*alone(), sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "unreachable" in done.stderr
