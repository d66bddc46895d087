"""Training on a CPU: large tensors on large pages."""

import os


def ask_for_huge_pages() -> None:
    """Let torch ask the kernel for huge pages under its tensors.

    A step takes and frees hundreds of megabytes again and again, and without this a fifth of its
    time goes into page faults. Must run before torch allocates anything large. (Keeping freed
    memory in the process, by mallopt, is as fast and was tried: the heap breaks into pieces that
    fit nothing, and a run of 6 GB grew to 24.)
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
