"""The server from start to stop, the death of its engine, and what it refuses to start with."""

import gc
import math
import os
import shutil
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from panjue.prompts.model import TINY_THREADS
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.serve.merge import KNOWN_TEXT, Served
from panjue.serve.server import free_port, serve
from panjue.serve.settings import serve_settings
from tests.finetune.conftest import UNEVALUATED, main
from tests.serve.conftest import LONG_CASE
from tests.served import PanjueServe, left_of, until


def start(run: Path, word: str) -> None:
    serve(*serve_settings(run, ["port=0", "answer=model", word]))


def test_a_port_in_use_is_said_before_anything_slow(trained: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f":{port}: Address already in use.*; set another host=… or port=…"
        with pytest.raises(UserError, match=said):
            start(trained, f"port={port}")
    with pytest.raises(UserError, match=r"203\.0\.113\.7:80"):
        free_port("203.0.113.7", 80)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("host=0.0.0.0", "set PANJUE_API_KEY to a secret"),
        ("engine.model=x", "'model' is set by panjue"),
        ("engine.middleware=[x]", "no setting 'middleware'"),
        ("engine.trust-remote-code=true", "no setting 'trust-remote-code'"),
        ("engine.max_num_batched_tokens=0", "^engine: max_num_batched_tokens: "),
        ("engine.enable_auto_tool_choice=true", "^engine: Error: --enable-auto-tool-choice"),
        ("other=nowhere", "no setting 'other'"),
        ("verbose", "no run folder '', and no setting 'verbose'"),
    ],
)
def test_wrong_settings_end_in_one_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.delenv("PANJUE_API_KEY", raising=False)
    with pytest.raises(UserError, match=message) as error:
        start(trained, word)
    assert "\n" not in str(error.value)
    # vLLM leaves its socket open when the engine does not start; here the process lives on.
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        error.value.__traceback__ = None
        gc.collect()


def copied(trained: Path, folder: Path, **changed: Any) -> Path:
    """Return a copy of a run with another record."""
    shutil.copytree(trained / "adapter", folder / "adapter")
    place = folder / "adapter/manifest.json"
    write_json(place, {**read_json(place), **changed})
    return folder


def test_an_adapter_of_another_base_is_refused(trained: Path, tmp_path: Path) -> None:
    files = {"config.json": "another"}
    other = copied(trained, tmp_path / "other", base_sha256="another", base_files=files)
    with pytest.raises(UserError, match=r"another base than .* config.json differs, "):
        start(other, "port=0")
    with pytest.raises(UserError, match=f"^{other}: has another base than"):
        start(trained, f"other={other}")


