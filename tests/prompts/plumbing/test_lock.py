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
import os, sys, time
from pathlib import Path
from panjue.prompts.plumbing.files import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    if sys.argv[2] == "alone" or os.fork() == 0:  # a worker has by now let go of its copy
        print("there", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("process", ["alone", "with a forked worker"])
def test_a_second_process_is_refused_and_a_killed_one_holds_nothing(
    process: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-c", HOLDS, str(run), process]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, process_group=0) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "there\n"
        with (
            pytest.raises(UserError, match=r"run: another process .* choose another run=FOLDER$"),
            exclusive_lock(run, other="run=FOLDER"),
        ):
            pass
        first.kill()
        first.wait()
        with exclusive_lock(run):  # a worker is still there
            if process != "alone":
                os.killpg(first.pid, signal.SIGKILL)


def test_a_block_in_a_block_of_the_same_folder_leaves_it_locked(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDS, str(tmp_path), "alone"]
    with exclusive_lock(tmp_path):
        with exclusive_lock(tmp_path):
            pass
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "another process is at work there" in done.stderr


def test_a_new_folder_stays_only_with_files(tmp_path: Path) -> None:
    new, used, old = (tmp_path / name for name in ("new", "used", "old"))
    old.mkdir()
    for folder in (new, used, old):
        with suppress(UserError), exclusive_lock(folder):
            if folder == used:
                (used / "rows.jsonl").touch()
            raise UserError
    assert [folder.is_dir() for folder in (new, used, old)] == [False, True, True]
