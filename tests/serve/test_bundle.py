"""A bundle has all it needs (`make torture` lets it answer), and says what was changed in it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256, write_json
from panjue.serve import bundle as bundling
from panjue.serve.bundle import bundle, pins, requirements
from panjue.serve.verify import offline_prefix, only_pinned, verify


@pytest.fixture(scope="module")
def run(answered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of a finished run of the tiny adapter."""
    return shutil.copytree(answered, tmp_path_factory.mktemp("bundle") / "run")


@pytest.fixture(scope="module")
def packed(run: Path) -> Path:
    bundle(run, run.parent / "bundle.zip", "base")
    return run.parent / "bundle.zip"


def test_it_has_everything_and_no_data(packed: Path, run: Path, workshop: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        names = set(archive.namelist())
        contents = {name: archive.read(name) for name in names}
    wanted = {
        "MANUAL.md",
        "answer.py",
        "generate.yaml",
        "requirements.txt",
        "sft.yaml",
        "SHA256SUMS",
        "expected.json",
        "manifest.json",
    }
    assert wanted <= names
    assert {
        f"adapter/{name}" for name in ("adapter_model.safetensors", "labels.json", CLASSIFIER)
    } <= names
    assert {"base/model.safetensors", "base/tokenizer.json"} <= names
    assert "code/panjue/prompts/tasks/judgment/prompt.md" in names
    assert not any(name.endswith((".jsonl", ".pyc", ".bin")) for name in names)
    assert not any("configs/" in name for name in names), "those may be the user's own"
    first = (workshop / "demo/test.jsonl").read_text("utf-8").splitlines()[0]
    fact = first.split('"fact":"')[1][:40].encode()
    for name, content in contents.items():
        assert fact not in content, name
        for path in (workshop, run, Path(__file__).parents[2], Path.home() / "x"):
            assert str(path).removesuffix("x").encode() not in content, (name, path)
    assert "python answer.py TEST OUT" in contents["MANUAL.md"].decode()


def test_the_sums_are_those_of_sha256sum(packed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(tmp_path)
    words = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(words, cwd=tmp_path, check=True)


def test_equal_bundles_are_equal_byte_for_byte(run: Path, packed: Path, tmp_path: Path) -> None:
    bundle(run, tmp_path / "again.zip", "base")
    assert sha256(tmp_path / "again.zip") == sha256(packed)


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
        ("requirements.txt", None, "requirements.txt is missing"),
        ("requirements.txt", b"torch>=2\n\n", "requirements.txt is not what was packed"),
        ("SHA256SUMS", b"{}", "SHA256SUMS is broken"),
        ("SHA256SUMS", b"\xff  x", "was not packed"),
    ):
        with pytest.raises(UserError, match=told):
            verify(tampered(packed, tmp_path / "other.zip", name, change), cases)
    with pytest.raises(UserError, match="is not the test file of the run"):
        verify(packed, workshop / "demo/train.jsonl")
    (tmp_path / "none.zip").write_bytes(b"no archive")
    with pytest.raises(UserError, match="not a zip file"):
        verify(tmp_path / "none.zip", cases)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(UserError, match=r"other.zip: is no bundle"):
        verify(tmp_path / "other.zip", cases)
    with pytest.raises(UserError, match="there is no such file"):
        verify(packed, tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match=r"nowhere.zip: No such file or directory$"):
        verify(tmp_path / "nowhere.zip", cases)
    with pytest.raises(UserError, match="has its weights; leave --base out"):
        verify(packed, cases, workshop / "base/model")


def test_a_base_that_is_not_packed_must_be_brought(
    run: Path, workshop: Path, trained: Path, tmp_path: Path
) -> None:
    bundle(run, tmp_path / "none.zip")
    cases = workshop / "demo/test.jsonl"
    with pytest.raises(UserError, match="say --base FOLDER"):
        verify(tmp_path / "none.zip", cases)
    with pytest.raises(UserError, match="say --base FOLDER"):
        verify(tmp_path / "none.zip", cases, tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not the base that"):
        verify(tmp_path / "none.zip", cases, trained / "adapter")


def test_a_run_without_answers_is_no_bundle(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no answers yet"):
        bundle(trained, tmp_path / "none.zip")
    assert not list(tmp_path.iterdir())


def test_pins_are_what_is_installed() -> None:
    found = dict(line.split("==") for line in pins())
    assert {"torch", "transformers", "peft", "pydantic", "llguidance"} <= set(found)
    assert "panjue" not in found
    assert "pytest" not in found


def test_nothing_but_the_pinned_packages_is_there(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("\n".join(requirements()) + "\n", "utf-8")
    python = only_pinned(tmp_path / "venv", tmp_path / "requirements.txt")
    script = "import pydantic, google.protobuf, opentelemetry.sdk, importlib.util as i; print("
    script += "[i.find_spec(name) for name in ('pytest', 'panjue', 'hypothesis', 'pip')])"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[None, None, None, None]\n", done.stderr


def test_a_file_over_the_limit_of_a_plain_zip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/large").write_bytes(b"x" * 5000)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    bundling._zip(tmp_path / "in", tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.read("large") == b"x" * 5000


def test_what_was_not_answered_here_or_is_another_now_is_no_bundle(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(run, tmp_path / "run") / "answers/test"
    made = read_json(copied / "manifest.json")
    for change, told in (
        ({"endpoint": "http://x/v1#m"}, "was answered by an endpoint"),
        ({"trained_sha256": "0"}, "is not what .* was answered with"),
        ({"prompt_sha256": "0"}, "was asked with another prompt"),
        ({"engine": {"download_dir": "/x/y"}}, "its engine settings name a folder"),
        ({"solve": {"similarity": "http://x/v1#m"}}, "solve.similarity is not packed"),
        ({"samples": 8}, "was decoded with --greedy"),
    ):
        write_json(copied / "manifest.json", {**made, "generate": {**made["generate"], **change}})
        with pytest.raises(UserError, match=told):
            bundle(copied, tmp_path / "out.zip")
    write_json(copied / "manifest.json", made)
    with monkeypatch.context() as patch:
        patch.setattr(bundling, "uses_classifier", lambda folder: folder is not None)
        with pytest.raises(UserError, match=r"with --greedy, or before `panjue tune`; `panjue dec"):
            bundle(copied, tmp_path / "out.zip")
    decoded = read_json(copied / "decode.json")
    write_json(copied / "decode.json", {**decoded, "decided": 3, "decision_sha256": "0"})
    with pytest.raises(UserError, match="another fit of `panjue tune`"):
        bundle(copied, tmp_path / "out.zip")
    write_json(copied / "decode.json", decoded)
    with (copied / "submission.jsonl").open("a", encoding="utf-8") as out:
        out.write("\n")
    with pytest.raises(UserError, match="was changed since"):
        bundle(copied, tmp_path / "out.zip")
    with pytest.raises(UserError, match="is a folder; name the ZIP"):
        bundle(run, tmp_path)


def test_a_merged_model_decides_as_was_fitted_to_its_adapter(run: Path, tmp_path: Path) -> None:
    adapter, out = tmp_path / "run/adapter", tmp_path / "out"
    shutil.copytree(run / "adapter", adapter)
    write_json(adapter / "decision.json", {"pair_price": 0.2})
    out.mkdir()
    bundling._pack_models(out, adapter, "merged", None)
    assert read_json(out / "merged/decision.json") == {"pair_price": 0.2}
    assert (out / "merged" / CLASSIFIER).read_bytes() == (adapter / CLASSIFIER).read_bytes()
    assert not (adapter.parent / "merged/decision.json").exists(), "a later fit is not missed"


def test_the_network_is_off_where_it_can_be() -> None:
    if not offline_prefix():
        pytest.skip("may not leave the network here")
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
    done = subprocess.run(
        [*offline_prefix(), sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "unreachable" in done.stderr
