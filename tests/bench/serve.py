"""What serving by panjue costs: many clients against vLLM alone and against ours, in one run.

    python -m tests.bench.serve RUN CASES.jsonl [--clients 64] [--seconds 60]

RUN is a run folder. Both servers have an engine of their own, with the same settings, and are asked
in turns for the same: chat completions, whole and streamed; then judgments, which vLLM is asked for
plainly, by their token ids and schemas. Prints requests a second and the ratio of ours to vLLM's.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import torch

from panjue.prompts.plumbing.run import Run
from panjue.serve.ask import Asker
from panjue.serve.judge import ServedRun
from panjue.serve.settings import BACKEND, NAME, ServeConfig
from tests.bench.common import PANJUE, askable, in_turns, parser, print_rates

TOKENS = 64
ENGINE: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 64}
if torch.cuda.is_available():  # two engines share the card
    ENGINE = {"gpu_memory_utilization": 0.4}
PORTS = {"vLLM alone": 8917, "panjue": 8918}

Asked = tuple[str, list[dict[str, Any]]]
"""A path, and the bodies that are sent there in turn."""


def main() -> None:
    """Start both servers, load them, print."""
    options = parser(__doc__)
    options.add_argument("run", type=Path)
    options.add_argument("cases", type=Path)
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--seconds", type=float, default=60)
    given = options.parse_args()
    served = ServedRun(Run(given.run), ServeConfig.model_validate({}))
    asker, model = served.asker, served.folders.model
    kinds = kinds_of(asker, given.cases)
    with ExitStack() as running:
        # One after the other: vLLM takes what others allocate meanwhile for its own memory.
        for way, words in commands(given.run, model, asker).items():
            server = running.enter_context(subprocess.Popen(words, stdout=subprocess.DEVNULL))
            running.callback(server.terminate)
            wait_for(way, server)
        for kind, asked in kinds.items():
            print(f"{kind}: {given.seconds:g} s each time, {given.clients} clients")
            ways = {way: partial(rate, way, asked[way], given) for way in PORTS}
            print_rates(in_turns(ways), "requests/s", "vLLM alone")


def kinds_of(asker: Asker, cases: Path) -> dict[str, dict[str, Asked]]:
    """Return what each server is asked for, kind by kind."""
    pairs = askable(asker, cases, 64)
    fixed = {"max_tokens": TOKENS, "temperature": 0}
    chats = [{**fixed, "messages": question.messages} for _, question in pairs]
    streams = [{**chat, "stream": True} for chat in chats]
    judgments = [{"fact": example.text, "defendants": list(example.names)} for example, _ in pairs]
    plain = [
        {
            "prompt": question.prompt,
            "max_tokens": question.room,
            "temperature": 0,
            "structured_outputs": {"json": question.schema},
        }
        for _, question in pairs
    ]
    return {
        "chat completions": dict.fromkeys(PORTS, ("/v1/chat/completions", chats)),
        "chat completions, streamed": dict.fromkeys(PORTS, ("/v1/chat/completions", streams)),
        "judgments": {
            "vLLM alone": ("/v1/completions", plain),
            "panjue": ("/v1/judgments", judgments),
        },
    }


def commands(run: Path, model: Path, asker: Asker) -> dict[str, list[str]]:
    """Return the command of each server."""
    settings = {**ENGINE, "model": str(model), "max_model_len": asker.budget.usual}
    settings |= {"structured_outputs_config": BACKEND, "load_format": "safetensors", "seed": 0}
    settings |= {"port": PORTS["vLLM alone"], "host": "127.0.0.1", "served_model_name": NAME}
    settings |= {"generation_config": "vllm", "uvicorn_log_level": "warning"}
    plain = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in settings.items():
        told = json.dumps(value) if isinstance(value, dict) else str(value)
        plain += [f"--{name.replace('_', '-')}", *([] if value is True else [told])]
    engine = [f"engine.{name}={json.dumps(value)}" for name, value in ENGINE.items()]
    ours = [PANJUE, "serve", str(run), f"port={PORTS['panjue']}", *engine]
    return {"vLLM alone": plain, "panjue": ours}


def wait_for(way: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until a server answers."""
    while server.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{PORTS[way]}/health").is_success:
                return
        time.sleep(1)
    sys.exit(f"{way}: ended while it started")


def rate(way: str, asked: Asked, given: argparse.Namespace) -> float:
    """Return the good answers a second of one round."""

    async def both() -> float:
        # Connections for any number of clients.
        base, connector = f"http://127.0.0.1:{PORTS[way]}", aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base, connector=connector) as http:
            await load(http, asked, given.clients, 3)  # warms up
            return await load(http, asked, given.clients, given.seconds)

    return asyncio.run(both())


async def load(http: aiohttp.ClientSession, asked: Asked, clients: int, seconds: float) -> float:
    """Let `clients` ask one after the other for `seconds`; those under way are waited for."""
    path, bodies = asked
    every, statuses = cycle(bodies), Counter[int]()
    began = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - began < seconds:
            async with http.post(path, json=next(every)) as answer:
                await answer.read()
            statuses[answer.status] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    if statuses.keys() != {200}:
        print(f"{path}: {dict(statuses)}")
    return statuses[200] / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
