"""Requests to OpenAI-compatible endpoints: retries, errors in one line, addresses and keys."""

import json
import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from panjue.prompts.plumbing.endpoint import RETRIES
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.tasks.dialogue.similarity import NGRAMS, make_matching, similarity, table

Fate = int | dict[str, Any] | None
"""A status, another reply, or a connection that is dropped."""


class Server(ThreadingHTTPServer):
    """Meets each request with the next of `fates`; answers when there are no more."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fates: list[Fate] = []
        self.paths: list[str] = []
        self.embedded: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        self.server.embedded += asked.get("input", ())
        fate = self.server.fates.pop(0) if self.server.fates else reply(asked)
        if fate is None:
            return
        self.send_response(fate if isinstance(fate, int) else 200)
        self.send_header("Retry-After", "0.01")
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({} if isinstance(fate, int) else fate).encode())

    def log_message(self, *_: object) -> None:
        pass


def reply(asked: dict[str, Any]) -> dict[str, Any]:
    """Embed a text as how often it has a, b and c, the last text first; or say yes."""
    if "input" in asked:
        vectors = [[text.count(letter) for letter in "abc"] for text in asked["input"]]
        return {"data": [{"index": i, "embedding": v} for i, v in enumerate(vectors)][::-1]}
    return {"choices": [{"message": {"content": "是"}}]}


@pytest.fixture
def server(serving: Callable[[ThreadingHTTPServer], None]) -> Server:
    serving(server := Server())
    return server


def judges(name: str) -> float:
    return float(make_matching(NGRAMS, name).judge("争吵", "吵架"))


def embeds(name: str) -> float:
    return float(similarity(name)(["ab"], ["ba"])[0])


WAYS = pytest.mark.parametrize("ask", [judges, embeds])
Ask = Callable[[str], float]


@WAYS
def test_a_server_that_is_busy_or_fails_is_asked_again(ask: Ask, server: Server) -> None:
    server.fates = [500, 429, 503, None]
    assert ask(f"{server.url}#m") == pytest.approx(1.0)
    assert len(server.paths) == 5


def test_each_text_is_embedded_once_and_an_empty_one_never(server: Server) -> None:
    for _ in range(2):
        cosines = table(similarity(f"{server.url}#m"), ["aab", ""], ["a", "c", "baa", "aab"])
        assert np.allclose(cosines, [[2 / np.sqrt(5), 0.0, 1.0, 1.0], [0.0] * 4])
        assert server.embedded == ["aab", "a", "c", "baa"]


def test_a_judge_whose_reply_is_cut_is_named(server: Server) -> None:
    half = {"message": {"content": "这两个名称是"}, "finish_reason": "length"}
    server.fates = [{"choices": [half]}]
    with pytest.raises(UserError, match="judge m: reply cut off at 1024 tokens"):
        judges(f"{server.url}#m")


@WAYS
@pytest.mark.parametrize(
    ("fate", "message", "requests"),
    [
        *((status, str(status), 1) for status in (400, 401, 403, 404, 422)),
        (502, "502", RETRIES + 1),
        ({"error": "at a 200"}, "is not in OpenAI's format", 1),
    ],
)
def test_an_endpoint_that_fails_is_one_line_and_asked_again_only_where_that_may_help(
    ask: Ask, fate: Fate, message: str, requests: int, server: Server
) -> None:
    server.fates = [fate] * 10
    with pytest.raises(UserError, match=rf"^http://\S+: [^\n]*{message}[^\n]*$") as error:
        ask(f"{server.url}#m")
    assert ("_KEY right?" in str(error.value)) == (fate in (401, 403))
    assert len(server.paths) == requests


@WAYS
def test_a_slash_at_the_end_of_an_address_is_not_doubled(ask: Ask, server: Server) -> None:
    assert ask(f"{server.url}/#m") == pytest.approx(1.0)
    assert server.paths[0] in {"/v1/chat/completions", "/v1/embeddings"}


@WAYS
@pytest.mark.parametrize(
    "place", ["127.0.0.1:port", "xn--a", f"{'a' * 70}.b", "h/\udcff", "", ":80"]
)
def test_an_invalid_address_is_named(ask: Ask, place: str) -> None:
    with pytest.raises(UserError, match=r"^\w+: 'http://[^\n]* URL#MODEL$"):
        ask(f"http://{place}#m")


@WAYS
@pytest.mark.parametrize("key", ["密钥", "a\nb", "a\x7f"])
def test_an_invalid_key_is_refused_and_not_shown(
    ask: Ask, key: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PANJUE_JUDGE_KEY", "PANJUE_EMBEDDINGS_KEY"):
        monkeypatch.setenv(variable, key)
    with pytest.raises(UserError, match="KEY: must be of printable ASCII") as error:
        ask(f"{server.url}#m")
    assert key not in str(error.value)
    assert not server.paths


@WAYS
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1080"),
        ("http_proxy", "socks://a:secret@127.0.0.1:1080"),
        ("HTTPS_PROXY", "http://127.0.0.1:port"),
        ("SSL_CERT_FILE", "/nonexistent.pem"),
    ],
)
def test_a_variable_that_no_client_can_be_made_with_is_named(
    ask: Ask, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=rf"^{variable}: [^\n]+$") as error:
        ask("https://example.invalid/v1#m")
    assert "secret" not in str(error.value)


@WAYS
@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_this_machine_is_asked_without_a_proxy(
    ask: Ask, variable: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(variable, "example.invalid")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert ask(f"{server.url}#m") == pytest.approx(1.0)
    assert ask(f"{server.url.replace('127.0.0.1', 'localhost')}#m") == pytest.approx(1.0)
    assert os.environ["no_proxy"].startswith("example.invalid,")
