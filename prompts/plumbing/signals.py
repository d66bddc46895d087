"""The signals that stop a command, which saves its work or resumes it later."""

import signal

STOPPING = (
    signal.SIGTERM,
    signal.SIGINT,  # Ctrl-C
    signal.SIGHUP,  # the terminal was closed
    signal.SIGUSR1,  # Slurm warns with one of these before its time limit, as --signal says
    signal.SIGUSR2,
)


def stopping_signals() -> list[signal.Signals]:
    """Return the signals of STOPPING, without those that were ignored when this process started.

    `nohup` ignores SIGHUP, and a shell ignores SIGINT in background jobs of a script.
    """
    return [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
