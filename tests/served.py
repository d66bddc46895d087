"""`panjue serve` in a process of its own."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen

import httpx
import psutil

KEY = "a-key-of-the-tests"
WORDS = ("port=0", "max_tokens=3072", "engine.dtype=float32", "engine.max_num_seqs=32")


class PanjueServe:
    """A server of the tiny trained model: exact, and light enough for two cores."""

    key = KEY
    url = ""  # known when it is ready

    def __init__(self, run: Path, *words: str) -> None:
        panjue = Path(sys.executable).with_name("panjue")
        command = [str(panjue), "serve", str(run), *WORDS, "engine.enforce_eager=true", *words]
        self.process = Popen(command, stdout=PIPE, text=True, bufsize=1)
        self.tree = psutil.Process(self.process.pid)

    def ready(self) -> str:
        """Wait until it can answer; return its address."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("ready: "):
                self.url = line.split()[1].rstrip("/")
                return self.url
            assert line.startswith(("preparing the model", "who answers", "starting the engine"))
        raise AssertionError("it ended")

    def client(self) -> httpx.Client:
        """Return a client that shows the key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)

    @property
    def engine(self) -> psutil.Process:
        """Return the process of the engine that answers."""
        return max(self.tree.children(recursive=True), key=lambda one: one.memory_info().rss)

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.communicate()


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended after a minute."""
    _gone, left = psutil.wait_procs(processes, timeout=60)
    # One that has ended may wait for the machine's first process to take note.
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
