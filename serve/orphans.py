"""No process of vLLM outlives the one that started it: it would hold the GPU for nobody."""

import ctypes
import multiprocessing
import os
import signal
import sys

GUARDED = "PANJUE_GUARDS_ENGINE"
"""Environment variable that is set where vLLM was started by panjue."""

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # not loaded between fork and exec


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when the one that started it ends, however."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, number)


def guard() -> None:
    """Let an engine of vLLM die with us; its workers watch it, but it watches nobody.

    vLLM calls this at the start of each of its processes that is not forked: pyproject names it
    as one of its plugins. (VLLM_PLUGINS, where a user sets it, must name panjue too.)
    """
    parent = multiprocessing.parent_process()
    if parent is None or GUARDED not in os.environ:
        return
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)  # it ended before we asked
