"""Training on a CPU: huge pages for large tensors."""

import os


def ask_for_huge_pages() -> None:
    """Make torch ask the kernel for huge pages for its tensors.

    A step allocates and frees hundreds of megabytes repeatedly; without huge pages a fifth of its
    time is page faults. Call this before torch allocates anything large. (Keeping freed memory in
    the process with mallopt is as fast, but it fragments the heap: a run of 6 GB grew to 24.)
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
