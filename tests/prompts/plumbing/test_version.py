"""The version names the commit of the checkout that the code lies in, or none."""

import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from panjue.prompts.plumbing import version as module
from panjue.prompts.plumbing.debug import debug_log, is_log
from panjue.prompts.plumbing.version import IN_BUNDLE, panjue_version

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the code lies in, for this test."""
    monkeypatch.setattr(module, "ROOT", tmp_path)
    panjue_version.cache_clear()
    return tmp_path


@pytest.fixture(autouse=True)
def _fresh() -> object:
    yield
    panjue_version.cache_clear()


def git(folder: Path, *words: str) -> str:
    done = subprocess.run([*GIT, "-C", folder, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(root: Path) -> Path:
    if not shutil.which("git"):
        pytest.skip("needs git")
    git(root, "init", "--quiet")
    (root / "code.py").write_text("A = 1\n", "utf-8")
    git(root, "add", "code.py")
    git(root, "commit", "--quiet", "--message", "First")
    git(root, "tag", "v9")
    return root


def test_a_checkout_has_its_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(checkout, "rev-parse", "HEAD")[:8]
    (checkout / "untracked").touch()
    monkeypatch.setenv("GIT_DIR", str(checkout / "of-a-hook"))
    assert panjue_version() == f"{version('panjue')}+{commit}"


def test_a_changed_file_is_named(checkout: Path) -> None:
    (checkout / "code.py").write_text("A = 2\n", "utf-8")
    assert panjue_version().endswith(".dirty")


def test_a_repository_around_the_code_is_not_panjues(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = checkout / ".venv/lib/site-packages/panjue"
    inside.mkdir(parents=True)
    monkeypatch.setattr(module, "ROOT", inside)
    assert panjue_version() == version("panjue")


@pytest.mark.parametrize("git_says", [None, "exit 128", "sleep 60"])
def test_without_git_there_is_the_version_alone(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git_says: str | None
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    if git_says:
        (programs / "git").write_text(f"#!/bin/sh\n{git_says}\n", "utf-8")
        (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/bin" if git_says == "sleep 60" else str(programs))
    monkeypatch.setattr(module, "GIT_TIMEOUT_S", 0.2)
    assert panjue_version() == version("panjue")


def test_git_is_asked_once_a_process(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = panjue_version()
    monkeypatch.setattr(subprocess, "run", None)
    assert panjue_version() == first


def test_a_bundle_has_the_version_that_packed_it(root: Path) -> None:
    (root / IN_BUNDLE).write_text("0.5.0+1234abcd\n", "utf-8")
    assert panjue_version() == "0.5.0+1234abcd"


def test_the_first_line_of_a_debug_log_has_it(tmp_path: Path) -> None:
    import logging

    with debug_log(tmp_path):
        for number in range(2):
            logging.getLogger("library").warning("warning %d", number)
    first, *others = (tmp_path / "debug.log").read_text("utf-8").splitlines()
    assert first.endswith(f" panjue INFO: version {panjue_version()}")
    assert [line[-9:] for line in others] == ["warning 0", "warning 1"]
    assert is_log(tmp_path / "debug.log")
