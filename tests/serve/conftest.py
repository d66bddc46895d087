"""One server on the tiny trained model, started once for all tests that ask it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.served import KEY, PanjueServe, left_of

FACT = "经审理查明：被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。被告人张某甲系主犯。"
CASE: dict[str, Any] = {"fact": FACT, "defendants": ["张某甲", "李某乙"]}
LONG_CASE = {"fact": "被告人张某盗窃。", "defendants": [f"被告人{n}" for n in range(12)]}
"""Its reply has several hundred tokens."""


@pytest.fixture(scope="session")
def server(trained: Path, merged: Path) -> Iterator[PanjueServe]:
    """Return a running server of the tiny trained model, which is merged already.

    At the end it is stopped while it answers: what runs is finished, and nothing is left.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PANJUE_API_KEY", KEY)
        started = PanjueServe(trained, "answer=model")
    try:
        started.ready()
        yield started
        stop_while_it_answers(started)
    finally:
        started.end()


def stop_while_it_answers(server: PanjueServe) -> None:
    children = server.tree.children(recursive=True)
    body = {**LONG_CASE, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/judgments", json=body) as response:
        pieces = response.iter_text()
        assert any("event: delta" in piece for piece in pieces)
        server.process.terminate()
        server.process.terminate()  # `make` and its like pass on what all got
        assert "event: result" in "".join(pieces)
    assert server.process.wait(180) == 0
    assert server.process.stdout
    assert server.process.stdout.read() == "stopped\n"
    assert left_of(children) == []


@pytest.fixture
def http(server: PanjueServe) -> Iterator[httpx.Client]:
    """Return a client of the server that shows the key."""
    with server.client() as client:
        yield client


@pytest.fixture
def serving() -> Iterator[Callable[[HTTPServer], None]]:
    """Return what lets a server answer, in a thread, as long as the test runs."""
    with ExitStack() as running:

        def start(server: HTTPServer) -> None:
            running.enter_context(server)
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            running.callback(thread.join)
            running.callback(server.shutdown)

        yield start
