"""One server on the tiny trained model, started once for all tests that ask it."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import SERVE_WORDS, PanjueServe

KEY = "a-key-of-the-tests"

LONG_CASE = {"fact": "被告人张某盗窃。", "defendants": [f"被告人{n}" for n in range(12)]}
"""Its reply has several hundred tokens."""


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
    """Return a running server of the tiny trained model, which is merged already.

    At the end it is stopped while it answers: what runs is finished, and nothing is left.
    """
    command = [Path(sys.executable).with_name("panjue"), "serve", trained, *SERVE_WORDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PANJUE_API_KEY", KEY)
        started = PanjueServe([*command, "engine.max_num_seqs=32"])
    try:
        running = Running(started.ready())
        yield running
        stop_while_it_answers(started, running)
    finally:
        started.end()


def stop_while_it_answers(server: PanjueServe, running: Running) -> None:
    children = server.tree.children(recursive=True)
    body = {**LONG_CASE, "stream": True}
    with running.client() as client, client.stream("POST", "/v1/judgments", json=body) as response:
        pieces = response.iter_text()
        assert any("event: delta" in piece for piece in pieces)
        server.process.terminate()
        server.process.terminate()  # `make` and its like pass on what all got
        assert "event: result" in "".join(pieces)
    assert server.process.wait(60) == 0
    assert server.process.stdout
    assert server.process.stdout.read() == "stopped\n"
    _gone, left = psutil.wait_procs(children, timeout=60)
    assert not left


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    """Return a client of the server that shows the key."""
    with server.client() as client:
        yield client
