"""Generation that is killed, torn and starved of disk, and still ends in the same file."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from panjue.prompts import tasks
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines
from panjue.serve.generate import main

PANJUE = str(Path(sys.executable).with_name("panjue"))
LONGEST_S = 600


def answers_of(config: Path) -> Path:
    return config / "answers/test"


Finish = Callable[[Path], subprocess.CompletedProcess[str]]


@pytest.fixture
def finish(full: bool, panjue: Any, request: pytest.FixtureRequest) -> Finish:
    """Return what runs to the end: in the suite on the engine that runs already."""
    if full:
        return in_a_process
    request.getfixturevalue("running_engine")
    return lambda config: panjue("generate", config, config / "cases.jsonl")


def in_a_process(config: Path) -> subprocess.CompletedProcess[str]:
    words = [PANJUE, "generate", str(config), str(config / "cases.jsonl")]
    return subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S, check=False)


def kill(
    config: Path, number: int, rows: int, *, engine: bool = False
) -> tuple[subprocess.Popen[bytes], str]:
    """Start, and send the signal when `rows` more rows are there (0: while all is starting).

    With `engine` its process alone gets it.
    """
    completions = answers_of(config) / "completions.jsonl"
    wanted = lines_of(completions) + rows
    words = [PANJUE, "generate", str(config), str(config / "cases.jsonl")]
    errors = config.with_suffix(".err")  # no pipe: nobody reads it while it runs
    with (
        errors.open("wb") as err,
        subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
        ) as running,
    ):
        began = time.monotonic()
        pause = random.Random(wanted).uniform(2, 30) if rows == 0 else LONGEST_S
        while lines_of(completions) < wanted + (rows == 0):
            assert running.poll() is None, errors.read_text("utf-8")
            if time.monotonic() - began > pause:
                break
            time.sleep(0.01)
        children = psutil.Process(running.pid).children(recursive=True)
        if engine:
            next(child for child in children if "EngineCore" in child.name()).send_signal(number)
        elif number == signal.SIGINT:
            os.killpg(running.pid, number)  # as a terminal does: the engine gets it too
        else:
            running.send_signal(number)
        running.wait(timeout=LONGEST_S)
    _gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"the engine outlives its parent: {alive}"
    return running, errors.read_text("utf-8")


def finished(config: Path) -> set[str]:
    """Return why the replies that are there ended."""
    rows = read_lines(answers_of(config) / "completions.jsonl")
    return {reason for _, row in rows for reason in row["finish"]}


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.promise("generation survives kill -9")
def test_kills(
    make: Callable[[str], Path], once: Path, finish: Finish, promise: Any, full: bool, same: Any
) -> None:
    config, draw = make("killed"), random.Random(0)
    completions = answers_of(config) / "completions.jsonl"
    for number in range(20 if full else 1):
        with promise.attempt():
            before = completions.read_bytes() if completions.exists() else b""
            if before.count(b"\n") > 200:  # too few are left: a fast machine would answer them all
                before = b"".join(before.splitlines(keepends=True)[:100])
                completions.write_bytes(before)
            kill(config, signal.SIGKILL, 0 if number % 4 == 1 else draw.randint(1, 12))
            after = completions.read_bytes()
            whole = before[: before.rfind(b"\n") + 1]
            assert after.startswith(whole), "a finished row was made again"
            with completions.open("ab") as out:  # what the end of the power leaves of a row
                out.write(draw.choice([b"", b'{"id": 7, "texts": ["', b'{"id"', b"\xe7\xbd"]))
    with promise.attempt():
        done = finish(config)
        assert done.returncode == 0, done.stderr
        ties = same(answers_of(config), once)
        promise.tell(f"{lines_of(completions)} cases, {ties} with a near tie")


@pytest.mark.promise("SIGTERM and Ctrl-C say how to go on")
def test_signals(
    make: Callable[..., Path], once: Path, finish: Finish, promise: Any, full: bool, same: Any
) -> None:
    # So many that a signal after three cannot come too late.
    config = make("told", "test" if full else "train")
    tries = [signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    for number in tries if full else tries[:1]:
        with promise.attempt():
            running, told = kill(config, number, 3)
            assert running.returncode == 128 + number, told
            # Not always the last line: Python tidies up after an engine that was interrupted.
            assert "run the same command to resume\n" in told, told
            # A terminal's Ctrl-C reaches the engine too, which says so at length.
            assert number == signal.SIGINT or "Traceback" not in told, told
    assert finished(config) <= {"stop", "length"}
    if full:
        with promise.attempt():
            assert finish(config).returncode == 0
            same(answers_of(config), once)


@pytest.mark.promise("an engine that ends is no reply")
def test_engine_ends(
    make: Callable[..., Path], once: Path, finish: Finish, promise: Any, full: bool, same: Any
) -> None:
    """Told to end, vLLM's engine calls every request finished; killed, it leaves us waiting."""
    config = make("ended", "test" if full else "train")
    tries = [signal.SIGINT, signal.SIGKILL, signal.SIGTERM]
    for number in tries if full else tries[:2]:
        with promise.attempt():
            running, told = kill(config, number, 3, engine=True)
            assert running.returncode == 2, told
            assert "run the same command to resume\n" in told, told
            assert finished(config) <= {"stop", "length"}
    if full:
        with promise.attempt():
            assert finish(config).returncode == 0
            same(answers_of(config), once)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of its own; skip where that is not allowed."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.promise("a full disk loses nothing")
