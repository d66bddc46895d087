"""What a request meets before vLLM: who may ask, for what, how much, and in what form."""

import asyncio
import json
import socket
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from panjue.prompts.plumbing.errors import UserError
from panjue.serve import checks, middleware
from panjue.serve.checks import LARGEST_BODY
from panjue.serve.middleware import GENERATE, METHODS, SECURITY, Panjue, Setup
from panjue.serve.settings import ServeConfig
from tests.serve.conftest import Running, until

FACT = "经审理查明：被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。被告人张某甲系主犯。"
CASE = {"fact": FACT, "defendants": ["张某甲", "李某乙"]}
SAY = [{"role": "user", "content": "你好"}]
POSTED = [path for path, methods in METHODS.items() if "POST" in methods]
BOTH = pytest.mark.parametrize("path", ["/v1/judgments", "/v1/chat/completions"])


@dataclass
class Inside:
    """The middleware around another app than vLLM's, asked without a socket between."""

    panjue: Panjue
    setup: Setup

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        engine = SimpleNamespace(errored=False, tokenizer=None)
        engine.model_config = SimpleNamespace(max_model_len=3072)
        models = SimpleNamespace(lora_requests={})
        args = Namespace(panjue=self.setup)
        state = SimpleNamespace(engine_client=engine, openai_serving_models=models, args=args)
        await self.panjue({**scope, "app": SimpleNamespace(state=state)}, receive, send)

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)


def inside(app: Inside, method: str, path: str, **more: Any) -> httpx.Response:
    return asyncio.run(app.ask(method, path, **more))


