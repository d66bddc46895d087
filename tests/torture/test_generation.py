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

import psutil
import pytest

from tests.served import left_of
from tests.torture.conftest import LONGEST_S, MODEL, Job, check_same

RESUME = "run the same command to resume"

Done = subprocess.CompletedProcess[str]


def kill(job: Job, number: int, rows: int, *, engine: bool = False) -> int:
    """Start, and send the signal when `rows` more rows are there (0: while all is starting).

    With `engine` its process alone gets it. Returns the exit code.
    """
    wanted = job.rows + max(rows, 1)
    job.start()
    latest = time.monotonic() + (LONGEST_S if rows else random.Random(job.rows).uniform(2, 30))
    job.wait(lambda: job.rows >= wanted or time.monotonic() > latest)
    children = psutil.Process(job.process.pid).children(recursive=True)
    if engine:
        next(one for one in children if "EngineCore" in one.name()).send_signal(number)
    elif number == signal.SIGINT:
        os.killpg(job.process.pid, number)  # as a terminal does: the engine gets it too
    else:
        job.process.send_signal(number)
    code = job.process.wait(LONGEST_S)
    assert left_of(children) == [], "the engine outlives its parent"
    return code


@pytest.mark.endurance
def test_a_killed_generation_ends_in_the_same_submission(job: Job, once: Path) -> None:
    draw = random.Random(0)
    for number in range(20):
        before = job.completions.read_bytes() if job.rows else b""
        if before.count(b"\n") > 200:  # too few are left: a fast machine would answer them all
            before = b"".join(before.splitlines(keepends=True)[:100])
            job.completions.write_bytes(before)
        kill(job, signal.SIGKILL, 0 if number % 4 == 1 else draw.randint(1, 12))
        after = job.completions.read_bytes()
        whole = before[: before.rfind(b"\n") + 1]
        assert after.startswith(whole), "a finished row was made again"
        with job.completions.open("ab") as out:  # what the end of the power leaves of a row
            out.write(draw.choice([b"", b'{"id": 7, "texts": ["', b'{"id"', b"\xe7\xbd"]))
    job.finish()
    check_same(job.answers, once)


@pytest.mark.endurance
def test_sigterm_and_ctrl_c_say_how_to_resume(job: Job, once: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM) * 2:
        assert kill(job, number, 3) == 128 + number, job.said
        # Not always the last line: Python tidies up after an engine that was interrupted.
        assert RESUME in job.said, job.said
        # A terminal's Ctrl-C reaches the engine too, which says so at length.
        assert number == signal.SIGINT or "Traceback" not in job.said, job.said
        assert job.reasons <= {"stop", "length"}
    job.finish()
    check_same(job.answers, once)


@pytest.mark.endurance
def test_an_engine_that_ends_is_no_reply(job: Job, once: Path) -> None:
    """Told to end, vLLM's engine calls every request finished; killed, it leaves us waiting."""
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        assert kill(job, number, 3, engine=True) == 2, job.said
        assert RESUME in job.said, job.said
        assert job.reasons <= {"stop", "length"}
    job.finish()
    check_same(job.answers, once)


@pytest.mark.endurance
def test_two_engines_answer_as_one(job: Job, once: Path) -> None:
    """`engine.data_parallel_size`, for the GPUs of one machine, here with two engines on a CPU."""
    job.finish("engine.data_parallel_size=2")
    check_same(job.answers, once)


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


@pytest.fixture
def unanswered(answered: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run without its answers."""
    ignored = shutil.ignore_patterns("answers")
    return Path(shutil.copytree(answered, tmp_path / "run", ignore=ignored))


@pytest.mark.usefixtures("running_engine")
def test_a_generation_that_is_killed_once_is_resumed(
    unanswered: Path, answered: Path, workshop: Path, panjue: Callable[..., Done]
) -> None:
    job = Job(unanswered, workshop / "demo/test.jsonl", "killed")
    try:
        kill(job, signal.SIGKILL, 1)
    finally:
        job.process.kill()
    before = job.completions.read_bytes()
    assert panjue(*job.words).returncode == 0
    assert job.completions.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    check_same(job.answers, answered / "answers/test")


@pytest.mark.usefixtures("running_engine")
def test_a_full_disk_loses_nothing(
    unanswered: Path, answered: Path, workshop: Path, panjue: Callable[..., Done]
) -> None:
    whole = answered / "answers/test"
    job = Job(unanswered, workshop / "demo/test.jsonl", "starved")
    completions = (whole / "completions.jsonl").stat().st_size
    labels = (whole / "labels.json").stat().st_size
    with small_disk(job.answers, completions // 2 + labels + 8192):
        done = panjue(*job.words)
        assert done.returncode == 2, done.stderr
        [said] = [line for line in done.stderr.splitlines() if line.startswith("panjue: ")]
        assert "No space left on device" in said, done.stderr
        assert RESUME in said
        assert 0 < job.rows < 24
        subprocess.run(["mount", "-o", "remount,size=64m", job.answers], check=True)
        assert panjue(*job.words).returncode == 0
        submissions = [each / "submission.jsonl" for each in (job.answers, whole)]
        assert submissions[0].read_bytes() == submissions[1].read_bytes()


@pytest.mark.parametrize("file", ["test.jsonl", "run/adapter/adapter_model.safetensors"])
def test_resuming_with_another_file_stops_and_names_it(
    file: str, answered: Path, workshop: Path, tmp_path: Path, panjue: Callable[..., Done]
) -> None:
    shutil.copytree(answered, tmp_path / "run")
    shutil.copy(workshop / "demo/test.jsonl", tmp_path)
    (tmp_path / "run/answers/test/completions.jsonl").write_text("", "utf-8")
    with (tmp_path / file).open("ab") as out:
        out.write(b" ")
    done = panjue("generate", tmp_path / "run", tmp_path / "test.jsonl", MODEL)
    assert done.returncode == 2, done.stderr
    other = "has answers to another file" if file == "test.jsonl" else "trained_sha256"
    assert other in done.stderr


@pytest.mark.endurance
def test_a_bundle_answers_by_itself(
    answered: Path, workshop: Path, tmp_path: Path, panjue: Callable[..., Done]
) -> None:
    packed = tmp_path / "bundle.zip"
    assert panjue("bundle", answered, packed).returncode == 0
    done = panjue("bundle", "--verify", packed, "--cases", workshop / "demo/test.jsonl")
    assert "runs by itself and gives the same answers" in done.stdout, done.stderr
