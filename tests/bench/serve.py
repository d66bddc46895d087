"""What serving by panjue costs: many clients against vLLM alone and against ours, in one run.

    python tests/bench/serve.py RUN CASES.jsonl [--clients 64] [--seconds 60]

RUN is a run folder. Both servers have an engine of their own, with the
same settings, and are asked in turn, ROUNDS times each, for the same: chat completions, whole and
streamed; then judgments, which vLLM is asked for plainly, by their token ids and schemas. Each
judgment is about a defendant of its own, so that a lost, doubled or crossed answer shows. Prints
requests a second, the ratio of ours to vLLM's, the processor's time per request and the latency.
"""

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import torch

from panjue.prompts.plumbing.run import Run
from panjue.prompts.reader import Reader
from panjue.prompts.render import prompt_ids
from panjue.prompts.task import Messages, load_task
from panjue.serve.ask import ALTERNATIVES, Asker
from panjue.serve.judge import ServedRun
from panjue.serve.settings import BACKEND, NAME, ServeConfig

ROUNDS = 3
TOKENS = 64
ENGINE: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 64}
if torch.cuda.is_available():  # two engines share the card
    ENGINE = {"gpu_memory_utilization": 0.4}
PORTS = {"vLLM alone": 8917, "panjue": 8918}

TASK = load_task("judgment")

Ask = Callable[[aiohttp.ClientSession, int], Awaitable[int]]
"""Send the request of a number, return its status."""


