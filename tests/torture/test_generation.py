"""Generation that is killed, torn and starved of disk, and still ends in the same file."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.torture.conftest import ENGINE, LONGEST_S

RESUME = "run the same command to resume"

Done = subprocess.CompletedProcess[str]


def kill(job: Any, number: int, rows: int, *, engine: bool = False) -> int:
    """Start, and send the signal when `rows` more rows are there (0: while all is starting).

    With `engine` its process alone gets it. Returns the exit code.
    """
    wanted, process = job.rows + max(rows, 1), job.start()
    latest = time.monotonic() + (LONGEST_S if rows else random.Random(job.rows).uniform(2, 30))
    job.wait(lambda: job.rows >= wanted or time.monotonic() > latest)
    children = psutil.Process(process.pid).children(recursive=True)
    if engine:
        next(one for one in children if "EngineCore" in one.name()).send_signal(number)
    elif number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: the engine gets it too
    else:
        process.send_signal(number)
    code: int = process.wait(LONGEST_S)
    _gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"the engine outlives its parent: {alive}"
    return code


def finish(job: Any, *words: str) -> None:
    """Run to the end, in a process with an engine of its own."""
    job.start(*words)
    job.end()


@pytest.fixture
def resume(full: bool, panjue: Callable[..., Done], request: Any) -> Callable[[Any], None]:
    """Return what runs a job to the end: in the suite on the engine that runs already."""
    if full:
        return finish
    request.getfixturevalue("running_engine")

    def here(job: Any) -> None:
        done = panjue(*job.words)
        assert done.returncode == 0, done.stderr

    return here


def test_a_killed_generation_ends_in_the_same_submission(
    job: Any, once: Path, resume: Any, full: bool, same: Any
) -> None:
    killed, draw, tries = job("killed"), random.Random(0), 20 if full else 1
    for number in range(tries):
        before = killed.completions.read_bytes() if killed.rows else b""
        if before.count(b"\n") > 200:  # too few are left: a fast machine would answer them all
            before = b"".join(before.splitlines(keepends=True)[:100])
            killed.completions.write_bytes(before)
        kill(killed, signal.SIGKILL, 0 if number % 4 == 1 else draw.randint(1, 12))
        after = killed.completions.read_bytes()
        whole = before[: before.rfind(b"\n") + 1]
        assert after.startswith(whole), "a finished row was made again"
        with killed.completions.open("ab") as out:  # what the end of the power leaves of a row
            out.write(draw.choice([b"", b'{"id": 7, "texts": ["', b'{"id"', b"\xe7\xbd"]))
    resume(killed)
    same(killed.answers, once)


@pytest.mark.endurance
def test_sigterm_and_ctrl_c_say_how_to_resume(job: Any, once: Path, same: Any) -> None:
    stopped = job("stopped")
    for number in (signal.SIGINT, signal.SIGTERM) * 2:
        assert kill(stopped, number, 3) == 128 + number, stopped.said
        # Not always the last line: Python tidies up after an engine that was interrupted.
        assert RESUME in stopped.said, stopped.said
        # A terminal's Ctrl-C reaches the engine too, which says so at length.
        assert number == signal.SIGINT or "Traceback" not in stopped.said, stopped.said
        assert stopped.finish <= {"stop", "length"}
    finish(stopped)
    same(stopped.answers, once)


@pytest.mark.endurance
def test_an_engine_that_ends_is_no_reply(job: Any, once: Path, same: Any) -> None:
    """Told to end, vLLM's engine calls every request finished; killed, it leaves us waiting."""
    ended = job("ended")
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        assert kill(ended, number, 3, engine=True) == 2, ended.said
        assert RESUME in ended.said, ended.said
        assert ended.finish <= {"stop", "length"}
    finish(ended)
    same(ended.answers, once)


@pytest.mark.endurance
def test_two_engines_answer_as_one(job: Any, once: Path, same: Any) -> None:
    """`engine.data_parallel_size`, for the GPUs of one machine, here with two engines on a CPU."""
    both = job("both")
    finish(both, "engine.data_parallel_size=2")
    same(both.answers, once)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Mount a file system of its own; skip where that is not allowed."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_nothing(
    job: Any, once: Path, same: Any, panjue: Callable[..., Done], running_engine: object
) -> None:
    starved = job("full")
    half = (once / "completions.jsonl").stat().st_size // 2 + (once / "labels.json").stat().st_size
    with small_disk(starved.answers, half + 8192):
        done = panjue(*starved.words)
        assert done.returncode == 2, done.stderr
        [said] = [line for line in done.stderr.splitlines() if line.startswith("panjue: ")]
        assert "No space left on device" in said, done.stderr
        assert RESUME in said
        assert 0 < starved.rows < (once / "completions.jsonl").read_bytes().count(b"\n")
        subprocess.run(["mount", "-o", "remount,size=64m", str(starved.answers)], check=True)
        assert panjue(*starved.words).returncode == 0
        same(starved.answers, once)


CHANGED = {
    "test.jsonl": "test_sha256",
    "run/adapter/adapter_model.safetensors": "trained_sha256",
    "run/adapter/labels.json": "labels",
}
"""File -> what the error names if it is another."""


@pytest.mark.parametrize("file", CHANGED)
def test_resuming_with_another_file_stops_and_names_it(
    file: str, run: Path, once: Path, cases: Path, tmp_path: Path, panjue: Any
) -> None:
    ignored = shutil.ignore_patterns("answers", "merged", "checkpoints")
    answers = tmp_path / "run/answers/once"
    shutil.copytree(run, tmp_path / "run", ignore=ignored)
    shutil.copytree(once, answers)
    (answers / "completions.jsonl").write_text("", "utf-8")
    shutil.copy(cases / "test.jsonl", tmp_path)
    with (tmp_path / file).open("ab") as out:
        out.write(b" ")
    done = panjue("generate", tmp_path / "run", tmp_path / "test.jsonl", "answers=once", *ENGINE)
    assert done.returncode == 2, done.stderr
    [said] = [line for line in done.stderr.splitlines() if line.startswith("panjue: ")]
    assert CHANGED[file] in said


@pytest.mark.endurance
def test_a_bundle_answers_by_itself(
    answered: Path, workshop: Path, tmp_path: Path, panjue: Callable[..., Done]
) -> None:
    packed, cases = tmp_path / "bundle.zip", workshop / "demo/test.jsonl"
    assert panjue("bundle", answered, packed).returncode == 0
    done = panjue("bundle", "--verify", packed, "--cases", cases)
    assert "runs by itself and gives the same answers" in done.stdout, done.stderr
