"""The server from start over death and restart to stop, and what it refuses to start with."""

import shutil
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import save_file

from panjue.prompts.plumbing.config import load_config
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.serve.app import arguments
from panjue.serve.lifecycle import error_line
from panjue.serve.server import bound_socket, serve
from panjue.serve.settings import ServeConfig
from panjue.serve.trained import Served


def test_the_first_error_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"

    def why(text: str, mark: int = 0) -> str:
        log.write_text(text, "utf-8")
        return error_line(log, mark)

    assert why("INFO fine\n\nit ended here\n") == ""
    told = "x\n(EngineCore pid=7) ValueError: first\nRuntimeError: second\n"
    assert why(told) == "ValueError: first"
    assert (
        why("ERROR 11-21 10:00:00 [core.py:7] ValueError: no memory\n") == "ValueError: no memory"
    )
    assert why("ValueError: of yesterday\nOSError: of today\n", 25) == "OSError: of today"


def config(**given: Any) -> ServeConfig:
    return ServeConfig.model_validate(given)


def test_a_port_in_use_is_said_before_anything_slow(trained: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}: is in use by another program"):
            serve(config(run=trained, port=port))
    with pytest.raises(UserError, match=r"203\.0\.113\.7:80"), bound_socket("203.0.113.7", 80):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "0.0.0.0"}, "set PANJUE_API_KEY to a secret"),
        ({"trained": "nowhere"}, "nothing trained is there"),
        ({"engine": {"model": "x"}}, "'model' is set by panjue; use trained"),
        ({"engine": {"api_key": "x"}}, "'api_key' is set by panjue"),
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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "nonsense"}, r"^engine: dtype"),
        ({"max_num_batched_tokens": 0}, r"^engine: max_num_batched_tokens: "),
        ({"enable_auto_tool_choice": True}, r"^engine: Error: --enable-auto-tool-choice requires"),
    ],
)
def test_a_wrong_value_of_vllms_is_named(
    trained: Path, tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    given = {"run": tmp_path, "trained": trained / "adapter", "port": 0, "engine": setting}
    with pytest.raises(UserError, match=message) as told:
        serve(config(**given))
    assert "\n" not in str(told.value)


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


def test_the_whole_from_start_over_a_dead_engine_to_drained_stop(
    panjue_serve: Callable[..., Any],
) -> None:
    server = panjue_serve()
    url = server.ready()
    children = server.tree.children(recursive=True)
    assert len(children) <= 3, "the engine, and what Python's multiprocessing starts beside it"
    names = [f"被告人{n}" for n in range(12)]  # several hundred tokens each
    body = {"fact": "被告人张某盗窃。", "defendants": names, "samples": 8}
    with ThreadPoolExecutor(8) as several:
        asked = [several.submit(post, f"{url}/v1/judgments", body) for _ in range(8)]
        until(lambda: "num_requests_running" in httpx.get(f"{url}/metrics", timeout=60).text)
        server.engine.kill()
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} <= {200, 500, 503}
    assert any(answer.status_code != 200 for answer in answers)
    assert all("judgments" in one.json() for one in answers if one.status_code == 200)
    assert post(f"{url}/v1/judgments", body).status_code == 503, "the port stays open"
    assert server.ready() == url
    assert post(f"{url}/v1/judgments", {"fact": "被告人张某盗窃。"}).status_code == 200

    body = {"fact": "被告人张某盗窃。", "samples": 8, "stream": True}
    with httpx.stream("POST", f"{url}/v1/judgments", json=body, timeout=60) as response:
        pieces = response.iter_text()
        next(pieces)
        children = server.tree.children(recursive=True)
        assert children
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)  # `make` and its like pass on what all got
        until(lambda: is_refused(f"{url}/health"))
        assert "event: result" in "".join(pieces), "what runs is finished"
    assert server.process.wait(60) == 0
    _gone, left = psutil.wait_procs(children, timeout=60)
    assert not left


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, timeout=120)


def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < 60
        time.sleep(0.02)


def test_nothing_outlives_a_server_that_is_killed(panjue_serve: Callable[..., Any]) -> None:
    """While its engine imports torch, say; `make torture` kills one that answers."""
    server = panjue_serve()
    until(lambda: len(server.tree.children()) > 1 and server.engine.memory_info().rss > 1e8)
    assert server.left_after_kill(timeout=60) == []


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
    adapter = {"r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}
    write_json(tmp_path / "adapter_config.json", adapter)
    save_file({}, tmp_path / "adapter_model.safetensors")
    model = Served(Path("base"), tmp_path)
    assert model.lora_rank == served
    args = arguments(config(run=tmp_path), model, 1024)
    assert (args.max_lora_rank, args.served_model_name) == (served, ["base"])
    assert [(one.name, one.path) for one in args.lora_modules] == [("panjue", str(tmp_path))]


def test_a_rank_beyond_vllms_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"r": 513})
    with pytest.raises(UserError, match="use adapter=merge"):
        _ = Served(Path("base"), tmp_path).lora_rank