@dataclass
class Load:
    """What stretches of load came to."""

    seconds: float = 0.0
    cpu: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return good answers a second."""
        return self.statuses[200] / self.seconds

    def __str__(self) -> str:
        """Return a line."""
        cpu = 1000 * self.cpu / self.statuses.total()
        return (
            f"{self.rate:8.2f}/s  {cpu:7.1f} ms of processor a request  "
            f"median {1000 * median(self.latencies):6.0f} ms  {dict(self.statuses)}"
        )


def main() -> None:
    """Start both servers, load them, print."""
    options = arguments()
    served = ServedRun(Run(options.run), ServeConfig.model_validate({}))
    asker, model = served.asker, served.folders.model
    with ExitStack() as running:
        servers = {}
        # One after the other: vLLM takes what others allocate meanwhile for its own memory.
        for way, words in commands(options.run, model, asker).items():
            server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
            servers[way] = running.enter_context(server)
            running.callback(server.terminate)
            asyncio.run(until_up(way, server))
        asyncio.run(compare(servers, asker, options))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    return parser.parse_args()


def commands(run: Path, model: Path, asker: Asker) -> dict[str, list[str]]:
    """Return the command of each server."""
    settings = {**ENGINE, "model": str(model), "max_model_len": asker.max_tokens}
    settings |= {"structured_outputs_config": BACKEND, "load_format": "safetensors", "seed": 0}
    settings |= {"port": PORTS["vLLM alone"], "host": "127.0.0.1", "served_model_name": NAME}
    settings |= {"generation_config": "vllm", "uvicorn_log_level": "warning"}
    plain = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in settings.items():
        told = json.dumps(value) if isinstance(value, dict) else str(value)
        plain += [f"--{name.replace('_', '-')}", *([] if value is True else [told])]
    engine = [f"engine.{name}={json.dumps(value)}" for name, value in ENGINE.items()]
    panjue = str(Path(sys.executable).with_name("panjue"))
    ours = [panjue, "serve", str(run), f"port={PORTS['panjue']}", *engine]
    return {"vLLM alone": plain, "panjue": ours}


async def compare(
    servers: dict[str, "subprocess.Popen[bytes]"], asker: Asker, options: argparse.Namespace
) -> None:
    """Load both in turn with each kind of request, and print what came of it."""
    every = map(TASK.ask.prompt, Reader(TASK).read(options.cases))
    messages = list(islice((m for m in every if fits(asker, m)), 64))
    kinds: dict[str, dict[str, Ask]] = {
        "chat completions": dict.fromkeys(servers, chat(messages, stream=False)),
        "chat completions, streamed": dict.fromkeys(servers, chat(messages, stream=True)),
        "judgments": {"vLLM alone": plain_judgment(asker), "panjue": judgment},
    }
    for kind, asks in kinds.items():
        loads = {way: Load() for way in servers}
        for turn in range(ROUNDS):
            order = list(servers) if turn % 2 else list(servers)[::-1]  # neither is always first
            for way in order:
                async with session(way) as http:
                    await load(http, asks[way], options.clients, 3, Load())  # warms up
                    before = cpu_of(servers[way].pid)
                    await load(http, asks[way], options.clients, options.seconds, loads[way])
                    loads[way].cpu += cpu_of(servers[way].pid) - before
        print(f"{kind}: {ROUNDS} times {options.seconds:g} s each, {options.clients} clients")
        for way, done in loads.items():
            print(f"  {way:12s} {done}")
        ratio = loads["panjue"].rate / loads["vLLM alone"].rate
        print(f"  panjue answers {ratio:.1%} of what vLLM alone does", flush=True)


def fits(asker: Asker, messages: Messages) -> bool:
    """Say whether a prompt leaves room for the reply: nothing is shortened for chat completions."""
    return len(prompt_ids(asker.tokenizer, messages)) + TOKENS <= asker.max_tokens


def session(way: str) -> aiohttp.ClientSession:
    """Open connections to one of the two for any number of clients."""
    base = f"http://127.0.0.1:{PORTS[way]}"
    return aiohttp.ClientSession(base, connector=aiohttp.TCPConnector(limit=0))


async def until_up(way: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until a server answers."""
    async with session(way) as http:
        while server.poll() is None:
            with suppress(aiohttp.ClientError):
                async with http.get("/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(1)
    sys.exit(f"{way}: ended while it started")


def cpu_of(pid: int) -> float:
    """Return the seconds of processor that a process and all below it have had."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def load(
    http: aiohttp.ClientSession, ask: Ask, clients: int, seconds: float, done: Load
) -> None:
    """Let `clients` ask one after the other for `seconds`; those under way are waited for."""
    numbers = itertools.count()
    began = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - began < seconds:
            started = time.perf_counter()
            done.statuses[await ask(http, next(numbers))] += 1
            done.latencies.append(time.perf_counter() - started)

    await asyncio.gather(*(client() for _ in range(clients)))
    done.seconds += time.perf_counter() - began


def chat(messages: list[Any], *, stream: bool) -> Ask:
    """Return how to ask for a chat completion; every answer must be whole."""
    fixed = {"max_tokens": TOKENS, "temperature": 0, "stream": stream}

    async def ask(http: aiohttp.ClientSession, number: int) -> int:
        body = {**fixed, "messages": messages[number % len(messages)]}
        async with http.post("/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            if answer.status == 200:
                assert text.count("data: [DONE]") == 1 if stream else json.loads(text)["choices"]
            return answer.status

    return ask


def case(number: int) -> dict[str, Any]:
    """Return a case about a defendant that nobody else asks about."""
    return {"fact": "被告人盗窃手机一部，价值人民币3000元。", "defendants": [f"甲{number}"]}


async def judgment(http: aiohttp.ClientSession, number: int) -> int:
    """Ask for a judgment."""
    async with http.post("/v1/judgments", json=case(number)) as answer:
        told = await answer.json()
        if answer.status == 200:
            assert [j["name"] for j in told["judgments"]] == [f"甲{number}"]
        return answer.status


def plain_judgment(asker: Asker) -> Ask:
    """Return how to ask for the reply alone: the same token ids, schema and probabilities."""
    by_hand = TASK.data.by_hand
    assert by_hand is not None
    questions = [
        asker.question(by_hand(one["fact"], one["defendants"])) for one in map(case, range(4000))
    ]

    async def ask(http: aiohttp.ClientSession, number: int) -> int:
        question = questions[number % len(questions)]
        body = {
            "prompt": question.prompt,
            "max_tokens": question.room,
            "temperature": 0,
            "logprobs": ALTERNATIVES,
            "structured_outputs": {"json": question.schema},
        }
        async with http.post("/v1/completions", json=body) as answer:
            told = await answer.json()
            if answer.status == 200:
                assert f"甲{number % len(questions)}" in told["choices"][0]["text"]
            return answer.status

    return ask


if __name__ == "__main__":
    main()
