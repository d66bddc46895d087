"""Processes of an engine end with it, whatever state they are in."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from panjue.serve.engine_processes import REASON_VARIABLE, FirstError

PROGRAM = """
import gc
import multiprocessing
import signal
import sys
import time

from panjue.serve.engine_processes import starting_engine, watch_parent


def worker(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(90)


def core():
    sys.modules["vllm"] = None  # imported
    watch_parent()
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    spawn.Process(target=worker, args=[ready], daemon=True).start()
    ready.wait()
    print("collects garbage:", gc.isenabled(), flush=True)
    raise RuntimeError("the model cannot be compiled")


if len(sys.argv) == 1:
    watch_parent()  # in every process that is spawned, as by `prompts.cli`

if __name__ == "__main__":
    with starting_engine():
        process = multiprocessing.get_context("spawn").Process(target=core)
        process.start()
    process.join(60)
    print("exit code", process.exitcode)
    process.kill()
"""


@pytest.mark.parametrize("words", [[], ["of a user's own"]])
def test_a_failed_engine_does_not_wait_for_a_worker_that_ignores_sigterm(
    words: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, "utf-8")
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "collects garbage: True\nexit code 1\n", done.stderr
    assert "the model cannot be compiled" in done.stderr


def test_the_first_exception_that_an_engine_logs_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = tmp_path / "reason"
    monkeypatch.setenv(REASON_VARIABLE, str(reason))
    handler = FirstError()
    for error in (None, ValueError("first"), ValueError("second")):
        info = (ValueError, error, None) if error else None
        handler.emit(logging.LogRecord("vllm", logging.ERROR, "", 0, "failed", None, info))
        assert reason.exists() == bool(error)
    assert reason.read_text("utf-8") == "first"