def test_full_disk(
    make: Callable[[str], Path], once: Path, finish: Finish, promise: Any, same: Any
) -> None:
    config = make("full")
    run, disk = answers_of(config), config / "answers"
    half = (once / "completions.jsonl").stat().st_size // 2 + (once / "labels.json").stat().st_size
    with small_disk(disk, str(half + 8192)), promise.attempt():
        done = finish(config)
        assert done.returncode == 2, done.stderr
        [told] = [line for line in done.stderr.splitlines() if line.startswith("panjue: ")]
        assert "No space left on device" in told, done.stderr
        assert "run the same command to resume" in told
        assert 0 < lines_of(run / "completions.jsonl") < lines_of(once / "completions.jsonl")
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert finish(config).returncode == 0
        same(run, once)


def other_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.promise("resuming with something else stops and names it")
@pytest.mark.parametrize(
    "what", ["model", "adapter", "data", "prompt", "labels", "sampling", "engine", "schema"]
)
def test_something_else(
    once: Path,
    tmp_path: Path,
    what: str,
    promise: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A run of its own, unfinished, with copies of everything that it was made from.
    run = shutil.copytree(once.parents[1], tmp_path / "run")
    copy, test, words, restore = run / "adapter", run / "cases.jsonl", list[str](), ExitStack()
    (run / "answers/test/completions.jsonl").write_text("", "utf-8")
    named = {
        "model": "another base",
        "data": "test_sha256",
        "adapter": "trained_sha256",
        "schema": "constrained",
    }
    if what == "data":
        other_bytes(test)
    elif what == "adapter":
        other_bytes(copy / "adapter_model.safetensors")
    elif what == "labels":
        other_bytes(copy / "labels.json")
    elif what == "prompt":
        shutil.copytree(tasks.__path__[0], tmp_path / "tasks")
        other_bytes(tmp_path / "tasks/judgment/prompt.md")
        monkeypatch.setattr(tasks, "__path__", [str(tmp_path / "tasks")])
    elif what == "model":
        base = Path(json.loads((copy / "manifest.json").read_text("utf-8"))["base"])
        shutil.copytree(base, tmp_path / "base")
        restore.callback(shutil.copy, tmp_path / "base/config.json", base / "config.json")
        other_bytes(base / "config.json")
    else:
        words += {
            "sampling": ["sampling.temperature=0.5"],
            "engine": ["engine.dtype=bfloat16"],
            "schema": ["constrained=false"],
        }[what]
    with promise.attempt(), restore:
        with pytest.raises(UserError, match=named.get(what, what)) as told:
            main(run, test, words)
        assert "\n" not in str(told.value)
