"""No process of vLLM outlives the one that started it: it would hold the GPU for nobody."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MARK = "PANJUE_ENGINE_OF"
"""Environment variable of the processes of an engine: the number of the one that started it."""

POLL_S = 0.2


@contextmanager
def starting_engine() -> Iterator[None]:
    """While the block runs, mark the processes that it starts as those of an engine."""
    os.environ[MARK] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[MARK]


def watch_parent() -> None:
    """End a process of an engine with its parent, even after `kill -9`; leave others alone.

    It is called twice: by `prompts.cli`, which Python imports first in every process that the
    command `panjue` spawns, and by vLLM in each of its processes, whoever started it (in
    `pyproject.toml` it is a general plugin), but there only when the engine has found its parent.
    A Ctrl-C at the terminal is left to the parent.
    """
    first = os.environ.get(MARK)
    is_leader = os.getpgid(0) == os.getpid()  # the second time
    if first is None or first == str(os.getpid()) or is_leader:
        return
    # No session of its own, which Linux would give the share of the processor of all the others.
    os.setpgid(0, 0)
    parents = (os.getppid(), int(first))
    threading.Thread(target=_wait_for_end, args=[*parents], daemon=True).start()


def _wait_for_end(parent: int, first: int) -> None:
    while os.getppid() == parent and _lives(first):
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: int) -> bool:
    with suppress(OSError):  # gone, or its number is somebody else's by now
        os.kill(process, 0)
        return True
    return False
