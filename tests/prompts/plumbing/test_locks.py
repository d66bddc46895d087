"""Who works in a folder at once: many may read, one may change, and whoever must wait says so."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import exclusive_lock, shared_lock

HOLD = """
import sys
from pathlib import Path
from panjue.prompts.plumbing import files
with getattr(files, sys.argv[1])(Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""

Held = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """Return what has another process hold a lock of the folder until its input is closed."""
    with ExitStack() as running:

        def start(lock: str) -> subprocess.Popen[str]:
            words = [sys.executable, "-c", HOLD, lock, str(tmp_path)]
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            running.enter_context(process)
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            return process

        yield start


def test_many_read_at_once_and_keep_out_who_changes(held: Held, tmp_path: Path) -> None:
    held("shared_lock")
    with shared_lock(tmp_path):
        pass
    with (
        pytest.raises(UserError, match="another process is at work there"),
        exclusive_lock(tmp_path),
    ):
        pass


@pytest.mark.parametrize("first", ["shared_lock", "exclusive_lock"])
def test_who_waits_says_so(
    first: str, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`choose` and `generate` on one run wait for each other."""
    process = held(first)
    said: list[Path] = []

    def waiting(folder: Path) -> None:
        said.append(folder)
        assert process.stdin
        process.stdin.close()  # what is waited for ends now

    monkeypatch.setattr("panjue.prompts.plumbing.files.say_waiting", waiting)
    is_reader = first == "shared_lock"
    with exclusive_lock(tmp_path, wait=True) if is_reader else shared_lock(tmp_path):
        assert said == [tmp_path]
