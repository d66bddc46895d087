"""No process of vLLM outlives the command that started it: it would hold the GPU for nobody."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "PANJUE_STARTED_BY"
"""Environment variable of every process that is to end with the one whose number it holds."""

POLL_S = 0.5
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # not loaded between fork and exec


def die_with_parent() -> None:
    """Ask Linux to send this process a SIGTERM when the one that started it ends, however."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def guarded() -> Iterator[None]:
    """See to it that what the block starts does not outlive this process, even after `kill -9`.

    vLLM's workers watch their engine, but the engine watches nobody, and one whose parent dies
    while it starts waits for ever. So a small process beside us watches for both of them.
    """
    os.environ[MARK] = str(os.getpid())
    words = [sys.executable, "-I", __file__, str(os.getpid())]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.terminate()


def watch(parent: int) -> None:
    """Wait until the process `parent` has ended, then kill all that bear its mark."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    while _kill_marked(f"{MARK}={parent}".encode()):
        time.sleep(POLL_S)  # one of them may just have started another


def _kill_marked(mark: bytes) -> int:
    killed = 0
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if int(place.name) != os.getpid() and mark in _environment(place):
                os.kill(int(place.name), signal.SIGKILL)
                killed += 1
    return killed


def _environment(place: Path) -> list[bytes]:
    return (place / "environ").read_bytes().split(b"\0")


if __name__ == "__main__":
    watch(int(sys.argv[1]))
