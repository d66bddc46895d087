"""What an OpenAI-compatible server does to those who ask it, and when they ask again."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.openai import MAX_BUSY_S
from panjue.prompts.tasks.dialogue.matching import make_matching
from panjue.prompts.tasks.dialogue.similarity import similarity

Fate = int | dict[str, Any] | None
"""A status, another reply, or a connection that is dropped."""


class Server(ThreadingHTTPServer):
    """Meets each request with the next of `fates`; answers when there are no more."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fates: list[Fate] = []
        self.paths: list[str] = []
        self.retry_after = "0.01"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        fate = self.server.fates.pop(0) if self.server.fates else reply(asked)
        if fate is None:
            return
        self.send_response(fate if isinstance(fate, int) else 200)
        self.send_header("Retry-After", self.server.retry_after)
        self.end_headers()
        self.wfile.write(json.dumps({} if isinstance(fate, int) else fate).encode())

    def log_message(self, *_: object) -> None:
        pass


def reply(asked: dict[str, Any]) -> dict[str, Any]:
    if "input" in asked:
        return {"data": [{"index": i, "embedding": [1.0]} for i in range(len(asked["input"]))]}
    return {"choices": [{"message": {"content": "是"}}]}


@pytest.fixture
def server(
    monkeypatch: pytest.MonkeyPatch, serving: Callable[[ThreadingHTTPServer], None]
) -> Server:
    monkeypatch.setattr("panjue.prompts.plumbing.openai.PAUSES_S", (0, 0, 0))
    serving(server := Server())
    return server


def judges(name: str) -> float:
    return float(make_matching(judge=name).judge("争吵", "吵架"))


def embeds(name: str) -> float:
    return float(similarity(name)(["争吵"], ["吵架"])[0, 0])


WAYS = pytest.mark.parametrize("ask", [judges, embeds])
Ask = Callable[[str], float]


@WAYS
@pytest.mark.parametrize("fates", [[None, 500, {}], [429, 503] * 5], ids=["failing", "busy"])
def test_who_fails_for_no_fault_of_the_request_is_asked_again(
    ask: Ask, fates: list[Fate], server: Server
) -> None:
    server.fates = [*fates]
    assert ask(f"{server.url}#m") == 1.0
    assert len(server.paths) == len(fates) + 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_a_server_broke_off_is_asked_again(reason: str, server: Server) -> None:
    half = {"message": {"content": "这两个名称是"}, "finish_reason": reason}
    server.fates = [{"choices": [half]}, {"choices": [{"message": {"content": "否"}}]}]
    assert judges(f"{server.url}#m") == 0.0
    assert len(server.paths) == 2


def test_a_judge_that_comes_to_no_end_is_named(server: Server) -> None:
    half = {"message": {"content": "这两个名称是"}, "finish_reason": "length"}
    server.fates = [{"choices": [half]}]
    with pytest.raises(UserError, match="judge m: reply cut off at 1024 tokens"):
        judges(f"{server.url}#m")


@pytest.mark.parametrize("when", ["nan", "-1", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_who_is_busy_is_waited_for_whatever_it_says_of_when(when: str, server: Server) -> None:
    server.fates, server.retry_after = [503], when
    assert judges(f"{server.url}#m") == 1.0


@WAYS
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_what_another_try_would_meet_again_is_told_at_once(
    ask: Ask, status: int, server: Server
) -> None:
    server.fates = [status]
    with pytest.raises(UserError, match=rf"^http://\S+: {status} [^\n]*$") as error:
        ask(f"{server.url}#m")
    assert ("_KEY right?" in str(error.value)) == (status in {401, 403})
    assert len(server.paths) == 1


@WAYS
@pytest.mark.parametrize(
    ("fate", "told"),
    [
        (None, "disconnected"),
        (502, "502 Bad Gateway"),
        ({"error": "at a 200"}, "its reply is not in OpenAI's format"),
    ],
)
def test_who_fails_again_and_again_is_named(
    ask: Ask, fate: Fate, told: str, server: Server
) -> None:
    server.fates = [fate] * 10
    with pytest.raises(UserError, match=rf"^http://\S+: [^\n]*{told}[^\n]*$"):
        ask(f"{server.url}#m")
    assert len(server.paths) == 1 + 3


@WAYS
def test_who_is_busy_for_ever_is_named(
    ask: Ask, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=count(0, MAX_BUSY_S / 8).__next__, sleep=lambda _: None)
    monkeypatch.setattr("panjue.prompts.plumbing.openai.time", clock)
    server.fates = [503] * 1000
    with pytest.raises(UserError, match="503 Service Unavailable"):
        ask(f"{server.url}#m")
    assert len(server.paths) > 1 + 3


@WAYS
def test_a_slash_that_ends_an_address_is_not_doubled(ask: Ask, server: Server) -> None:
    assert ask(f"{server.url}/#m") == 1.0
    assert server.paths[0] in {"/v1/chat/completions", "/v1/embeddings"}


@WAYS
@pytest.mark.parametrize(
    "place", ["127.0.0.1:port", "xn--a", f"{'a' * 70}.b", "h/\udcff", "", ":80"]
)
def test_an_address_that_none_can_be_is_named(ask: Ask, place: str) -> None:
    with pytest.raises(UserError, match=r"^\w+: 'http://[^\n]* URL#MODEL$"):
        ask(f"http://{place}#m")


@WAYS
@pytest.mark.parametrize("key", ["密钥", "a\nb", "a\x7f"])
def test_what_is_no_key_is_refused_and_not_shown(
    ask: Ask, key: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PANJUE_JUDGE_KEY", "PANJUE_EMBEDDINGS_KEY"):
        monkeypatch.setenv(variable, key)
    with pytest.raises(UserError, match=r"^PANJUE_\w+_KEY: must be of printable ASCII .*$") as told:
        ask(f"{server.url}#m")
    assert key not in str(told.value)
    assert not server.paths
