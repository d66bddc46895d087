"""Write warnings of libraries with their time to `RUN/debug.log`; print errors as before."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from panjue.prompts.plumbing.ours import has_record, refuse_foreign
from panjue.prompts.plumbing.version import panjue_version

FORMAT = "%(asctime)s %(process)d %(name)s %(levelname)s: %(message)s"

FIRST_LINE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \d+ \S+ [A-Z]+: |$")
"""Pattern of the beginning of a file in FORMAT. A full disk leaves an empty file."""

SHOWN = "vllm"
"""Library whose warnings are printed. It has none unless the user sets VLLM_LOGGING_LEVEL."""


class DebugLog(logging.FileHandler):
    """Appends warnings to a file, which the first warning creates. On a full disk they are lost.

    Before the first warning of each process, it writes the version of panjue.
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
        """Close the file; this writes its buffer, which a full disk may refuse as in `emit`."""
        with suppress(OSError):
            super().close()


def is_log(path: Path) -> bool:
    """Say whether a debug.log is ours: by the record of its folder, or by its beginning."""
    if has_record(path.parent):
        return True
    if not path.is_file():
        return False
    with path.open("rb") as log:
        return FIRST_LINE.match(log.readline()) is not None


@contextmanager
def debug_log(run: Path) -> Iterator[None]:
    """Send the warnings of libraries to `run`/debug.log while the block runs; print errors.

    A debug.log that panjue did not write is refused. This is only for the command line, because it
    removes the handlers of libraries. Call `quiet_libraries` after an import in the block.
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
    """Let libraries write only to the handlers of `debug_log`, if it is active."""
    if not any(isinstance(handler, DebugLog) for handler in logging.root.handlers):
        return
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or name.partition(".")[0] == SHOWN:
            continue
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler):
                logger.removeHandler(handler)
                logger.propagate = True
