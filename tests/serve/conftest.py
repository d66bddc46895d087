"""One server on the tiny trained model, started once for all tests that ask it."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import SERVE_WORDS, PanjueServe

KEY = "a-key-of-the-tests"


@dataclass
class Running:
    """The server, and where it listens."""

    url: str
    key: str = KEY

    def client(self, **kwargs: Any) -> httpx.Client:
        """Return a client that shows the key."""
        headers = {"Authorization": f"Bearer {self.key}", **kwargs.pop("headers", {})}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, **kwargs)

    def engine_metric(self, name: str) -> float:
        """Return the sum of one of vLLM's meters."""
        with self.client() as client:
            text = client.get("/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="session")
def server(trained: Path, merged: Path) -> Iterator[Running]:
    """Return a running server of the tiny trained model, which is merged already."""
    command = [Path(sys.executable).with_name("panjue"), "serve", trained, *SERVE_WORDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PANJUE_API_KEY", KEY)
        started = PanjueServe([*command, "engine.max_num_seqs=32"])
    try:
        yield Running(started.ready())
    finally:
        started.process.terminate()
        assert started.process.wait(60) == 0
        started.end()


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    """Return a client of the server that shows the key."""
    with server.client() as client:
        yield client
