"""A server that is killed, and one with two engines of which one dies."""

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker
from panjue.serve.engine import Engine, engine
from panjue.serve.trained import Served

LONGEST_S = 300

FINISHED = r'vllm:request_success_total\{[^}]*engine="(\d+)"[^}]*\} ([\d.e+]+)'
"""A line of vLLM's metrics: engine, finished requests."""

pytestmark = pytest.mark.endurance


@pytest.mark.promise("nothing outlives a server that is killed")
def test_a_server_is_killed(panjue_serve: Callable[..., Any], promise: Any) -> None:
    server = panjue_serve()
    server.ready()
    with promise.attempt():
        assert server.left_after_kill(timeout=2) == []


@pytest.mark.promise("a server with two engines ends with one of them, and answers the same again")
def test_a_server_with_two_engines(
    panjue_serve: Callable[..., Any], workshop: Path, promise: Any
) -> None:
    """Both engines answer, and after the end of one the server answers the same again."""
    cases = list(islice(Reader(load_task("judgment")).read(workshop / "demo/test.jsonl"), 16))

    def judge(case: Example) -> Any:
        words = {"fact": case.text, "defendants": list(case.names)}
        asked = httpx.post(f"{url}/v1/judgments", json=words, timeout=LONGEST_S)
        assert asked.status_code == 200, asked.text
        return asked.json()["judgments"]

    with promise.attempt():
        found = []
        for sign, code in ((signal.SIGKILL, 2), (None, 0)):
            server = panjue_serve("engine.data_parallel_size=2")
            url = server.ready()
            with ThreadPoolExecutor(8) as pool:
                found.append(list(pool.map(judge, cases)))
            counts = re.findall(FINISHED, httpx.get(f"{url}/metrics").text)
            assert {engine for engine, count in counts if float(count)} == {"0", "1"}
            server.engine.send_signal(sign) if sign else server.process.terminate()
            assert server.process.wait(60) == code
        assert found[0] == found[1]
        assert [[item["name"] for item in each] for each in found[0]] == [
            list(case.names) for case in cases
        ]


@pytest.mark.promise("two engines answer as one")
def test_two_engines(
    llm: Engine,
    asker: Asker,
    merged: Path,
    workshop: Path,
    promise: Any,
    rows_of: Any,
) -> None:
    """`engine.data_parallel_size`, for the GPUs of one machine, here with two engines on a CPU."""
    cases = list(Reader(load_task("judgment")).read(workshop / "demo/test.jsonl"))
    one = {row["id"]: row for row in rows_of(llm, asker, cases, 32)}
    settings = {"dtype": "float32", "max_num_seqs": 8, "enforce_eager": True}
    settings["data_parallel_size"] = 2
    with promise.attempt():
        with engine(Served(merged), settings, asker.max_tokens, seed=0) as both:
            two = {row["id"]: row for row in rows_of(both, asker, cases, 32)}
        ties = {key for key in one if one[key]["near_ties"] or two[key]["near_ties"]}
        differ = {key for key in one if one[key]["texts"] != two[key]["texts"]}
        assert one.keys() == two.keys()
        assert differ <= ties
        promise.tell(f"{len(one)} cases, {len(ties)} with a near tie, {len(differ)} differ")
