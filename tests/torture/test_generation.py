"""Generation that is killed, torn and starved of disk, and still ends in the same file."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from panjue.prompts import tasks
from panjue.prompts.plumbing.files import read_json, read_lines

PANJUE = str(Path(sys.executable).with_name("panjue"))
ENGINE = ("engine.dtype=float32", "engine.max_num_seqs=16", "engine.enforce_eager=true")
LONGEST_S = 600
RESUME = "run the same command to resume\n"

Done = subprocess.CompletedProcess[str]
Record = Callable[[str, object], None]


class Job:
    """A generation that can be disturbed, into answers of its own."""

    def __init__(self, run: Path, test: Path, name: str, *words: str) -> None:
        self.words = ["generate", str(run), str(test), f"answers={name}", *ENGINE, *words]
        self.answers = run / "answers" / name
        self.completions = self.answers / "completions.jsonl"

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        path = self.completions
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def finish(self) -> set[str]:
        """Return why the replies that are there ended."""
        return {why for _, row in read_lines(self.completions) for why in row["finish"]}

    def in_a_process(self) -> Done:
        """Run to the end in a process with an engine of its own."""
        words = [PANJUE, *self.words]
        return subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S, check=False)

    def kill(self, number: int, rows: int, *, engine: bool = False) -> tuple[int, str]:
        """Start, and send the signal when `rows` more rows are there (0: while all is starting).

        With `engine` its process alone gets it. Returns the exit code and what was printed.
        """
        wanted = self.rows + rows
        errors = self.answers.parent / f"{self.answers.name}.err"  # a pipe would fill up
        errors.parent.mkdir(exist_ok=True)
        with (
            errors.open("wb") as err,
            subprocess.Popen(
                [PANJUE, *self.words], stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
            ) as running,
        ):
            began = time.monotonic()
            pause = random.Random(wanted).uniform(2, 30) if rows == 0 else LONGEST_S
            while self.rows < wanted + (rows == 0) and time.monotonic() - began < pause:
                assert running.poll() is None, errors.read_text("utf-8")
                time.sleep(0.01)
            children = psutil.Process(running.pid).children(recursive=True)
            if engine:
                next(one for one in children if "EngineCore" in one.name()).send_signal(number)
            elif number == signal.SIGINT:
                os.killpg(running.pid, number)  # as a terminal does: the engine gets it too
            else:
                running.send_signal(number)
            running.wait(timeout=LONGEST_S)
        _gone, alive = psutil.wait_procs(children, timeout=60)
        assert not alive, f"the engine outlives its parent: {alive}"
        return running.returncode, errors.read_text("utf-8")


Jobs = Callable[..., Job]
Finish = Callable[[Job], Done]


@pytest.fixture
def job(run: Path, cases: Path) -> Jobs:
    """Return what prepares a generation into answers of this name."""
    return lambda name, *words: Job(run, cases / "test.jsonl", name, *words)


@pytest.fixture
def finish(full: bool, panjue: Any, request: pytest.FixtureRequest) -> Finish:
    """Return what runs a job to the end: in the suite on the engine that runs already."""
    if full:
        return Job.in_a_process
    request.getfixturevalue("running_engine")
    return lambda job: panjue(*job.words)


def test_a_killed_generation_ends_in_the_same_submission(
    job: Jobs, once: Path, finish: Finish, full: bool, same: Any, record_property: Record
) -> None:
    killed, draw, tries = job("killed"), random.Random(0), 20 if full else 1
    for number in range(tries):
        before = killed.completions.read_bytes() if killed.rows else b""
        if before.count(b"\n") > 200:  # too few are left: a fast machine would answer them all
            before = b"".join(before.splitlines(keepends=True)[:100])
            killed.completions.write_bytes(before)
        killed.kill(signal.SIGKILL, 0 if number % 4 == 1 else draw.randint(1, 12))
        after = killed.completions.read_bytes()
        whole = before[: before.rfind(b"\n") + 1]
        assert after.startswith(whole), "a finished row was made again"
        with killed.completions.open("ab") as out:  # what the end of the power leaves of a row
            out.write(draw.choice([b"", b'{"id": 7, "texts": ["', b'{"id"', b"\xe7\xbd"]))
    done = finish(killed)
    assert done.returncode == 0, done.stderr
    ties = same(killed.answers, once)
    record_property("tries", tries)
    record_property("figure", f"{killed.rows} cases, {ties} with a near tie")


@pytest.mark.endurance
def test_sigterm_and_ctrl_c_say_how_to_resume(
    job: Jobs, once: Path, same: Any, record_property: Record
) -> None:
    stopped = job("stopped")
    for number in (signal.SIGINT, signal.SIGTERM) * 2:
        code, said = stopped.kill(number, 3)
        assert code == 128 + number, said
        # Not always the last line: Python tidies up after an engine that was interrupted.
        assert RESUME in said, said
        # A terminal's Ctrl-C reaches the engine too, which says so at length.
        assert number == signal.SIGINT or "Traceback" not in said, said
        assert stopped.finish <= {"stop", "length"}
    assert stopped.in_a_process().returncode == 0
    same(stopped.answers, once)
    record_property("tries", 4)


@pytest.mark.endurance
def test_an_engine_that_ends_is_no_reply(
    job: Jobs, once: Path, same: Any, record_property: Record
) -> None:
    """Told to end, vLLM's engine calls every request finished; killed, it leaves us waiting."""
    ended = job("ended")
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        code, said = ended.kill(number, 3, engine=True)
        assert code == 2, said
        assert RESUME in said, said
        assert ended.finish <= {"stop", "length"}
    assert ended.in_a_process().returncode == 0
    same(ended.answers, once)
    record_property("tries", 3)


