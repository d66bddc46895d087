"""End a process when the one that started it ends, so that it frees the GPU."""

import os
import signal
import threading
import time
from pathlib import Path

PARENT_POLL_S = 0.2


def kill_without_parent(parent: int, starter: int) -> None:
    """Kill this process when its parent ends, or `starter`: the command, which may lie above it."""

    def wait_for_end() -> None:
        while os.getppid() == parent and Path(f"/proc/{starter}").exists():
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, daemon=True).start()
