"""Warnings of libraries: to `RUN/debug.log`, with their time. Errors stay on the terminal."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from panjue.prompts.plumbing.ours import has_record, refuse_foreign
from panjue.prompts.plumbing.version import panjue_version

FORMAT = "%(asctime)s %(process)d %(name)s %(levelname)s: %(message)s"

FIRST_LINE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \d+ \S+ [A-Z]+: |$")
"""How a file in FORMAT begins; an empty one is left by a full disk."""

SHOWN = "vllm"
"""The library whose warnings are printed: it has none unless VLLM_LOGGING_LEVEL is set."""


class DebugLog(logging.FileHandler):
    """Appends warnings to a file, which the first one creates; on a full disk they are lost.

    Before the first warning of each process stands which panjue it is.
    """

    _has_version = False

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            if not self._has_version:
                self._has_version = True
                time = {"created": record.created, "msecs": record.msecs}
                said = {"levelname": "INFO", "msg": f"version {panjue_version()}"}
                super().emit(logging.makeLogRecord({"name": "panjue", **said, **time}))
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore an error in writing."""

    def close(self) -> None:
        """Close the file, which writes what a full disk has refused before."""
        with suppress(OSError):
            super().close()


def is_log(path: Path) -> bool:
    """Say whether a debug.log is ours; that of a folder without our record says so itself."""
    if has_record(path.parent):
        return True
    if not path.is_file():
        return False
    with path.open("rb") as log:
        return FIRST_LINE.match(log.readline()) is not None


@contextmanager
def debug_log(run: Path) -> Iterator[None]:
    """Send the warnings of libraries to `run`/debug.log while the block runs; errors are printed.

    Nothing is added to somebody else's debug.log: it is refused. Only for the command line: the
    handlers of libraries go. Call `quiet_libraries` after an import in the block.
    """
    refuse_foreign(run / "debug.log", is_log)
    log = DebugLog(run / "debug.log", encoding="utf-8", delay=True)
    log.setFormatter(logging.Formatter(FORMAT))
    log.setLevel(logging.WARNING)
    log.addFilter(lambda record: record.levelno < logging.ERROR)
    errors = logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    logging.getLogger("py.warnings").setLevel(logging.WARNING)  # some libraries raise all levels
    logging.captureWarnings(True)
    logging.root.addHandler(log)
    logging.root.addHandler(errors)
    quiet_libraries()
    try:
        yield
    finally:
        logging.root.removeHandler(log)
        logging.root.removeHandler(errors)
        logging.captureWarnings(False)
        log.close()


def quiet_libraries() -> None:
    """Let libraries write to the handlers of `debug_log` alone, if it is active."""
    if not any(isinstance(handler, DebugLog) for handler in logging.root.handlers):
        return
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or name.partition(".")[0] == SHOWN:
            continue
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler):
                logger.removeHandler(handler)
                logger.propagate = True
