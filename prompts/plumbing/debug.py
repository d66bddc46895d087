"""Warnings of libraries: to `RUN/debug.log`, with their time. Errors stay on the terminal."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
        self.setLevel(logging.WARNING)
        self.addFilter(lambda record: not _is_error(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; without space on the disk it is lost."""
        with suppress(OSError):
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore an error in writing."""


@contextmanager
def debug_log(run: Path) -> Iterator[None]:
    """Send the warnings of libraries to `run`/debug.log while the block runs; errors are printed.

    Call `quiet_libraries` after an import in the block.
    """
    log, errors = DebugLog(run / "debug.log"), logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    errors.setFormatter(logging.Formatter("%(message)s"))
    for name in ("py.warnings", ENGINE):  # some libraries raise the level of all loggers
        logging.getLogger(name).setLevel(logging.WARNING)
    with ExitStack() as undo:
        undo.callback(_close, log)
        for handler in (log, errors):
            logging.root.addHandler(handler)
            undo.callback(logging.root.removeHandler, handler)
        logging.captureWarnings(True)
        undo.callback(logging.captureWarnings, False)
        _active.append((log, undo))
        undo.callback(_active.pop)
        quiet_libraries()
        yield


_active: list[tuple[DebugLog, ExitStack]] = []
"""The log of the running command, and what restores the handlers at its end."""


def quiet_libraries() -> None:
    """Let the handlers that libraries have by now print errors only; their warnings are logged."""
    for log, undo in _active[-1:]:
        _quiet(log, undo)


def _quiet(log: DebugLog, undo: ExitStack) -> None:
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or name.partition(".")[0] == SHOWN:
            continue
        printing = [h for h in logger.handlers if isinstance(h, logging.StreamHandler)]
        for handler in printing:
            if handler is not log and _is_error not in handler.filters:
                handler.addFilter(_is_error)
                undo.callback(handler.removeFilter, _is_error)
        if printing and not logger.propagate and log not in logger.handlers:
            logger.addHandler(log)
            undo.callback(logger.removeHandler, log)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _close(log: DebugLog) -> None:
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
