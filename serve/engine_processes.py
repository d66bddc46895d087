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

    If vLLM cannot start, its error says nothing. `FirstError` in these processes has written the
    first error of any of them to a file; it is raised instead. Environment variables that the user
    has set keep their values.
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
    `pyproject.toml`), but late, after its import. In the processes of a user's own program, which
    has called `load`, that is the only call.
    """
    starter = os.environ.get(STARTER_VARIABLE)
    if starter is None or starter == str(os.getpid()):
        return
    # In both calls: after the first, multiprocessing clears its finalizers, and vLLM's import
    # removes the log handler.
    _prepare_end()
    # The first call makes this process the leader of a group of its own, in `_follow_parent`.
    is_first_call = os.getpgid(0) != os.getpid()
    if is_first_call:
        _follow_parent(int(starter))
        if "vllm" not in sys.modules:  # else this is the only call
            # Until the second call. In between, vLLM is imported, all of which stays: no garbage.
            gc.disable()
    else:
        gc.enable()


def _prepare_end() -> None:
    """Have `_before_end` called at the end, and the first error written for `starting_engine`."""
    # Python discards the SystemExit of vLLM's SIGTERM handler if it is raised in a weak reference's
    # callback. The worker then stays, and an engine that fails to start would wait for it forever.
    multiprocessing.util.Finalize(None, _before_end, exitpriority=0)
    logging.getLogger("vllm").addHandler(FirstError(logging.ERROR))
    gc.freeze()  # the engine collects garbage three times at its start: skip what it imported


def _follow_parent(starter: int) -> None:
    """Kill this process when its parent or the process `starter` ends, but not at a Ctrl-C.

    `starter` is the command or program that started the engine; the parent may be another process
    of the engine. The parent handles a Ctrl-C at the terminal, so this process leaves the
    terminal's group.
    """
    # No new session: Linux shares the CPU among sessions (autogroup), not among processes.
    os.setpgid(0, 0)
    kill_without_parent(os.getppid(), starter)


def _before_end() -> None:
    """Kill the processes that this one has started and not stopped, since it is about to end."""
    for child in multiprocessing.active_children():
        child.kill()
    gc.freeze()  # otherwise the interpreter looks for garbage for a second before it ends
