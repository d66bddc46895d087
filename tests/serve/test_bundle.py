"""A bundle has all it needs (`make torture` lets it answer), and says what was changed in it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from panjue.finetune.trained import open_trained
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.config import load_section
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256
from panjue.prompts.plumbing.records import AnswersRecord
from panjue.serve.bundle import bundle, requirements, verify
from panjue.serve.settings import GenerateConfig
from tests.opened import generated


@pytest.fixture(scope="module")
def packed(answered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of a finished run with its base."""
    out = tmp_path_factory.mktemp("bundle") / "bundle.zip"
    bundle(answered, out)
    return out


@pytest.fixture(scope="module")
def unpacked(packed: Path) -> Path:
    """Return the folder of an unpacked bundle, which nobody may change."""
    folder = packed.parent / "unpacked"
    shutil.unpack_archive(packed, folder)
    return folder


@pytest.fixture
def run(answered: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run."""
    return shutil.copytree(answered, tmp_path / "run")


def test_a_bundle_is_a_run_folder_with_the_settings_of_the_answers(
    unpacked: Path, answered: Path
) -> None:
    opened = open_trained(unpacked)
    assert opened.record.base == "base"
    assert opened.folder == unpacked / "adapter"
    settings = load_section(GenerateConfig, unpacked / "config.yaml", "generate")
    record = AnswersRecord.read(answered / "answers/test")
    assert (settings.engine, settings.sampling) == (record.engine, record.sampling)
    assert settings.on_bad_row == record.on_bad_row == "skip"
    assert settings.answer == "model"


def test_what_the_classifier_answered_it_answers_without_an_engine(
    run: Path, workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make torture` does it with the model; no folder is left beside the ZIP."""
    cases = workshop / "demo/test.jsonl"
    words = ["answer=classifier", "answers=a", "engine.download_dir=/own/models"]
    generated(run, cases, words)
    bundle(run / "answers/a", tmp_path / "bundle.zip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.zip", "run"]
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        assert "/own" not in archive.read("config.yaml").decode()
    verify(tmp_path / "bundle.zip", cases)
    assert "gives the same answers" in capsys.readouterr().out


PARTS = {
    "adapter/adapter_model.safetensors",
    "adapter/labels.json",
    f"adapter/{CLASSIFIER}",
    "base/model.safetensors",
    "base/tokenizer.json",
    "code/panjue/prompts/tasks/judgment/prompt.md",
    "answer.py",
    "config.yaml",
    "requirements.txt",
}


def test_it_has_everything_and_no_data(unpacked: Path, answered: Path, workshop: Path) -> None:
    files = [path for path in unpacked.rglob("*") if path.is_file()]
    contents = {str(path.relative_to(unpacked)): path.read_bytes() for path in files}
    assert contents.keys() >= PARTS
    assert not any(name.endswith((".jsonl", ".pyc", ".bin")) for name in contents)
    assert not any("configs/" in name for name in contents), "those may be the user's own"
    first = (workshop / "demo/test.jsonl").read_text("utf-8").splitlines()[0]
    fact = first.split('"fact":"')[1][:40]
    project = Path(__file__).parents[2]
    for private in (fact, str(workshop), str(answered), str(project), f"{Path.home()}/"):
        assert [name for name in contents if private.encode() in contents[name]] == []
    assert "python answer.py TEST" in contents["MANUAL.md"].decode()
    packages = contents["requirements.txt"].decode()
    assert "\ntransformers==" in packages
    assert "panjue" not in packages


def test_no_other_task_is_packed(unpacked: Path) -> None:
    """A private task lies beside the public ones."""
    tasks = unpacked / "code/panjue/prompts/tasks"
    folders = {path.name for path in tasks.iterdir() if path.is_dir()}
    assert folders == {"judgment"}


@pytest.mark.parametrize("change", ["another", "missing"])
@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "config.yaml"])
def test_a_bundle_with_a_changed_file_does_not_answer(
    name: str, change: str, unpacked: Path, workshop: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(unpacked, tmp_path / "bundle")
    if change == "another":
        (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    else:
        (folder / name).unlink()
    words = [sys.executable, "-P", "answer.py", str(workshop / "demo/test.jsonl")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    told = "was changed since it was packed" if change == "another" else "is missing"
    assert done.returncode == 1
    assert done.stderr == f"{folder / name}: {told}; unpack the archive again\n"
    assert not (folder / "answers").exists()


def test_imported_versions_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, version in (("first", "2.0"), ("second", "1.0")):
        info = tmp_path / place / f"twice-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: twice\nVersion: {version}\n", "utf-8")
    (tmp_path / "second/broken-1.0.dist-info").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path / place) for place in ("first", "second")])
    assert requirements() == ["twice==2.0"]