@pytest.fixture(scope="module")
def other(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another training of the same base."""
    run = copied(trained, tmp_path_factory.mktemp("several") / "other")
    path = run / "adapter/adapter_model.safetensors"
    weights = load_file(path)
    changed = {name: -10 * value for name, value in weights.items() if "lora_B" in name}
    save_file({**weights, **changed}, path)
    return run


@pytest.fixture(scope="module")
def several(trained: Path, other: Path) -> Iterator[PanjueServe]:
    """Return a server of two trainings of one base, to whose threads nobody has said anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS")
        started = PanjueServe(trained, "answer=model", f"other={other}")
    try:
        started.ready()
        yield started
    finally:
        started.end()


def judge(server: PanjueServe, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/judgments", json=body, timeout=120)


def next_tokens(client: httpx.Client, **model: str) -> dict[str, float]:
    """Return token -> log-probability, of the 20 likeliest tokens after a known text."""
    body = {
        "prompt": KNOWN_TEXT,
        "max_tokens": 1,
        "logprobs": 20,
        "return_tokens_as_token_ids": True,
    }
    answer = client.post("/v1/completions", json={**body, **model}).raise_for_status().json()
    [found] = answer["choices"][0]["logprobs"]["top_logprobs"]
    return dict(found)


def apart(one: dict[str, float], other: dict[str, float]) -> float:
    """Return the largest difference of the log-probabilities of the tokens that both have."""
    common = one.keys() & other.keys()
    return max((abs(one[token] - other[token]) for token in common), default=math.inf)


def test_two_trainings_of_one_base_answer_as_each_does_alone(
    several: PanjueServe, other: Path, http: httpx.Client
) -> None:
    cards = httpx.get(f"{several.url}/v1/models").json()["data"]
    names = [(card["id"], card["root"], card["parent"]) for card in cards]
    assert names == [("panjue", "panjue", None), ("other", "other", None)], "no paths, no base"
    with httpx.Client(base_url=several.url, timeout=120) as client:
        first = next_tokens(client)
        assert apart(first, next_tokens(http)) < 1e-3, "merged or not"
        assert apart(first, next_tokens(client, model="panjue")) < 1e-3
        assert apart(first, next_tokens(client, model="other")) > 0.1
    for model in ("panjue", "other"):
        told = judge(several, {**LONG_CASE, "model": model}).json()
        assert [one["name"] for one in told["judgments"]] == LONG_CASE["defendants"]
    refused = judge(several, {**LONG_CASE, "model": "base"})
    assert refused.status_code == 404
    assert "only 'panjue', 'other'" in refused.json()["error"]["message"]
    labels = httpx.get(f"{several.url}/v1/labels?model=other").json()
    assert labels["labels"] == read_json(other / "adapter/labels.json")["counts"]


def test_the_engine_of_a_tiny_model_has_two_threads_at_most(several: PanjueServe) -> None:
    """The engine's own environment cannot be read: its title stands there. Others tell of it."""
    started = several.tree.children(recursive=True)
    threads = min(TINY_THREADS, len(os.sched_getaffinity(0)))
    assert str(threads) in {process.environ().get("OMP_NUM_THREADS") for process in started}


def test_a_server_whose_engine_dies_ends_with_an_error(several: PanjueServe) -> None:
    children = several.tree.children(recursive=True)
    assert len(children) <= 3, "the engine, and what Python's multiprocessing starts beside it"
    metrics = f"{several.url}/metrics"
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(judge, several, LONG_CASE) for _ in range(8)]
        until(lambda: "num_requests_running" in httpx.get(metrics, timeout=60).text)
        several.engine.kill()
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} <= {200, 500, 503}
    good = [answer.json() for answer in answers if answer.is_success]
    assert len(good) < len(answers)
    assert all("judgments" in answer for answer in good)
    assert several.process.wait(180) == 2
    assert left_of(children) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_engine_answers_ends_the_server(
    number: signal.Signals, panjue_serve: Callable[..., PanjueServe]
) -> None:
    """In vLLM's own start it is lost, and the server waits ten minutes for an engine."""
    server = panjue_serve()
    until(lambda: len(server.tree.children()) > 1 and server.engine.memory_info().rss > 1e8, 300)
    children = server.tree.children(recursive=True)
    server.process.send_signal(number)
    assert server.process.wait(60) == 128 + number
    assert left_of(children) == []


def test_nothing_outlives_a_server_that_is_killed(panjue_serve: Callable[..., PanjueServe]) -> None:
    """While its engine imports torch, say; `make torture` kills one that answers."""
    server = panjue_serve()
    until(lambda: len(server.tree.children()) > 1 and server.engine.memory_info().rss > 1e8)
    children = server.tree.children(recursive=True)
    server.process.kill()
    assert left_of(children) == []


def test_a_base_that_must_think_is_served(workshop: Path, tmp_path: Path) -> None:
    base = shutil.copytree(workshop / "base/model", tmp_path / "base")
    template = base / "chat_template.jinja"
    refusal = "{{ raise_exception('This model always thinks.') }}"
    refuses = f"{{% if enable_thinking is defined and not enable_thinking %}}{refusal}{{% endif %}}"
    template.write_text(refuses + template.read_text("utf-8"), "utf-8")
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", f"model={base}", *UNEVALUATED])
    server = PanjueServe(tmp_path / "run", "answer=model")
    try:
        server.ready()
        asked = {"model": "panjue", "messages": [{"role": "user", "content": "甲"}]}
        with server.client() as client:
            done = client.post("/v1/chat/completions", json={**asked, "max_tokens": 3})
        assert done.status_code == 200, done.text
    finally:
        server.end()


def test_a_rank_beyond_vllms_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"r": 513})
    with pytest.raises(UserError, match="use adapter=merge"):
        _ = Served(Path("base"), tmp_path).lora_rank
