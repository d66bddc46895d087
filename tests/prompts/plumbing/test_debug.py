"""What libraries warn of goes to debug.log; what fails is printed."""

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from panjue.prompts.plumbing.debug import debug_log, quiet_libraries


@pytest.fixture
def loggers() -> Iterator[list[logging.Logger]]:
    """Return loggers of `library` and vLLM, with handlers of their own as libraries have."""
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
    shown = capfd.readouterr().err
    assert shown == "an error\nas VLLM_LOGGING_LEVEL wants\n"
    log = (run / "debug.log").read_text("utf-8")
    assert re.search(r"(?m)^\d{4}-\d\d-\d\d [\d:,]+ \d+ py.warnings WARNING: .*判决 of Python", log)
    assert log.endswith(" library.part WARNING: aligned 1\n")
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
    with debug_log(tmp_path / "file"):
        loggers[0].warning("lost")
    assert not capfd.readouterr().err