@pytest.mark.endurance
def test_two_engines_answer_as_one(job: Jobs, once: Path, same: Any) -> None:
    """`engine.data_parallel_size`, for the GPUs of one machine, here with two engines on a CPU."""
    both = job("both", "engine.data_parallel_size=2")
    done = both.in_a_process()
    assert done.returncode == 0, done.stderr
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


def test_a_full_disk_loses_nothing(job: Jobs, once: Path, finish: Finish, same: Any) -> None:
    starved = job("full")
    half = (once / "completions.jsonl").stat().st_size // 2 + (once / "labels.json").stat().st_size
    with small_disk(starved.answers, half + 8192):
        done = finish(starved)
        assert done.returncode == 2, done.stderr
        [said] = [line for line in done.stderr.splitlines() if line.startswith("panjue: ")]
        assert "No space left on device" in said, done.stderr
        assert RESUME.strip() in said
        assert 0 < starved.rows < len(once.joinpath("completions.jsonl").read_bytes().splitlines())
        subprocess.run(["mount", "-o", "remount,size=64m", str(starved.answers)], check=True)
        assert finish(starved).returncode == 0
        same(starved.answers, once)


CHANGES = {
    "model": "another base",
    "adapter": "trained_sha256",
    "data": "test_sha256",
    "prompt": "prompt",
    "labels": "labels",
    "sampling.temperature=0.5": "sampling",
    "engine.dtype=bfloat16": "engine",
    "constrained=false": "constrained",
}
"""What is changed, or the setting -> what the error names."""


@pytest.fixture
def copy(run: Path, once: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, with answers that are to be resumed."""
    ignored = shutil.ignore_patterns("answers", "merged", "checkpoints")
    shutil.copytree(run, tmp_path / "run", ignore=ignored)
    shutil.copytree(once, tmp_path / "run/answers/once")
    (tmp_path / "run/answers/once/completions.jsonl").write_text("", "utf-8")
    return tmp_path / "run"


@pytest.mark.parametrize("what", CHANGES)
def test_resuming_with_something_else_stops_and_names_it(
    copy: Path, cases: Path, what: str, monkeypatch: pytest.MonkeyPatch, panjue: Callable[..., Done]
) -> None:
    test = Path(shutil.copy(cases / "test.jsonl", copy.parent))
    base = Path(read_json(copy / "adapter/manifest.json")["base"]) / "config.json"
    before = base.read_bytes()
    changed = {
        "data": test,
        "adapter": copy / "adapter/adapter_model.safetensors",
        "labels": copy / "adapter/labels.json",
        "model": base,
    }
    if what in changed:
        changed[what].write_bytes(changed[what].read_bytes() + b" ")
    if what == "prompt":
        shutil.copytree(tasks.__path__[0], copy.parent / "tasks")
        with (copy.parent / "tasks/judgment/prompt.md").open("a") as prompt:
            prompt.write(" ")
        monkeypatch.setattr(tasks, "__path__", [str(copy.parent / "tasks")])
    done = panjue("generate", copy, test, "answers=once", *ENGINE, *([what] if "=" in what else []))
    base.write_bytes(before)
    assert done.returncode == 2, done.stderr
    [said] = [line for line in done.stderr.splitlines() if line.startswith("panjue: ")]
    assert CHANGES[what] in said
