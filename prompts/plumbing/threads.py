"""How threads that compute together wait for each other."""

import os

SPINS = "GOMP_SPINCOUNT"
"""Environment variable: how long a thread of OpenMP spins while it waits; read with torch."""


def spin_briefly() -> None:
    """Let waiting threads sleep soon, unless the user says otherwise; before torch is imported.

    By default they spin for as long as a busy process keeps one of them from running. Seconds a
    step of a 0.5B on two cores, idle and beside a busy process: 4.2, more than 15; so 4.3, 8.1.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPINS, "1000")
