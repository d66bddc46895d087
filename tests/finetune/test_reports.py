"""Nobody is told that somebody trains: libraries report nothing unless the user wants it."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from .conftest import lend_rows

COMMAND = """
import panjue.prompts.cli
try:
    panjue.prompts.cli.main()
finally:
    from huggingface_hub.utils import _telemetry
    _telemetry._TELEMETRY_QUEUE.join()  # a thread of its own sends reports
"""
"""The command `panjue`, which ends when all reports have been sent."""

HIDES = ("CI", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
"""Environment variables with which trl reports nothing; some are set where tests run."""


class Hub(BaseHTTPRequestHandler):
    """Receives what is sent to the hub."""

    received: list[str]

    def do_HEAD(self) -> None:
        self.received.append(self.path)
        self.send_response(200)
        self.end_headers()

    do_GET = do_POST = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[HTTPServer]:
    """Return a running server that has the place of the hub."""
    Hub.received = []
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("own", "topics"), [({}, []), ({"HF_HUB_DISABLE_TELEMETRY": "0"}, ["/api/telemetry/trl/other"])]
)
def test_a_training_is_reported_only_to_users_who_say_so(
    own: dict[str, str], topics: list[str], hub: HTTPServer, workshop: Path, tmp_path: Path
) -> None:
    lend_rows(workshop, tmp_path / "run")
    words = ["sft", workshop / "sft.yaml", f"run={tmp_path}/run", "dry_run=true"]
    here = {name: value for name, value in os.environ.items() if name not in HIDES}
    environment = {**here, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", **own}
    command = [sys.executable, "-c", COMMAND, *map(str, words)]
    subprocess.run(command, env=environment, check=True)
    # With reports on, the hub's own library asks for more than trl sends.
    sent = [path for path in Hub.received if path.startswith("/api/telemetry/")]
    assert sent == topics
    assert Hub.received == [] or topics, "nothing at all by default"
