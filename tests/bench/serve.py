"""What the gateway costs: 64 clients against vLLM alone and through the gateway, in one run.

    python tests/bench/serve.py TRAINED_FOLDER CASES.jsonl [--clients 64] [--seconds 60]

TRAINED_FOLDER is an adapter folder of a run. Both ways ask the same engine for the same chat
completions, in turn, ROUNDS times each: whole and streamed. Then the same number of clients asks
/v1/judgments, each about a defendant of its own, so that a lost, doubled or crossed answer shows.
Prints throughput and its ratio, what the gateway adds to the median of a lone client, and how long
questions (the schema among them) took.
"""

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop
from rich.console import Console

from panjue.prompts.task import load_task
from panjue.serve.server import bound, make_service, run
from panjue.serve.settings import ServeConfig

ROUNDS = 6
TOKENS = 64
LONE = 24
"""Requests of the lone client: the same ones both ways."""

TASK = load_task("judgment")

Ask = Callable[[aiohttp.ClientSession, int], Awaitable[int]]
"""Send the request of a number, return its status."""


@dataclass
class Load:
    """What a stretch of load came to."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)


def main() -> None:
    """Start the server beside us, load it, print."""
    options = arguments()
    if options.server:
        serve(options)
        return
    words = [sys.executable, __file__, str(options.trained), str(options.cases), "--server"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            told = read_until_ready(server)
            asyncio.run(compare(told, options))
        finally:
            server.terminate()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trained", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    """Be the gateway, and tell where it and its engine are."""
    engine = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 64}
    given = {"run": options.trained.parent, "trained": options.trained, "port": 0}
    config = ServeConfig.model_validate({**given, "engine": engine})
    with bound(config.host, config.port) as listener, TemporaryDirectory() as private:
        service = make_service(config, None, Path(private) / "engine")
        backend = service.engine.backend
        told = {"gateway": listener.getsockname()[1], "engine": str(backend.place)}
        print(json.dumps({**told, "key": backend.key}), flush=True)
        uvloop.run(run(config, service, listener, Console()))


def read_until_ready(server: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the server told when it is ready."""
    assert server.stdout is not None
    told: dict[str, Any] = json.loads(server.stdout.readline())
    for line in server.stdout:
        if line.startswith("ready"):
            return told
    raise SystemExit("the server did not start; see engine.log in the run folder")


async def compare(told: dict[str, Any], options: argparse.Namespace) -> None:
    """Load both ways in turn and print what came of it."""
    messages = [TASK.prompt(e) for e in islice(TASK.read(options.cases), 64)]
    ways = ("vLLM alone", "gateway")
    for stream in (False, True):
        ask = chat(messages, stream=stream)
        loads: dict[str, list[Load]] = {way: [] for way in ways}
        lone: dict[str, list[float]] = {way: [] for way in ways}
        async with session(told, "vLLM alone") as engine, session(told, "gateway") as gateway:
            doors = dict(zip(ways, (engine, gateway), strict=True))
            await load(engine, ask, options.clients, 3)  # warms up
            for turn in range(2 * ROUNDS):
                way = ways[(turn + 1) // 2 % 2]  # a b b a: neither is always first
                seconds = options.seconds / ROUNDS
                loads[way].append(await load(doors[way], ask, options.clients, seconds))
                lone[way] += [await timed(doors[way], ask, number) for number in range(LONE)]
        report("streamed" if stream else "whole", loads, lone)
    async with session(told, "gateway") as http:
        done = await load(http, judge, options.clients, options.seconds)
        rate, wait = good_rate([done]), median(done.latencies)
        print(f"/v1/judgments: {rate:.1f}/s, median {wait:.2f} s, by status {dict(done.statuses)}")
        async with http.get("/metrics") as answer:
            print(question_times(await answer.text()))


@asynccontextmanager
async def session(told: dict[str, Any], way: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Open connections to one of the two for any number of clients."""
    headers = {"Authorization": f"Bearer {told['key']}"}
    connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0)
    base = f"http://127.0.0.1:{told['gateway']}"
    if way == "vLLM alone":
        base, connector = "http://localhost", aiohttp.UnixConnector(told["engine"], limit=0)
    async with aiohttp.ClientSession(base, headers=headers, connector=connector) as http:
        yield http


async def load(http: aiohttp.ClientSession, ask: Ask, clients: int, seconds: float) -> Load:
    """Let `clients` ask one after the other for `seconds`; those under way are waited for."""
    done, numbers = Load(), itertools.count()
    began = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - began < seconds:
            started = time.perf_counter()
            done.statuses[await ask(http, next(numbers))] += 1
            done.latencies.append(time.perf_counter() - started)

    await asyncio.gather(*(client() for _ in range(clients)))
    done.seconds = time.perf_counter() - began
    return done


async def timed(http: aiohttp.ClientSession, ask: Ask, number: int) -> float:
    """Return how long one request takes that nobody disturbs."""
    started = time.perf_counter()
    await ask(http, number)
    return time.perf_counter() - started


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


async def judge(http: aiohttp.ClientSession, number: int) -> int:
    """Ask about a defendant that nobody else asks about."""
    body = {"fact": "被告人盗窃手机一部，价值人民币3000元。", "defendants": [f"甲{number}"]}
    async with http.post("/v1/judgments", json=body) as answer:
        told = await answer.json()
        if answer.status == 200:
            assert [j["name"] for j in told["judgments"]] == [f"甲{number}"]
        return answer.status


def good_rate(loads: list[Load]) -> float:
    """Return good answers a second over stretches of load."""
    return sum(one.statuses[200] for one in loads) / sum(one.seconds for one in loads)


def report(kind: str, loads: dict[str, list[Load]], lone: dict[str, list[float]]) -> None:
    """Print both ways of one kind of request, over all rounds."""
    rates = {way: good_rate(of_way) for way, of_way in loads.items()}
    print(f"chat completions, {kind}, up to {TOKENS} tokens; {ROUNDS} rounds each, in turn")
    for way, of_way in loads.items():
        statuses = sum((one.statuses for one in of_way), Counter[int]())
        alone = 1000 * median(lone[way])
        print(f"  {way:12s} {rates[way]:8.1f}/s  lone client {alone:7.1f} ms  {dict(statuses)}")
    added = 1000 * (median(lone["gateway"]) - median(lone["vLLM alone"]))
    kept = rates["gateway"] / rates["vLLM alone"]
    print(f"  the gateway adds {added:.1f} ms at the median and keeps {kept:.1%} of throughput")


def question_times(metrics: str) -> str:
    """Return the mean time to fit, render and build the schema of a case."""
    found = dict(pairs(metrics))
    total, count = found["panjue_question_seconds_sum"], found["panjue_question_seconds_count"]
    return f"questions (schema included): {1000 * total / count:.1f} ms each, {count:.0f} of them"


def pairs(metrics: str) -> Iterator[tuple[str, float]]:
    """Yield the name and value of every meter."""
    for line in metrics.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            yield name, float(value)


if __name__ == "__main__":
    main()
