"""The signals that stop a command; what it was doing is saved or resumed."""

import signal

STOPPING = (
    signal.SIGTERM,
    signal.SIGINT,  # Ctrl-C
    signal.SIGHUP,  # the terminal was closed
    signal.SIGUSR1,  # Slurm warns before its time limit, with the one that its --signal names
    signal.SIGUSR2,
)


def stopping_signals() -> list[signal.Signals]:
    """Return the signals of STOPPING that stop this process: none that was started as ignored.

    `nohup` has SIGHUP ignored, and a shell SIGINT in a script's background jobs.
    """
    return [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
