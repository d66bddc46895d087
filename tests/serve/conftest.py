"""One server on the tiny trained model, started once for all tests that ask it."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from panjue.serve.guard import Guard
from panjue.serve.lifecycle import Lifecycle
from panjue.serve.server import bound_socket, http_server, rules
from panjue.serve.service import Service, make_service
from panjue.serve.settings import ServeConfig


@dataclass
class Running:
    """The server in a thread of its own.

    Attributes:
        url: Where it listens.
        plain: Where vLLM's app listens without what stands before it.
        loop: The event loop of both.
    """

    url: str
    plain: str
    loop: asyncio.AbstractEventLoop
    service: Service
    guard: Guard
    key: str = "a key of the tests"

    def client(self, **kwargs: Any) -> httpx.Client:
        """Return a client that shows the key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, **kwargs)

    def engine_metric(self, name: str) -> float:
        """Return the sum of one of vLLM's meters."""
        with self.client() as client:
            text = client.get("/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture(scope="session")
def server(
    trained: Path, small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Return a running server of the tiny trained model, with a law of one article."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "engine.log").touch()
    law = folder / "law.json"
    law.write_text('{"264": {"text": "盗窃公私财物，数额较大的……", "paragraphs": []}}', "utf-8")
    given = {"run": folder, "trained": trained / "adapter", "law": law}
    config = ServeConfig.model_validate({**given, **small})
    with bound_socket("127.0.0.1", 0) as listener, bound_socket("127.0.0.1", 0) as beside:
        service = make_service(config)
        guard = Guard(rules(config, service, Running.key))
        servers = [http_server(guard, 5)]
        up, problem = threading.Event(), []
        loops: list[asyncio.AbstractEventLoop] = []

        async def both() -> None:
            loops.append(asyncio.get_running_loop())
            engine = asyncio.create_task(Lifecycle(service, guard).run(lambda _: up.set(), print))
            guarded = asyncio.create_task(servers[0].serve(sockets=[listener]))
            while guard.app is None and not engine.done():
                await asyncio.sleep(0.05)
            assert guard.app
            servers.append(http_server(guard.app, 5))
            await asyncio.gather(guarded, servers[1].serve(sockets=[beside]))
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)

        def work() -> None:
            try:
                asyncio.run(both())
            except BaseException as error:
                problem.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in (listener, beside)]
        try:
            assert up.wait(300), problem
            yield Running(urls[0], urls[1], loops[0], service, guard)
        finally:
            for one in servers:
                one.stop()
            thread.join(60)
        assert not problem
