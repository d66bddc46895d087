"""Watch the processes of an engine, so that they end with their parent and free the GPU."""

import gc
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from panjue.prompts.plumbing.errors import first_line
from panjue.prompts.plumbing.parent import kill_without_parent

STARTER_VARIABLE = "PANJUE_ENGINE_OF"
"""Environment variable of an engine's processes with the id of the process that started it."""

REASON_VARIABLE = "PANJUE_ENGINE_ERROR"
"""Environment variable of these processes with the file for the first error of any of them."""

QUIET = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "-all"}
"""Environment variables with which an engine's processes print only errors."""


@contextmanager
def starting_engine() -> Iterator[None]:
    """Mark the processes that the block starts as those of an engine, which prints only errors.

    Environment variables that the user has set keep their values.
    """
    place = TemporaryDirectory()
    reason = Path(place.name, "reason")
    wanted = {STARTER_VARIABLE: str(os.getpid()), REASON_VARIABLE: str(reason), **QUIET}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    except RuntimeError as error:  # "Engine core initialization failed. See root cause above."
        raise RuntimeError(reason.read_text("utf-8") if reason.exists() else error) from None
    finally:
        place.cleanup()
        for name in added:
            del os.environ[name]


class FirstError(logging.Handler):
    """Writes the first exception that any process of an engine logs to a file."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            with suppress(OSError), open(os.environ[REASON_VARIABLE], "x", encoding="utf-8") as out:
                out.write(first_line(record.exc_info[1]))


def watch_parent() -> None:
    """End a process of an engine with its parent, even after `kill -9`; ignore other processes.

    Two places call it. `prompts.cli` does, which Python imports first in every process that the
    command `panjue` spawns. vLLM calls it in each of its processes, as a general plugin (see
    `pyproject.toml`), but only after the engine has found its parent. The parent handles a Ctrl-C
    at the terminal, so the process leaves the terminal's group. When the process ends, it also
    kills the processes that it has not stopped.
    """
    starter = os.environ.get(STARTER_VARIABLE)
    if starter is None or starter == str(os.getpid()):
        return
    # Python discards the SystemExit of vLLM's SIGTERM handler if it is raised in a weak reference's
    # callback. The worker then stays, and an engine that fails to start would wait for it forever.
    # multiprocessing clears the list after the imports, so the first call's entry is lost.
    multiprocessing.util.Finalize(None, _before_end, exitpriority=0)
    gc.freeze()  # the engine collects garbage three times at its start: skip what it imported
    logging.getLogger("vllm").addHandler(FirstError(logging.ERROR))  # the import removes the first
    is_first_call = os.getpgid(0) != os.getpid()  # which makes a process group, here
    if is_first_call:
        # No new session: Linux shares the CPU among sessions (autogroup), not among processes.
        os.setpgid(0, 0)
        kill_without_parent(os.getppid(), int(starter))
        if "vllm" not in sys.modules:  # an engine of `load` gets one call, after the import
            gc.disable()  # until the second call: what the import makes stays, see `prompts.cli`
    else:
        gc.enable()


def _before_end() -> None:
    """Kill the processes that this one has started and not stopped, since it is about to end."""
    for child in multiprocessing.active_children():
        child.kill()
    gc.freeze()  # otherwise the interpreter looks for garbage for a second before it ends