def test_what_is_no_bundle_of_the_cases_is_refused(
    packed: Path, workshop: Path, tmp_path: Path
) -> None:
    cases = workshop / "demo/test.jsonl"
    with pytest.raises(UserError, match="is not the test file of the run"):
        verify(packed, workshop / "demo/train.jsonl")
    (tmp_path / "none.zip").write_bytes(b"no archive")
    with pytest.raises(UserError, match="not a zip file"):
        verify(tmp_path / "none.zip", cases)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("labels.json", "{}")
    with pytest.raises(UserError, match=r"other.zip: is no bundle"):
        verify(tmp_path / "other.zip", cases)
    raw = (tmp_path / "other.zip").read_bytes()
    (tmp_path / "damaged.zip").write_bytes(raw.replace(b"{}", b"[}", 1))
    with pytest.raises(UserError, match=r"damaged.zip: Bad CRC-32 for file 'labels.json'"):
        verify(tmp_path / "damaged.zip", cases)


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ("{}", "submission: Field required"),
        ('{"submission": "submission.jsonl", "test_sha256": "0"}', "sha256: Field required"),
        ('{"submission": 7, "test_sha256": "0", "sha256": "0"}', "submission: "),
        ("[]", "object"),
        ("{", "Invalid JSON"),
    ],
)
def test_an_expected_json_that_is_not_whole_is_one_line(
    expected: str, problem: str, workshop: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "torn.zip", "w") as archive:
        archive.writestr("expected.json", expected)
    with pytest.raises(UserError) as error:
        verify(tmp_path / "torn.zip", workshop / "demo/test.jsonl")
    assert str(error.value).startswith(f"{tmp_path}/torn.zip: expected.json: ")
    assert problem in str(error.value)
    assert str(error.value).endswith("; pack it again")


def test_a_run_has_one_bundle(packed: Path, answered: Path, tmp_path: Path) -> None:
    """Whenever it is packed, and wherever the run lies."""
    moved = shutil.copytree(answered, tmp_path / "moved")
    for path in sorted(moved.rglob("*")):
        os.utime(path, (10**9, 10**9))
        if path.is_file():
            path.chmod(0o600)
    bundle(answered, tmp_path / "again.zip")
    bundle(moved, tmp_path / "moved.zip")
    hashes = {sha256(path) for path in (packed, tmp_path / "again.zip", tmp_path / "moved.zip")}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"endpoint": "http://x/v1#m"}, "no fine-tuned model answered"),
        ({"adapter": "none"}, "no fine-tuned model answered"),
        ({"trained_sha256": "0"}, "is not the training that gave these answers"),
        ({"prompt_sha256": "0"}, "was asked with another prompt"),
    ],
)
def test_answers_that_cannot_be_repeated_are_not_packed(
    change: dict[str, Any], message: str, run: Path, tmp_path: Path
) -> None:
    answers = run / "answers/test"
    AnswersRecord.read(answers).model_copy(update=change).write(answers)
    with pytest.raises(UserError, match=message):
        bundle(run, tmp_path / "out.zip")
    assert not (tmp_path / "out.zip").exists()


def test_a_changed_submission_or_a_run_without_one_is_not_packed(
    run: Path, trained: Path, tmp_path: Path
) -> None:
    with (run / "answers/test/submission.jsonl").open("a", encoding="utf-8") as out:
        out.write("\n")
    with pytest.raises(UserError, match="was changed since"):
        bundle(run, tmp_path / "out.zip")
    with pytest.raises(UserError, match="has no answers"):
        bundle(trained, tmp_path / "out.zip")
    with pytest.raises(UserError, match="is a folder; name the ZIP"):
        bundle(run, tmp_path)
