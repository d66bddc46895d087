"""One vLLM engine on the tiny trained model, started once for all tests that decode."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from panjue.prompts.labels import load_labels
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker
from panjue.serve.engine import LLM, engine
from panjue.serve.gateway import Service, create_app
from panjue.serve.server import ServeConfig, Server, bound, make_service
from panjue.serve.trained import served_model

MAX_TOKENS = 3072
SMALL = {"dtype": "float32", "max_num_seqs": 32, "enforce_eager": True}


@pytest.fixture(scope="session")
def merged(trained: Path) -> Path:
    """Return the folder of the tiny base with its adapter folded in."""
    return served_model(trained / "adapter", "merge").model


@pytest.fixture(scope="session")
def llm(merged: Path) -> Iterator[LLM]:
    """Return the engine."""
    with engine(merged, SMALL, MAX_TOKENS, seed=0) as started:
        yield started


@pytest.fixture(scope="session")
def asker(trained: Path, merged: Path) -> Asker:
    """Return what turns invented cases into constrained greedy requests."""
    labels = load_labels(trained / "adapter/labels.json")
    return Asker(load_task("judgment"), labels, merged, MAX_TOKENS)


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
def server(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return a running server of the tiny trained model, with a law of one article."""
    folder = tmp_path_factory.mktemp("server")
    law = folder / "law.json"
    law.write_text('{"264": {"text": "盗窃公私财物，数额较大的……", "paragraphs": []}}', "utf-8")
    given = {"run": folder, "trained": trained / "adapter", "law": law, "max_tokens": MAX_TOKENS}
    config = ServeConfig.model_validate({**given, "engine": SMALL})
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
