"""Warnings of libraries: to `RUN/debug.log`, with their time. Errors stay on the terminal."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Thread

FORMAT = "%(asctime)s %(process)d %(name)s %(levelname)s: %(message)s"

ENGINE = "panjue.engine"
"""The logger of what an engine's processes print."""

SHOWN = "vllm"
"""The library whose warnings are printed: it has none unless VLLM_LOGGING_LEVEL is set."""

WARNING = re.compile(
    r"(\(\w+ pid=\d+\) )?"  # vLLM's name of a process
    r"(\[?[IW]\d{4} "  # torch: `[W1123 11:31:35 utils.cpp:68] Warning: …`
    r"|\S+:\d+: (?P<python>\w*Warning: )"  # Python: `file.py:138: FutureWarning: …`
    r"|.*\d+%.*\|.*\d+/\d+ \[)"  # tqdm: `shards: 50% Completed | 1/2 [00:01<00:01]`
)
"""A line on the stderr of an engine that is no error."""

JOIN_S = 1.0
"""Longest time to wait for the last lines of an engine that has ended."""


class DebugLog(logging.FileHandler):
    """Appends records to a file, which is created by the first one."""

    def __init__(self, path: Path) -> None:
        """Take the path of the file."""
        super().__init__(path, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; without space on the disk it is lost."""
        with suppress(OSError):
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore an error in writing."""


@contextmanager
def debug_log(run: Path) -> Iterator[None]:
    """Send the warnings of libraries to `run`/debug.log while the block runs.

    Libraries add handlers of their own to their loggers, many of them on import; so it is decided
    for each record, at the one method through which all loggers pass theirs on.
    """
    log, call_handlers = DebugLog(run / "debug.log"), logging.Logger.callHandlers
    for name in ("py.warnings", ENGINE):  # some libraries raise the level of all loggers
        logging.getLogger(name).setLevel(logging.WARNING)

    def divert(logger: logging.Logger, record: logging.LogRecord) -> None:
        is_shown = record.levelno >= logging.ERROR or record.name.partition(".")[0] == SHOWN
        if is_shown:
            call_handlers(logger, record)
        else:
            log.handle(record)

    logging.Logger.callHandlers = divert  # type: ignore[assignment,method-assign]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign]
        with suppress(OSError):  # it writes what a full disk has refused before
            log.close()


@contextmanager
def engine_stderr() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Yield a context in which processes are started whose warnings are logged, and not printed.

    They write to a pipe, from which this process passes on all other lines to its own stderr, as
    long as the block runs: also what a process writes that dies in C++.
    """
    read, write = os.pipe()
    passing_on = Thread(target=_pass_on, args=(read, os.dup(2)), daemon=True)
    passing_on.start()
    try:
        yield lambda: _stderr_to(write)
    finally:
        os.close(write)
        passing_on.join(JOIN_S)


@contextmanager
def _stderr_to(file: int) -> Iterator[None]:
    """Let stderr of this process, and of those that the block starts, go to an open file."""
    sys.stderr.flush()
    own = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)
        os.close(own)


def _pass_on(read: int, stderr: int) -> None:
    """Log the warnings among the lines that come from `read`; write all others to `stderr`."""
    log = logging.getLogger(ENGINE)
    warning: re.Match[str] | None = None
    with os.fdopen(read, "rb") as lines:
        for raw in lines:
            line = raw.decode("utf-8", "replace")
            # Below a warning Python prints the line of source code, and torch an empty line.
            is_rest = warning and line.startswith("  " if warning["python"] else "\n")
            warning = warning if is_rest else WARNING.match(line)
            if not warning:
                with suppress(OSError):
                    os.write(stderr, raw)
            elif line.strip():
                log.warning("%s", line.strip())
    os.close(stderr)
