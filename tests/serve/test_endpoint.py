"""Any OpenAI-compatible endpoint: a server that does as it is told, and all that goes wrong."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest

from panjue.prompts.example import Example, call_key
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines, sha256
from panjue.prompts.task import load_task, task_folders
from panjue.serve.endpoint import KEY, Endpoint, PlainAsker
from panjue.serve.rows import Calls, rows

TASK = load_task("dialogue")
SAMPLE = task_folders()["dialogue"] / "sample.folder"
PANJUE = str(Path(sys.executable).with_name("panjue"))
LONGEST_S = 400


Panjue = Callable[..., subprocess.CompletedProcess[str]]
Behave = Callable[[dict[str, Any]], tuple[int, dict[str, str], Any] | None]


def instance(schema: dict[str, Any]) -> Any:
    """Return a value that a schema allows."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: instance(of) for name, of in schema["properties"].items()}
    if schema["type"] == "array":
        return [instance(of) for of in schema.get("prefixItems", [])]
    return "某"


class Server(ThreadingHTTPServer):
    """Answers chat completions; `behave` may answer (status, headers, body) in their place."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave: Behave = lambda _: None
        self.asked: list[dict[str, Any]] = []

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that hang up."""

    @property
    def name(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1#m"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        found = 200 if self.path == "/v1/chat/completions" else 404
        status, headers, content = self.server.behave(body) or (found, {}, said(body))
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(json.dumps(content, ensure_ascii=False).encode())

    def log_message(self, *_: object) -> None:
        pass


def said(body: dict[str, Any]) -> dict[str, Any]:
    form = body.get("response_format")
    text = json.dumps(instance(form["json_schema"]["schema"])) if form else "无"
    choices = [{"message": {"content": text}, "finish_reason": "stop"}] * body.get("n", 1)
    return {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


@pytest.fixture
def server(serving: Callable[[ThreadingHTTPServer], None]) -> Server:
    serving(server := Server())
    return server


def dialogue(turns: int) -> Example:
    chat = [{"Holder": "甲乙"[i % 2], "sentence": f"第{i}句。"} for i in range(1, turns + 1)]
    return TASK.data.read({"id": "1", "chat": chat})


def ask(
    server: Server,
    turns: int = 6,
    in_flight: int = 8,
    check: Callable[[], None] = lambda: None,
    sampling: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    asker = PlainAsker(TASK, Labels(), 0, constrained=True)
    calls = Calls(asker, iter([dialogue(turns)]), [sampling or {}])
    made: list[dict[str, Any]] = []
    with closing(Endpoint(server.name, sampling)) as endpoint:
        for row in rows(endpoint, calls, in_flight, check=check):
            made.append(row)
            server.made = made  # type: ignore[attr-defined]  # what was there when it failed
    return made


def test_it_is_asked_as_openai_is(server: Server) -> None:
    made = ask(server, sampling={"top_p": 0.5, "stop": ["。"], "max_tokens": 9})
    assert len(made) == len(server.asked) == 1 + 6 + 1
    first = server.asked[0]
    assert {key: first[key] for key in ("model", "temperature", "top_p", "stop", "max_tokens")} == {
        "model": "m", "temperature": 0.0, "top_p": 0.5, "stop": ["。"], "max_tokens": 9,
    }  # fmt: skip
    assert "第1句" in first["messages"][0]["content"]
    assert first["response_format"]["json_schema"]["strict"] is True
    assert all((row["prompt_tokens"], row["completion_tokens"]) == (7, 3) for row in made)
    with pytest.raises(UserError, match="sampling: no setting 'top_k'"):
        Endpoint(server.name, {"top_k": 3})


def test_what_it_refuses_costs_its_call_only(server: Server) -> None:
    def behave(body: dict[str, Any]) -> Any:
        return (400, {}, "too long") if "第3句" in body["messages"][0]["content"][-20:] else None

    server.behave = behave
    made = ask(server)
    assert [row["question"] for row in made if "refused" in row] == ["1/sextuple 3"]
    assert made[0].keys() >= {"texts", "finish"}


def test_an_endpoint_that_refuses_all_is_named_and_nothing_is_kept(server: Server) -> None:
    server.behave = lambda _: (400, {}, "unknown field: response_format")
    with pytest.raises(UserError, match=r"400: .*response_format.*constrained=false"):
        ask(server)
    assert not hasattr(server, "made")


def test_what_is_answered_is_kept_where_one_fails(server: Server) -> None:
    failed = threading.Event()

    def behave(body: dict[str, Any]) -> Any:
        content = body["messages"][0]["content"]
        if "这句话" not in content:
            return None
        if "第2句" in content[-20:]:
            failed.set()
            return 404, {}, "gone"
        failed.wait(LONGEST_S)
        return None

    server.behave = behave
    with pytest.raises(UserError, match=r"404 Not Found \(gone\); finished rows are kept"):
        ask(server)
    kept = {row["question"] for row in server.made}  # type: ignore[attr-defined]
    assert kept == {"1/window 0", *(f"1/sextuple {n}" for n in (1, 3, 4, 5, 6))}


def test_a_stop_waits_for_nobody(server: Server) -> None:
    release, asked = threading.Event(), threading.Event()

    def behave(_: dict[str, Any]) -> Any:
        asked.set()
        release.wait(LONGEST_S)  # longer than anybody would wait
        return 500, {}, "late"

    def check() -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    server.behave = behave
    with pytest.raises(KeyboardInterrupt):
        ask(server, check=check)
    assert not release.is_set()
    release.set()


def test_as_many_are_in_flight_as_is_said(server: Server) -> None:
    together = threading.Barrier(150)

    def behave(body: dict[str, Any]) -> Any:
        if "这句话" in body["messages"][0]["content"]:
            together.wait(LONGEST_S)  # breaks where fewer come
        return None

    server.behave = behave
    assert len(ask(server, turns=150, in_flight=200)) > 150


def test_a_slash_that_ends_its_address_is_not_doubled(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "name", server.name.replace("#", "/#"))
    assert len(ask(server)) == 8


def test_a_busy_endpoint_is_waited_for(server: Server) -> None:
    times = iter(range(100))
    server.behave = lambda _: (503, {"Retry-After": "0.1"}, "busy") if next(times) < 6 else None
    assert len(ask(server)) == 8


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_it_broke_off_is_asked_again(
    reason: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panjue.prompts.plumbing.openai.PAUSES_S", (0,))
    times = iter(range(100))
    ended = {"choices": [{"message": {"content": ""}, "finish_reason": reason}]}
    server.behave = lambda _: (200, {}, ended) if next(times) == 2 else None
    made = ask(server)
    assert len(made) == 8
    assert all(row["finish"] == ["stop"] for row in made)


@pytest.mark.parametrize("reply", [[], {"choices": []}, {"choices": [{}]}, {"choices": "no"}, 3])
def test_a_reply_in_no_form_ends_the_run(
    reply: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panjue.prompts.plumbing.openai.PAUSES_S", (0,))
    server.behave = lambda _: (200, {}, reply)
    with pytest.raises(UserError, match="run the same command to resume"):
        ask(server)


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1:9",
        "http://x/v1",
        "http://[::1/v1#m",
        "http://x:port#m",
        "http://xn--a#m",
        "#m",
        "",
    ],
)
def test_what_is_no_endpoint_is_named(name: str) -> None:
    with pytest.raises(UserError, match="is not URL#MODEL"):
        Endpoint(name)


def test_what_is_no_key_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "密钥")
    with pytest.raises(UserError, match=f"^{KEY}: must be of printable ASCII characters"):
        Endpoint(server.name)


def config_of(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "empty.yaml").write_text(f"task: dialogue\nrun: {folder}/run\n", "utf-8")
    return folder / "empty.yaml"


def command(server: Server, folder: Path, *words: str) -> list[str]:
    start = ["generate", str(config_of(folder)), f"test={SAMPLE}"]
    return [*start, f"endpoint={server.name}", "solve.window=2", "solve.step=1", *words]


def test_a_run_that_is_killed_goes_on_within_a_dialogue(
    server: Server, tmp_path: Path, panjue: Panjue
) -> None:
    whole = panjue(*command(server, tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert "2 examples in 16 calls: 16 first replies valid as they came" in whole.stdout
    asked = len(server.asked)
    assert asked == 16

    killed, times = threading.Event(), count()

    def behave(_: dict[str, Any]) -> None:
        if next(times) >= 4:
            killed.wait(LONGEST_S)

    server.behave = behave
    words = command(server, tmp_path / "killed", "in_flight=1")
    completions = tmp_path / f"killed/run/answers/{SAMPLE.stem}/completions.jsonl"
    with subprocess.Popen([PANJUE, *words], stdout=DEVNULL, stderr=DEVNULL) as running:
        began = time.monotonic()
        while not completions.exists() or completions.read_bytes().count(b"\n") < 3:
            assert time.monotonic() - began < LONGEST_S
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    killed.set()
    kept = completions.read_bytes()
    assert 3 <= kept.count(b"\n") < 16
    server.behave = lambda _: None
    again = panjue(*words)
    assert again.returncode == 0, again.stderr
    assert "continuing: 0 of 2 are answered already" in again.stdout
    made = completions.read_bytes()
    assert made.startswith(kept[: kept.rfind(b"\n") + 1])
    keys = [call_key(row) for _, row in read_lines(completions)]
    assert len(keys) == len(set(keys)) == 16
    answers = f"run/answers/{SAMPLE.stem}/submission"
    assert sha256(tmp_path / "killed" / answers) == sha256(tmp_path / "whole" / answers)
    assert "all 2 are answered already" in panjue(*words).stdout
    other = panjue(*words, "solve.bucket=false")
    assert other.returncode == 2
    assert "has answers made with other settings (solve.bucket:" in other.stderr


def test_a_run_that_is_stopped_ends_before_its_replies_come(server: Server, tmp_path: Path) -> None:
    asked, release = threading.Event(), threading.Event()

    def behave(_: dict[str, Any]) -> None:
        asked.set()
        release.wait(4 * LONGEST_S)

    server.behave = behave
    words = [PANJUE, *command(server, tmp_path)]
    with subprocess.Popen(words, stdout=DEVNULL, stderr=subprocess.PIPE) as running:
        assert asked.wait(LONGEST_S)
        running.send_signal(signal.SIGTERM)
        _, told = running.communicate(timeout=LONGEST_S)
    release.set()
    assert running.returncode == 128 + signal.SIGTERM
    assert told.decode().endswith("run the same command to resume\n")


def test_a_task_with_labels_needs_a_training(
    server: Server, tmp_path: Path, panjue: Panjue
) -> None:
    cases = tmp_path / "cases.jsonl"
    cases.write_text('{"id": 1, "fact": "被告人甲盗窃。", "defendants": ["甲"]}\n', "utf-8")
    words = ["generate", config_of(tmp_path), f"test={cases}", "task=judgment"]
    done = panjue(*words, f"endpoint={server.name}")
    assert done.returncode == 2
    assert "'judgment' has labels, which training collects; set trained=FOLDER" in done.stderr
