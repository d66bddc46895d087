"""One server on the tiny trained model, started once for all tests that ask it."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from panjue.serve.gateway import Service, create_app
from panjue.serve.server import Server, bound, make_service
from panjue.serve.settings import ServeConfig


@dataclass
class Running:
    """A gateway with its real engine, in a thread of its own."""

    url: str
    service: Service
    key: str = "a key of the tests"

    def client(self, **kwargs: Any) -> httpx.Client:
        """Return a client that shows the key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, **kwargs)

    def engine(self) -> httpx.Client:
        """Return a client of vLLM itself, past the gateway."""
        backend = self.service.engine.backend
        headers = {"Authorization": f"Bearer {backend.key}"}
        transport = httpx.HTTPTransport(uds=str(backend.place))
        url = "http://engine/v1"
        return httpx.Client(base_url=url, transport=transport, headers=headers, timeout=120)

    def engine_metric(self, name: str) -> float:
        """Return the sum of one of vLLM's own meters."""
        with self.engine() as client:
            text = client.get("http://engine/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture(scope="session")
def server(
    trained: Path, small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Return a running server of the tiny trained model, with a law of one article."""
    folder = tmp_path_factory.mktemp("server")
    law = folder / "law.json"
    law.write_text('{"264": {"text": "盗窃公私财物，数额较大的……", "paragraphs": []}}', "utf-8")
    given = {"run": folder, "trained": trained / "adapter", "law": law}
    config = ServeConfig.model_validate({**given, **small})
    with bound("127.0.0.1", 0) as listener:
        service = make_service(config, Running.key, folder / "engine")
        server = Server(uvicorn.Config(create_app(service), log_level="warning"))
        up, problem = threading.Event(), []

        async def both() -> None:
            engine = asyncio.create_task(service.engine.run(lambda _: up.set(), print))
            await server.serve(sockets=[listener])
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            await service.engine.backend.close()

        def work() -> None:
            try:
                asyncio.run(both())
            except BaseException as error:
                problem.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        host, port = listener.getsockname()
        try:
            assert up.wait(300), (problem, (folder / "engine.log").read_text("utf-8")[-3000:])
            yield Running(f"http://{host}:{port}", service)
        finally:
            server.stop()
            thread.join(60)
        assert not problem
