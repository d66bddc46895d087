"""Requests a second of `/v1/judgments` and of vLLM alone, asked plainly for the same replies.

    python -m tests.bench.serve RUN CASES.jsonl [--clients 64] [--limit 256] [--answer model]

RUN is a run folder. Both servers have an engine of their own, with the same settings, and are asked
in turns: ours for the judgments of cases, vLLM for the replies to their token ids and schemas. In a
round, the clients ask for each of the first cases once, so that both servers do the same work.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import torch

from panjue.finetune.trained import open_trained
from panjue.serve.ask import Question
from panjue.serve.judge import ServedRun
from panjue.serve.settings import BACKEND, NAME, ServeConfig
from tests.bench.common import askable, compare, parser

ENGINE: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 64}
if torch.cuda.is_available():  # two engines share the card
    ENGINE = {"gpu_memory_utilization": 0.4}
PLAIN = "http://127.0.0.1:8917"
OURS = "http://127.0.0.1:8918"
WARM_UP = 4  # requests


def main() -> None:
    """Start both servers, load them, print."""
    options = parser(__doc__, "run", "cases")
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--limit", type=int, default=256, help="cases")
    options.add_argument("--answer", choices=("auto", "model"), default="auto", help="who")
    given = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and the servers with it
    settings = ServeConfig.model_validate({"answer": given.answer})
    served = ServedRun(open_trained(given.run), settings)
    pairs = askable(served.question_maker, given.cases, given.limit)
    cases = [{"fact": example.text, "defendants": list(example.names)} for example, _ in pairs]
    prompts = [plain_request(question) for _, question in pairs]
    of_engine = [f"engine.{name}={json.dumps(value)}" for name, value in ENGINE.items()]
    panjue = Path(sys.executable).with_name("panjue")
    ours = [panjue, "serve", given.run, f"port={OURS[-4:]}", f"answer={given.answer}", *of_engine]
    with ExitStack() as running:
        # One after the other: vLLM takes what others allocate meanwhile for its own memory.
        for url, words in ((PLAIN, plain_vllm(served)), (OURS, ours)):
            command = list(map(str, words))
            server = running.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            running.callback(server.terminate)
            wait_for(url, server)
        print(f"{len(pairs)} cases, {given.clients} clients")
        rate = partial(requests_per_second, clients=given.clients)
        ways = {
            "vLLM alone": partial(rate, f"{PLAIN}/v1/completions", prompts),
            "panjue": partial(rate, f"{OURS}/v1/judgments", cases),
        }
        compare(ways, "requests/s", "vLLM alone", given.rounds)


def plain_request(question: Question) -> dict[str, Any]:
    """Return the body that asks vLLM alone for the same reply."""
    return {
        "prompt": question.prompt,
        "max_tokens": question.room,
        "temperature": 0,
        "structured_outputs": {"json": question.schema},
    }


def plain_vllm(served: ServedRun) -> list[object]:
    """Return the command of vLLM's own server with our engine's settings."""
    settings = {
        **ENGINE,
        "model": served.folders.model,
        "max_model_len": served.question_maker.budget.usual,
        "structured_outputs_config": json.dumps(BACKEND),
        "load_format": "safetensors",
        "seed": 0,
        "port": PLAIN[-4:],
        "host": "127.0.0.1",
        "served_model_name": NAME,
        "generation_config": "vllm",
        "uvicorn_log_level": "warning",
    }
    words: list[object] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in settings.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(value)
    return words


def wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until a server answers."""
    while server.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").is_success:
                return
        time.sleep(1)
    sys.exit(f"{url}: ended while it started")


def requests_per_second(url: str, bodies: list[dict[str, Any]], clients: int) -> float:
    """Return the answers a second of one round, after a few that are not counted."""

    async def both() -> float:
        connector = aiohttp.TCPConnector(limit=0)  # connections for any number of clients
        async with aiohttp.ClientSession(connector=connector) as http:
            await load(http, url, bodies[:WARM_UP], clients)
            began = time.perf_counter()
            await load(http, url, bodies, clients)
            return len(bodies) / (time.perf_counter() - began)

    return asyncio.run(both())


async def load(
    http: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]], clients: int
) -> None:
    """Let `clients` send all bodies, each client one after the other; print other statuses."""
    waiting = iter(bodies)
    statuses = Counter[int]()

    async def client() -> None:
        for body in waiting:
            async with http.post(url, json=body) as answer:
                await answer.read()
            statuses[answer.status] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    if statuses.keys() != {200}:
        print(f"{url}: {dict(statuses)}")


if __name__ == "__main__":
    main()
