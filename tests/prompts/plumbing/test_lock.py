import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import exclusive_lock

HOLDS = """
import sys, time
from pathlib import Path
from panjue.prompts.plumbing.files import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("there", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-c", HOLDS, str(run)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "there\n"
        with (
            pytest.raises(UserError, match=r"run: another process .* choose another run=FOLDER$"),
            exclusive_lock(run, other="run=FOLDER"),
        ):
            pass
        first.kill()
    with exclusive_lock(run):
        pass


def test_a_block_in_a_block_of_the_same_folder_leaves_it_locked(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with exclusive_lock(tmp_path):
        with exclusive_lock(tmp_path):
            pass
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "another process is at work there" in done.stderr


FORKS = """
import os, sys, time
from pathlib import Path
from panjue.prompts.plumbing.files import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    if os.fork() == 0:  # it says so itself: only then has it let go of its copy
        print("there", flush=True)
    time.sleep(60)
"""


def test_a_forked_worker_that_outlives_its_parent_holds_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FORKS, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, process_group=0) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"there\n"
        with pytest.raises(UserError), exclusive_lock(tmp_path):
            pass
        first.kill()
        first.wait()
        with exclusive_lock(tmp_path):
            os.killpg(first.pid, signal.SIGKILL)  # the worker was there all the time


def test_a_new_folder_stays_only_with_files(tmp_path: Path) -> None:
    new, used, old = (tmp_path / name for name in ("new", "used", "old"))
    old.mkdir()
    for folder in (new, used, old):
        with suppress(UserError), exclusive_lock(folder):
            if folder == used:
                (used / "rows.jsonl").touch()
            raise UserError
    assert [folder.is_dir() for folder in (new, used, old)] == [False, True, True]
