"""What libraries warn of goes to debug.log; what fails is printed."""

import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from panjue.prompts.plumbing.debug import debug_log, engine_stderr, quiet_libraries

PRINTED = (
    "Traceback (most recent call last):\n"
    '  File "engine.py", line 3, in start\n'
    "ValueError: no memory: 50% of 2/4 [GiB]\n\n"
    "(EngineCore pid=12) ERROR 11-23 11:31:35 [core.py:1] it failed\n"
    "E1123 11:31:35.017 12 torch/x.py:53] it failed\n"
    "Fatal Python error: Segmentation fault\n"
)
LOGGED = (
    "/site/dispatcher.py:138: FutureWarning: `reduce_op` is deprecated\n"
    "  if hasattr(value, 'x'):\n"
    "W1123 11:31:35.017000 10534 torch/_library/triton.py:53] Triton not available\n"
    "[W1123 11:31:35.538261750 utils.cpp:68] Warning: NUMA binding: Using MEMBIND (function f)\n\n"
    "(EngineCore pid=12) [W1123 11:31:35.538261750 utils.cpp:68] Warning: again\n"
    "\rLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 174.87it/s]\n"
)


@pytest.fixture
def loggers() -> Iterator[list[logging.Logger]]:
    """Return loggers with a handler of their own, as libraries have, of `library` and vLLM."""
    made = [logging.getLogger("library.part"), logging.getLogger("vllm.part")]
    for logger in made:
        logger.addHandler(logging.StreamHandler(sys.__stderr__))
        logger.propagate = False
        logger.setLevel(logging.WARNING)  # some libraries raise the level of all loggers
    yield made
    for logger in made:
        logger.handlers.clear()


def test_warnings_are_logged_with_their_time_and_errors_printed(
    tmp_path: Path, loggers: list[logging.Logger], capfd: pytest.CaptureFixture[str]
) -> None:
    library, vllm = loggers
    run = tmp_path / "run"
    with warnings.catch_warnings(), debug_log(run):
        warnings.simplefilter("always")
        assert not run.exists(), "made by the first warning"
        warnings.warn("判决 of Python", FutureWarning, stacklevel=1)
        library.warning("aligned %d", 1)
        library.error("an error")
        vllm.warning("as VLLM_LOGGING_LEVEL wants")
    library.warning("after it")
    shown = capfd.readouterr().err
    assert shown == "an error\nas VLLM_LOGGING_LEVEL wants\nafter it\n"
    log = (run / "debug.log").read_text("utf-8")
    assert re.search(r"^\d{4}-\d\d-\d\d [\d:,]+ \d+ py.warnings WARNING: .*判决 of Python", log)
    assert log.endswith(" library.part WARNING: aligned 1\n")
    library.handlers.clear()
    with debug_log(run):
        library.addHandler(logging.StreamHandler(sys.__stderr__))  # as on an import in the block
        quiet_libraries()
        library.warning("appended")
    assert not capfd.readouterr().err
    assert (run / "debug.log").read_text("utf-8").startswith(log)


def test_a_log_that_cannot_be_written_stops_nothing(
    tmp_path: Path, loggers: list[logging.Logger], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/debug.log").symlink_to("/dev/full")
    for run in ("file", "full"):
        with debug_log(tmp_path / run):
            loggers[0].warning("lost")
    assert not capfd.readouterr().err


def test_the_warnings_of_an_engine_are_logged_and_all_else_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # It ends as in C++: no handler of Python runs any more.
    code = "import os, sys; os.write(2, sys.argv[1].encode()); os.abort()"
    with debug_log(tmp_path), engine_stderr() as filtered:
        with filtered():
            process = subprocess.Popen([sys.executable, "-c", code, LOGGED + PRINTED])
        print("of this process", file=sys.stderr)
        process.wait()
    shown = capfd.readouterr().err
    assert sorted(shown.splitlines()) == sorted([*PRINTED.splitlines(), "of this process"])
    log = (tmp_path / "debug.log").read_text("utf-8")
    messages = [line.partition("panjue.engine WARNING: ")[2] for line in log.splitlines()]
    assert messages == [line.strip() for line in LOGGED.split("\n") if line]
