"""A server whose engine hangs or dies again and again."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from panjue.prompts.task import load_task
from panjue.serve.ask import Asker
from panjue.serve.engine import Engine, engine
from panjue.serve.rows import Calls, rows
from panjue.serve.trained import Served

PANJUE = str(Path(sys.executable).with_name("panjue"))
CASE = {"fact": "被告人张某盗窃。"}
LONGEST_S = 300

pytestmark = pytest.mark.endurance


def until(true: Callable[[], Any]) -> Any:
    began = time.monotonic()
    while not (found := true()):
        assert time.monotonic() - began < LONGEST_S
        time.sleep(0.1)
    return found


def engine_of(server: psutil.Process) -> psutil.Process:
    """Return the process of the engine that answers."""
    return max(server.children(recursive=True), key=lambda one: one.memory_info().rss)


@pytest.mark.promise("a hanging or dead engine of the server is started again")
def test_engine_hangs(trained: Path, tmp_path: Path, promise: Any) -> None:
    yaml = tmp_path / "serve.yaml"
    yaml.write_text(
        f"run: {tmp_path}\ntrained: {trained}/adapter\nport: 0\ntimeout_s: 5\n"
        "engine: {dtype: float32, max_num_seqs: 8, enforce_eager: true}\n",
        "utf-8",
    )
    with subprocess.Popen(
        [PANJUE, "serve", str(yaml)], stdout=subprocess.PIPE, text=True, bufsize=1
    ) as running:
        assert running.stdout is not None
        url = ""
        for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, None):
            with promise.attempt():
                line = until(running.stdout.readline)
                while not line.startswith("ready: "):
                    line = until(running.stdout.readline)
                url = line.split()[1] + "v1/judgments"
                assert httpx.post(url, json=CASE, timeout=LONGEST_S).status_code == 200
                if number:
                    engine_of(psutil.Process(running.pid)).send_signal(number)
                    asked = httpx.post(url, json=CASE, timeout=LONGEST_S)
                    assert asked.status_code in (500, 503), asked.text
        memory = psutil.Process(running.pid).memory_info().rss
        promise.tell(f"{memory / 2**20:.0f} MiB after three restarts")
        running.terminate()
        assert running.wait(60) == 0


@pytest.mark.promise("two engines answer as one")
def test_two_engines(
    llm: Engine, asker: Asker, merged: Path, workshop: Path, small: dict[str, Any], promise: Any
) -> None:
    """`engine.data_parallel_size`, for the GPUs of one machine, here with two engines on a CPU."""
    cases = list(load_task("judgment").read(workshop / "demo/test.jsonl"))
    one = {row["id"]: row for row in rows(llm, Calls(asker, iter(cases)), in_flight=32)}
    settings = {**small["engine"], "data_parallel_size": 2}
    with promise.attempt():
        with engine(Served(merged), settings, small["max_tokens"], seed=0) as both:
            two = {row["id"]: row for row in rows(both, Calls(asker, iter(cases)), in_flight=32)}
        ties = {key for key in one if one[key]["near_ties"] or two[key]["near_ties"]}
        differ = {key for key in one if one[key]["texts"] != two[key]["texts"]}
        assert one.keys() == two.keys()
        assert differ <= ties
        promise.tell(f"{len(one)} cases, {len(ties)} with a near tie, {len(differ)} differ")
