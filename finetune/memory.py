"""Training on a CPU: memory that is freed stays with the process."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Settings of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Stop glibc from handing every large tensor back to the kernel when it is freed.

    A training step frees and takes the same hundreds of megabytes again and again; without this
    a fifth of its time goes into page faults. Must run before torch allocates anything large.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch then asks for huge pages
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 2**28)
