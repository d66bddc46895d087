"""Start, death, restart and stop: of the supervisor with a stand-in engine, and of the whole."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from panjue.prompts.config import load_config
from panjue.prompts.errors import UserError
from panjue.prompts.files import read_json, write_json
from panjue.serve import backend
from panjue.serve import supervisor as supervising
from panjue.serve.backend import Backend
from panjue.serve.server import bound, serve
from panjue.serve.settings import ServeConfig
from panjue.serve.supervisor import Supervisor, complaint, flags
from panjue.serve.trained import Served

PANJUE = Path(sys.executable).with_name("panjue")

HEALTHY = """
import http.server, os, socketserver, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
    def address_string(self): return ""
print("pid", os.getpid(), "key", os.environ["VLLM_API_KEY"], flush=True)
if os.path.exists(sys.argv[1]): os.unlink(sys.argv[1])
socketserver.UnixStreamServer(sys.argv[1], Health).serve_forever()
"""


def stand_in(code: str, log: Path) -> Supervisor:
    place = log.with_name("engine")
    command = [sys.executable, "-c", code, str(place)]
    return Supervisor(command, log, Backend(place, 5))


async def run_out(engine: Supervisor) -> None:
    """Run an engine that ends by itself."""
    try:
        await engine.run(print, print)
    finally:
        await engine.backend.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.05)


def pids(log: Path) -> list[int]:
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("pid ")]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_dead_engine_is_started_again_and_none_is_left_behind(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    engine = stand_in(HEALTHY, log)
    came_up: list[str] = []
    said: list[str] = []

    async def story() -> None:
        running = asyncio.create_task(engine.run(came_up.append, said.append))
        for life in range(2):
            await until(lambda: engine.ready)
            assert engine.restarts == life
            assert len(pids(log)) == life + 1
            os.kill(pids(log)[-1], signal.SIGKILL)
            await until(lambda: not engine.ready)
        await until(lambda: engine.ready)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.backend.close()

    asyncio.run(story())
    assert len(came_up) == 3, "said each time"
    assert [line.split(";")[1] for line in said] == [
        " starting it again in 1 s",
        " starting it again in 2 s",
    ]
    assert not any(map(is_alive, pids(log)))


def test_an_engine_that_hangs_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "WATCH_S", 0.1)
    monkeypatch.setattr(supervising, "STOP_S", 0.5)
    monkeypatch.setattr(backend, "HEALTH_S", 0.3)
    log = tmp_path / "engine.log"
    engine = stand_in(HEALTHY, log)

    async def story() -> None:
        running = asyncio.create_task(engine.run(print, print))
        await until(lambda: engine.ready)
        os.kill(pids(log)[0], signal.SIGSTOP)
        await until(lambda: len(pids(log)) == 2 and engine.ready)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.backend.close()

    asyncio.run(story())
    assert not any(map(is_alive, pids(log)))


def test_an_engine_that_never_starts_says_why(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    code = (
        "import sys; print('ERROR 11-21 10:00:00 [core.py:7] ValueError: no memory'); sys.exit(1)"
    )
    engine = stand_in(code, log)

    with pytest.raises(UserError, match=r"^engine: ValueError: no memory \(all of it: "):
        asyncio.run(run_out(engine))


def test_the_first_error_is_the_cause() -> None:
    assert complaint("INFO fine\n\nit ended here\n") == "it ended here"
    told = "x\n(EngineCore pid=7) ValueError: first\nRuntimeError: second\n"
    assert complaint(told) == "ValueError: first"
    assert complaint("") == "it said nothing"


def test_an_error_of_an_earlier_start_is_not_told_again(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("ValueError: of yesterday\n", "utf-8")
    engine = stand_in("print('OSError: of today'); raise SystemExit(1)", log)

    with pytest.raises(UserError, match=r"^engine: OSError: of today"):
        asyncio.run(run_out(engine))


def test_settings_become_words_of_a_command_line() -> None:
    given = {"max_num_seqs": 4, "enforce_eager": True, "enable_prefix_caching": False, "x": None}
    assert flags({**given, "a_b": {"c": "罪"}}) == [
        *("--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--a-b", '{"c": "\\u7f6a"}'),
    ]


def config(**given: Any) -> ServeConfig:
    return ServeConfig.model_validate(given)


def test_a_port_in_use_is_said_before_anything_slow(trained: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}: is in use by another program"):
            serve(config(run=trained, port=port))
    with pytest.raises(UserError, match=r"203\.0\.113\.7:80"), bound("203.0.113.7", 80):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "0.0.0.0"}, "set PANJUE_API_KEY to a secret"),
        ({"trained": "nowhere"}, "nothing trained is there"),
        ({"engine": {"model": "x"}}, "'model' is panjue's to set; use trained"),
        ({"engine": {"api_key": "x"}}, "'api_key' is panjue's to set"),
        ({"engine": {"trust-remote-code": True}}, "no setting 'trust-remote-code'"),
        ({"engine": {"trust_remote_cod": True}}, "no setting 'trust_remote_cod'"),
        ({"engine": {"dtyp": "float32"}}, "engine: no setting 'dtyp'; did you mean 'dtype'"),
        ({"task": "nothing"}, "no task 'nothing'"),
        ({"law": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_wrong_settings_end_in_one_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("PANJUE_API_KEY", raising=False)
    with pytest.raises(UserError, match=message):
        serve(config(**{"run": trained, "port": 0, **given}))


def test_an_adapter_of_another_base_is_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    place = tmp_path / "adapter/manifest.json"
    write_json(place, {**read_json(place), "base_sha256": "another"})
    with pytest.raises(UserError, match="was trained on another base"):
        serve(config(run=tmp_path, port=0))


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "serve/configs").glob("*.yaml"))
)
def test_every_config_in_the_tree_serves_as_well(path: Path) -> None:
    assert load_config(ServeConfig, path).host == "127.0.0.1"


def test_the_whole_from_start_to_drained_stop(trained: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "serve.yaml"
    yaml.write_text(
        f"run: {tmp_path}\ntrained: {trained}/adapter\nport: 0\n"
        "engine: {dtype: float32, max_num_seqs: 8, enforce_eager: true}\n",
        "utf-8",
    )
    with subprocess.Popen(
        [PANJUE, "serve", str(yaml)], stdout=subprocess.PIPE, text=True, bufsize=1
    ) as running:
        assert running.stdout is not None
        line = ""
        while not line.startswith("ready: "):
            line = running.stdout.readline()
            assert line, "it ended"
            assert line.startswith(("ready: ", "preparing the model", "starting the engine"))
        url = line.split()[1].rstrip("/")
        body = {"fact": "被告人张某盗窃。", "samples": 8, "stream": True}
        with httpx.stream("POST", f"{url}/v1/judgments", json=body, timeout=60) as response:
            pieces = response.iter_text()
            next(pieces)
            children = psutil.Process(running.pid).children(recursive=True)
            running.send_signal(signal.SIGTERM)
            running.send_signal(signal.SIGTERM)  # `make` and its like pass on what all got
            began = time.monotonic()
            while not is_refused(f"{url}/healthz"):
                assert time.monotonic() - began < 60
            assert "event: result" in "".join(pieces), "what runs is finished"
        assert running.wait(60) == 0
    assert children
    _gone, left = psutil.wait_procs(children, timeout=60)
    assert not left


def is_refused(url: str) -> bool:
    try:
        httpx.get(url, timeout=60)
    except httpx.TransportError as error:
        return isinstance(error, httpx.ConnectError)
    return False


@pytest.mark.parametrize(("rank", "served"), [(1, 8), (8, 8), (12, 16), (512, 512)])
def test_an_adapter_is_served_under_a_rank_that_vllm_has(
    tmp_path: Path, rank: int, served: int
) -> None:
    write_json(tmp_path / "adapter_config.json", {"r": rank})
    model = Served(Path("base"), tmp_path)
    assert model.lora_rank == served
    client = Backend(tmp_path / "engine", 5)
    engine = supervising.supervisor(model, {}, 1024, 0, tmp_path / "log", client)
    words = " ".join(engine._command)
    assert f"--max-lora-rank {served} --lora-modules panjue={tmp_path}" in words
    assert "--served-model-name base" in words
    assert client.key not in words, "the key is in the environment, which others cannot read"


def test_a_rank_beyond_vllms_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"r": 513})
    with pytest.raises(UserError, match="use adapter=merge"):
        _ = Served(Path("base"), tmp_path).lora_rank