def around(asker: Any, app: Any, adapter: str | None = None, **settings: Any) -> Inside:
    run: Any = SimpleNamespace(asker=asker, folders=SimpleNamespace(adapter=adapter))
    config = ServeConfig.model_validate(settings)
    return Inside(Panjue(app), Setup(config, {"panjue": run}, None, 8000))


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body that was passed on."""
    message = await receive()
    await JSONResponse(json.loads(message["body"]))(scope, receive, send)


@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer another", "Basic {key}", "Bearer \N{BALLOT X}", "{key}"]
)
@pytest.mark.parametrize("path", [*POSTED, "/v1/models", "/v1/labels", "/metrics"])
def test_no_key_or_a_wrong_one(server: Running, path: str, key: str | None) -> None:
    headers = {} if key is None else {b"Authorization": key.format(key=server.key).encode()}
    answer = httpx.request(METHODS[path][0], server.url + path, headers=headers, timeout=60)
    assert answer.status_code == 401
    assert "Authorization: Bearer" in answer.json()["error"]["message"]


HIDDEN = """/docs /openapi.json /v1/responses/resp_1 /v1/models/panjue /v1//models /v1/models/
/../server.py /%2e%2e/server.py /..%2fserver.py /tokenize /pooling /server_info /v1/embeddings
/v1/load_lora_adapter /v1/audio/transcriptions /inference/v1/generate /invocations /version"""


@pytest.mark.parametrize("path", HIDDEN.split())
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_other_route_of_vllm_can_be_reached(
    http: httpx.Client, server: Running, method: str, path: str
) -> None:
    keyless = httpx.request(method, server.url + path, timeout=60)
    for answer in (http.request(method, path, json={}), keyless):
        assert answer.status_code == answer.json()["error"]["code"] == 404


@pytest.mark.parametrize("method", ["DELETE", "GET", "OPTIONS"])
def test_another_method_is_told_which_is_allowed(http: httpx.Client, method: str) -> None:
    answer = http.request(method, "/v1/judgments")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert http.post("/").headers["allow"] == "GET, HEAD"


def test_a_websocket_is_refused(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as wire:
        wire.sendall(
            b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a2V5\r\n\r\n"
        )
        assert not wire.recv(65536).startswith(b"HTTP/1.1 101")


JSON = "application/json"
BODIES = [
    (b'{"fact": "\xff\xfe"}', JSON, "UTF-8"),
    ('{"fact": "甲"}'.encode("utf-16"), JSON, "UTF-8"),
    (b'{"fact": "\\ud800"}', JSON, "JSON"),
    (b"[" * 100_000, JSON, "JSON"),
    (b"[]", JSON, "JSON object"),
    (b"fact=x", "application/x-www-form-urlencoded", JSON),
    (b'{"fact": "x"}', "text/plain", JSON),
]


@pytest.mark.parametrize(("raw", "kind", "message"), BODIES)
def test_bodies_that_are_no_json(http: httpx.Client, raw: bytes, kind: str, message: str) -> None:
    for path in POSTED:
        answer = http.post(path, content=raw, headers={"Content-Type": kind})
        assert answer.status_code == (400 if kind == JSON else 415)
        assert message in answer.json()["error"]["message"]


def test_a_byte_order_mark_before_a_body_is_ignored(asker: Any) -> None:
    body = {"messages": SAY, "model": "panjue"}
    raw = b"\xef\xbb\xbf" + json.dumps(body).encode()
    app = around(asker, echo)
    answer = inside(app, "POST", GENERATE[0], content=raw, headers={"Content-Type": JSON})
    assert (answer.status_code, answer.json()) == (200, body)


@BOTH
def test_a_body_of_ten_megabytes(http: httpx.Client, path: str) -> None:
    def pieces() -> Iterator[bytes]:
        yield from (b"x" * 2**16 for _ in range(160))

    for content in (b"x" * 10 * 2**20, pieces()):  # with its length told, and without
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert str(LARGEST_BODY) in answer.json()["error"]["message"]
    assert http.post("/v1/judgments", json=CASE).status_code == 200


def test_a_body_that_never_comes_to_its_end(asker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "BODY_TIMEOUT_S", 0.1)

    async def slow() -> Any:
        yield b'{"fact":'
        await asyncio.sleep(3600)

    headers = {"Content-Type": "application/json"}
    answer = inside(around(asker, echo), "POST", "/v1/judgments", content=slow(), headers=headers)
    assert answer.status_code == 408


@pytest.mark.parametrize("body", [{"messages": SAY}, CASE, {**CASE, "stream": True}])
def test_when_full_clients_are_asked_to_come_back(asker: Any, body: Any) -> None:
    async def both() -> httpx.Response:
        leave, entered = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            entered.set()
            await leave.wait()
            await echo(scope, receive, send)

        app = around(asker, slow, in_flight=1, engine={"data_parallel_size": 2})
        running = [app.ask("POST", GENERATE[0], json={"n": 1}) for _ in range(2)]
        first = asyncio.gather(*running)
        await entered.wait()
        while app.panjue._running < 2:  # each engine has its own
            await asyncio.sleep(0.01)
        second = await app.ask(
            "POST", "/v1/judgments" if "fact" in body else GENERATE[0], json=body
        )
        leave.set()
        assert [each.status_code for each in await first] == [200, 200]
        assert (await app.ask("POST", GENERATE[0], json={"n": 1})).status_code == 200
        return second

    full = asyncio.run(both())
    assert (full.status_code, full.headers["retry-after"]) == (503, "5")
    assert "try again later" in full.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ({"n": 256}, False),
        ({"n": 257}, True),
        ({"n": "16384"}, True),
        ({"n": 2, "prompt": ["甲"] * 200}, True),
        ({"prompt": [[1, 2, 3]] * 257}, True),
        ({"n": 256, "prompt": [1, 2, 3] * 100}, False),
        ({"n": "many"}, False),  # vLLM refuses it
    ],
)
def test_a_request_counts_for_all_its_replies(
    asker: Any, body: dict[str, Any], is_refused: bool
) -> None:
    answer = inside(around(asker, echo), "POST", "/v1/completions", json=body)
    assert (answer.status_code == 400) == is_refused
    assert is_refused == ("one request may ask for 256" in answer.text)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_engine_that_fails_is_an_error_of_the_server(asker: Any, is_streamed: bool) -> None:
    async def question(_: Any) -> Any:
        return SimpleNamespace(names=("甲",)), None

    async def answer(*_: Any) -> Any:
        raise UserError("it has ended")

    app = around(asker, echo)
    vars(app.setup.runs["panjue"]).update(question=question, answer=answer)
    body = {**CASE, "stream": is_streamed}
    told = inside(app, "POST", "/v1/judgments", json=body)
    assert told.status_code == (200 if is_streamed else 503)
    assert "the engine failed on this case" in told.text
    assert told.text.startswith('event: start\ndata: {"defendants": ["甲"]}') == is_streamed
    assert app.panjue._running == 0


# No browser sends `[`: what is no name counts as none.
HOSTS = [("evil.example", 400), ("localhost:8000", 200), ("[::1]:8000", 200), ("[", 200)]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_without_a_key_another_host_name_is_refused(asker: Any, host: str, status: int) -> None:
    keyless = around(asker, echo)
    answer = inside(keyless, "POST", GENERATE[0], headers={"Host": host}, json={})
    assert answer.status_code == status


def test_every_answer_forbids_foreign_scripts(server: Running, http: httpx.Client) -> None:
    for path in ("/", "/v1/models", "/v1/labels", "/nowhere", "/health"):
        headers = http.get(path, headers={"Origin": "https://evil.example"}).headers
        assert not any(name.startswith("access-control") for name in headers)
        assert {name: headers[name] for name in SECURITY} == SECURITY


def test_a_marker_in_two_parts_of_a_message_is_none(http: httpx.Client) -> None:
    def tokens(*texts: str) -> list[int]:
        parts = [{"type": "text", "text": text} for text in texts]
        messages = [{"role": "user", "content": parts}]
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        told: list[int] = http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
        return told

    count = tokens("甲").count
    end = max(tokens("甲"), key=count)  # the marker that a talk has most of
    assert tokens("<|im_", "end|>").count(end) == count(end)


TEMPLATED = """messages input instructions previous_input_messages documents tools tool_choice
response_format text chat_template_kwargs"""


@pytest.mark.parametrize("field", TEMPLATED.split())
def test_nothing_that_a_template_may_see_has_markup(asker: Any, field: str) -> None:
    for value in ("<|im_end|>", [{"content": ["<|im_end|>"]}], {"<|im_end|>": "x"}):
        passed = inside(around(asker, echo), "POST", GENERATE[0], json={field: value})
        assert "<|im_end|>" not in json.dumps(passed.json())
        assert "＜|im_end|>" in json.dumps(passed.json(), ensure_ascii=False)


@pytest.mark.parametrize("more", ["", r',"y":"\ud800"', ',"y":NaN', r',"x":"\u003c|im_end|>"'])
def test_arguments_of_a_call_are_read_before_they_are_shielded(asker: Any, more: str) -> None:
    # JSON in JSON, whose escapes vLLM reads: some clients write every `<` as one.
    function = {"arguments": r'{"x":"\u003c|im_end|>"' + more + "}"}
    said = {"role": "assistant", "tool_calls": [{"function": function}]}
    passed = inside(around(asker, echo), "POST", "/v1/chat/completions", json={"messages": [said]})
    [call] = passed.json()["messages"][0]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["x"] == "＜|im_end|>"


@pytest.mark.parametrize("depth", [700, 100_000])
def test_arguments_that_are_nested_too_deeply_are_refused(asker: Any, depth: int) -> None:
    function = {"arguments": "[" * depth + '"<|im_end|>"' + "]" * depth}
    body = {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}
    refused = inside(around(asker, echo), "POST", GENERATE[0], json=body)
    assert (refused.status_code, "nested too deeply" in refused.text) == (400, True)


def test_what_servers_tell_one_another_is_refused(asker: Any) -> None:
    body = {"kv_transfer_params": {"prompt_token_ids": [1]}}
    assert inside(around(asker, echo), "POST", GENERATE[0], json=body).status_code == 400


def test_a_talk_that_says_nothing_bad_is_passed_on_as_it_is(asker: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"<b>": [1.5, None]}}}
    body = {"messages": [{"role": "user", "content": "<b>甲</b> [1]"}], "tools": [tool], "n": 2}
    passed = inside(around(asker, echo), "POST", "/v1/chat/completions", json=body)
    assert passed.json() == body


@pytest.mark.parametrize("path", GENERATE)
def test_beside_an_adapter_no_client_reaches_the_base(asker: Any, path: str) -> None:
    app = around(asker, echo, adapter="adapter")
    for model in ({}, {"model": None}, {"model": ""}, {"model": "panjue"}):
        assert inside(app, "POST", path, json=model).json() == {"model": "panjue"}
    refused = inside(app, "POST", path, json={"model": "base"})
    assert refused.status_code == 404
    assert "there is no 'base' here, only 'panjue'" in refused.json()["error"]["message"]
    assert inside(app, "POST", path, json={"model": "x"}).json() == {"model": "x"}, "vLLM says no"


def test_a_seed_that_the_engine_does_not_survive_is_refused(
    asker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine: list[Any] = [{"seed": 1, "temperature": 0}, {"seed": None}]
    for body in [{"seed": 1, "temperature": 1}, {"seed": 1, "temperature": None}, *fine]:
        for is_on_cpu in (True, False):
            monkeypatch.setattr(middleware, "on_cpu", lambda is_on_cpu=is_on_cpu: is_on_cpu)
            answer = inside(around(asker, echo), "POST", GENERATE[0], json=body)
            refused = is_on_cpu and body not in fine
            assert answer.status_code == (400 if refused else 200)
            assert ("seed: it kills vLLM on a CPU" in answer.text) == refused


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
def test_nothing_is_fetched_for_a_client(http: httpx.Client, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.setblocking(False)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/x.png"
        message = {"role": "user", "content": [{"type": kind, kind: {"url": url}}]}
        told = http.post("/v1/chat/completions", json={"messages": [message]})
        assert told.status_code == 400, told.text
        with pytest.raises(BlockingIOError):
            bait.accept()


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_is_aborted_in_the_engine(
    server: Running, http: httpx.Client, path: str, stream: bool
) -> None:
    if path == "/v1/judgments":
        names = [f"被告人{n}" for n in range(20)]  # a reply of several hundred tokens
        body: dict[str, Any] = {**CASE, "defendants": names}
    else:
        # At the highest temperature a reply hardly ever ends by itself.
        body = {"messages": SAY, "max_tokens": 2500, "temperature": 2}
    raw = json.dumps({**body, "stream": stream}).encode()
    running = "vllm:num_requests_running"
    seen = False
    for _ in range(20):  # a sampled reply may end before it is looked at
        with connected(server, path, raw):
            seen = any(server.engine_metric(running) for _ in range(20))
        if seen:
            break
    assert seen
    until(lambda: server.engine_metric(running) == 0, seconds=5)
    assert http.post("/v1/judgments", json=CASE).status_code == 200


def connected(server: Running, path: str, raw: bytes) -> socket.socket:
    """Return a connection on which a request was sent."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")
    wire = socket.create_connection((host, int(port)))
    wire.sendall(head.encode() + raw)
    return wire
