"""How threads that compute together wait for each other."""

import os

SPINS = "GOMP_SPINCOUNT"
"""Environment variable: how long a waiting OpenMP thread spins. It is read when torch is
imported."""


def spin_briefly() -> None:
    """Let waiting threads sleep soon, unless the user says otherwise; call it before torch.

    By default, they spin for as long as a busy process keeps one of them from running. A step of a
    0.5B on two cores then takes 4.2 s on an idle machine and more than 15 s beside a busy process.
    With this setting, it takes 4.3 and 8.1 s.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPINS, "1000")
