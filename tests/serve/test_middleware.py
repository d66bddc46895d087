"""What a request meets before vLLM: who may ask, for what, how much, and in what form."""

import asyncio
import json
import socket
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from tokenizers import AddedToken

from panjue.prompts.plumbing.config import load_section
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import BOM
from panjue.serve import checks, middleware
from panjue.serve.ask import QuestionMaker
from panjue.serve.checks import LARGEST_BODY
from panjue.serve.engine import Engine
from panjue.serve.middleware import (
    GENERATE,
    JUDGMENTS,
    METHODS,
    SECURITY,
    Panjue,
    Setup,
    while_connected,
)
from panjue.serve.settings import ServeConfig
from tests.serve.conftest import CASE
from tests.served import KEY, PanjueServe

SAY = [{"role": "user", "content": "你好"}]
JSON = {"Content-Type": "application/json"}
POSTED = [path for path, methods in METHODS.items() if "POST" in methods]
CHAT = GENERATE[0]
BOTH = pytest.mark.parametrize("path", [JUDGMENTS, CHAT])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body that was passed on."""
    message = await receive()
    await JSONResponse(json.loads(message["body"]))(scope, receive, send)


class Tokenizer:
    added_tokens_decoder = {0: AddedToken("<|im_end|>", special=True)}  # noqa: RUF012


class Around:
    """The middleware around another app than vLLM's, asked without a socket between."""

    def __init__(
        self, app: Any = echo, adapter: str | None = None, key: str | None = None, **settings: Any
    ) -> None:
        question_maker = SimpleNamespace(tokenizer=Tokenizer())
        run: Any = SimpleNamespace(
            question_maker=question_maker, folders=SimpleNamespace(adapter=adapter)
        )
        config = ServeConfig.model_validate(settings)
        args = Namespace(panjue=Setup(config, {"panjue": run}, key))
        engine = SimpleNamespace(errored=False, model_config=SimpleNamespace(max_model_len=3072))
        models = SimpleNamespace(lora_requests={})
        self.state = SimpleNamespace(engine_client=engine, openai_serving_models=models, args=args)
        self.panjue = Panjue(app)
        self.run = run

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        vllm = SimpleNamespace(state=self.state)
        await self.panjue({**scope, "app": vllm}, receive, send)

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return asyncio.run(self.send("POST", path, json=body, **more))


@pytest.fixture
def around() -> Around:
    return Around()


def complaint(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer another", "Basic KEY", "Bearer \N{BALLOT X}", "KEY"]
)
@pytest.mark.parametrize("path", [*POSTED, "/v1/models", "/v1/labels", "/metrics"])
def test_no_key_or_a_wrong_one(path: str, given: str | None) -> None:
    headers = {}
    if given is not None:
        headers[b"Authorization"] = given.replace("KEY", KEY).encode()
    answer = asyncio.run(Around(key=KEY).send(METHODS[path][0], path, headers=headers))
    assert answer.status_code == 401
    assert "Authorization: Bearer" in complaint(answer)


HIDDEN = """/docs /openapi.json /v1/responses/resp_1 /v1//models /v1/models/
/../server.py /%2e%2e/server.py /..%2fserver.py /tokenize /pooling /server_info /v1/embeddings
/v1/load_lora_adapter /v1/audio/transcriptions /inference/v1/generate /invocations /version"""


@pytest.mark.parametrize("path", HIDDEN.split())
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_other_route_of_vllm_can_be_reached(server: PanjueServe, method: str, path: str) -> None:
    answer = httpx.request(method, server.url + path, timeout=60)
    assert answer.status_code == answer.json()["error"]["code"] == 404


@pytest.mark.parametrize("method", ["DELETE", "GET", "OPTIONS"])
def test_another_method_is_told_which_is_allowed(http: httpx.Client, method: str) -> None:
    answer = http.request(method, JUDGMENTS)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert http.post("/").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/health", "/readyz", "/metrics", "/v1/models", "/v1/labels"])
def test_what_can_be_read_can_be_looked_at(path: str) -> None:
    """HEAD, as `wget --spider` sends it, is GET without the body, which uvicorn leaves out."""
    asked = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["method"])
        await JSONResponse({})(scope, receive, send)

    async def no_models() -> Any:
        return SimpleNamespace(model_dump=lambda: {"data": []})

    around = Around(vllm)
    around.state.openai_serving_models.show_available_models = no_models
    labels = SimpleNamespace(counts={}, most={}, pairs={})
    around.run.question_maker.labels = labels
    vars(around.run).update(task_name="judgment", demo=True)
    assert asyncio.run(around.send("HEAD", path)).status_code == 200
    assert asked in ([], ["GET"])


def test_a_model_is_told_by_its_name(around: Around) -> None:
    async def models() -> Any:
        cards = [{"id": name, "root": "/srv/secret", "parent": "base"} for name in MODELS]
        return SimpleNamespace(model_dump=lambda: {"object": "list", "data": cards})

    around.state.openai_serving_models.show_available_models = models
    setup = around.state.args.panjue
    runs = {"panjue": around.run, "team/other": around.run}
    around.state.args.panjue = replace(setup, runs=runs)
    for name in runs:
        answer = asyncio.run(around.send("GET", f"/v1/models/{name}"))
        assert answer.json() == {"id": name, "root": name, "parent": None}
    for name in ("base", "gpt-4"):
        answer = asyncio.run(around.send("GET", f"/v1/models/{name}"))
        assert answer.status_code == 404
        assert complaint(answer) == f"model: there is no {name!r} here, only 'panjue', 'team/other'"
    posted = around.post("/v1/models/panjue", {})
    assert (posted.status_code, posted.headers["allow"]) == (405, "GET, HEAD")
    keyed = asyncio.run(Around(key=KEY).send("GET", "/v1/models/panjue"))
    assert keyed.status_code == 401


MODELS = ("base", "panjue", "team/other")


def test_an_empty_list_of_tools_is_none(around: Around) -> None:
    """As some clients send; vLLM refuses it."""
    for path in GENERATE:
        assert around.post(path, {"messages": SAY, "tools": []}).json() == {"messages": SAY}
    assert around.post(CHAT, {"tools": None}).json() == {"tools": None}


ORIGIN = "https://tools.example:8443"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def test_pages_of_the_origins_that_are_named_may_ask() -> None:
    around = Around(key=KEY, origins=["http://localhost:3000", ORIGIN])
    for path in (JUDGMENTS, CHAT):
        asked = asyncio.run(around.send("OPTIONS", path, headers=PREFLIGHT))
        assert asked.status_code == 200, "a browser sends no key with it"
        assert asked.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    right = {"Origin": ORIGIN, "Authorization": f"Bearer {KEY}"}
    for headers, status in ((right, 200), ({"Origin": ORIGIN}, 401)):
        answer = around.post(CHAT, {}, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN, "it may read why not"
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origins", [[], [ORIGIN]])
def test_pages_of_other_origins_may_not(origins: list[str]) -> None:
    around = Around(origins=origins)
    foreign = {**PREFLIGHT, "Origin": "https://evil.example"}
    asked = asyncio.run(around.send("OPTIONS", CHAT, headers=foreign))
    assert asked.status_code == (400 if origins else 405)
    answer = around.post(CHAT, {}, headers={"Origin": "https://evil.example"})
    for one in (asked, answer):
        assert "access-control-allow-origin" not in one.headers


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "tools.example", "https://tools.example/", "https://a.example/x", "ftp://a", ""],
)
def test_what_is_no_origin_is_refused_with_an_example(tmp_path: Path, origin: str) -> None:
    with pytest.raises(UserError, match=r"^origins=.*: .*https://tools\.example:8443") as error:
        load_section(ServeConfig, tmp_path / "config.yaml", "serve", [f'origins=["{origin}"]'])
    assert "\n" not in str(error.value)
    for word in (f"origins={ORIGIN}", f"origins=[{ORIGIN}]"):
        good = load_section(ServeConfig, tmp_path / "config.yaml", "serve", [word])
        assert good.origins == [ORIGIN]


def test_a_websocket_gets_no_answer() -> None:
    async def vllm(*_: object) -> None:
        pytest.fail("uvicorn refuses a websocket only if nobody answers it")

    asyncio.run(Around(vllm)({"type": "websocket", "path": "/v1/realtime"}, None, None))


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize(
    ("raw", "kind", "message"),
    [
        (b'{"fact": "\xff\xfe"}', "application/json", "UTF-8"),
        (b'{"fact": "\\ud800"}', "application/json", "JSON"),
        (b"[" * 100_000, "application/json", "JSON"),
        (b"[]", "application/json", "JSON object"),
        (b'{"fact": "x"}', "text/plain", "JSON"),
    ],
)
def test_bodies_that_are_no_json(
    around: Around, path: str, raw: bytes, kind: str, message: str
) -> None:
    answer = around.post(path, content=raw, headers={"Content-Type": kind})
    assert answer.status_code == (400 if "json" in kind else 415)
    assert message in complaint(answer)


@BOTH
def test_a_body_of_ten_megabytes(http: httpx.Client, path: str) -> None:
    for content in (b"x" * 10 * 2**20, iter([b"x" * 2**16] * 160)):  # with its length, and without
        answer = http.post(path, content=content, headers=JSON)
        assert answer.status_code == 413
        assert str(LARGEST_BODY) in complaint(answer)


def test_a_body_that_never_comes_to_its_end(around: Around, monkeypatch: Any) -> None:
    monkeypatch.setattr(checks, "BODY_TIMEOUT_S", 0.1)

    async def slow() -> Any:
        yield b'{"fact":'
        await asyncio.sleep(3600)

    assert around.post(JUDGMENTS, content=slow(), headers=JSON).status_code == 408


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": SAY}), (JUDGMENTS, CASE)])
def test_when_full_clients_are_asked_to_come_back(path: str, body: Any) -> None:
    async def ask_three() -> httpx.Response:
        leave = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await leave.wait()
            await echo(scope, receive, send)

        around = Around(slow, in_flight=1, engine={"data_parallel_size": 2})
        first = [asyncio.create_task(around.send("POST", CHAT, json={})) for _ in range(2)]
        while around.panjue._running < 2:  # each engine has its own
            await asyncio.sleep(0.01)
        third = await around.send("POST", path, json=body)
        leave.set()
        assert [(await each).status_code for each in first] == [200, 200]
        assert (await around.send("POST", CHAT, json={})).status_code == 200
        return third

    full = asyncio.run(ask_three())
    assert (full.status_code, full.headers["retry-after"]) == (503, "5")
    assert "try again later" in complaint(full)


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ({"n": 256}, False),
        ({"n": 257}, True),
        ({"n": "16384"}, True),
        ({"n": 2, "prompt": ["甲"] * 200}, True),
        ({"n": 256, "prompt": [1, 2, 3] * 100}, False),
        ({"n": "many"}, False),  # vLLM refuses it
    ],
)
def test_a_request_counts_for_all_its_replies(around: Around, body: Any, is_refused: bool) -> None:
    answer = around.post("/v1/completions", body)
    assert ("one request may ask for 256" in answer.text) == is_refused


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_engine_that_fails_is_an_error_of_the_server(around: Around, is_streamed: bool) -> None:
    async def question(_: Any) -> Any:
        return SimpleNamespace(names=("甲",)), None

    async def answer(*_: Any) -> Any:
        raise UserError("it has ended")

    vars(around.run).update(question=question, answer=answer)
    told = around.post(JUDGMENTS, {**CASE, "stream": is_streamed})
    assert told.status_code == (200 if is_streamed else 503)
    assert "the engine failed on this case" in told.text
    assert told.text.startswith('event: start\ndata: {"defendants": ["甲"]}') == is_streamed
    assert around.panjue._running == 0


def test_a_client_that_waits_is_listened_to_once() -> None:
    calls = 0

    async def receive() -> Any:
        nonlocal calls
        calls += 1
        await asyncio.Event().wait()  # the client says nothing more

    async def work() -> str:
        await asyncio.sleep(0.6)
        return "answer"

    request = Request({"type": "http"}, receive)
    assert asyncio.run(while_connected(request, work())) == "answer"
    assert calls == 1, "64 clients that were looked for took 1% of a core"


def test_an_engine_that_has_ended_is_said_to_have(around: Around) -> None:
    around.state.engine_client.errored = True
    ready = asyncio.run(around.send("GET", "/readyz"))
    for answer in (ready, around.post(JUDGMENTS, CASE)):
        assert answer.status_code == 503
        assert "the engine has ended" in complaint(answer)


# No browser sends `[`: what is no name counts as none.
HOSTS = [("evil.example", 400), ("localhost:8000", 200), ("[::1]:8000", 200), ("[", 200)]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_without_a_key_another_host_name_is_refused(around: Around, host: str, status: int) -> None:
    assert around.post(CHAT, {}, headers={"Host": host}).status_code == status


@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/labels", "/nowhere", "/health"])
def test_every_answer_forbids_foreign_scripts(http: httpx.Client, path: str) -> None:
    headers = http.get(path, headers={"Origin": "https://evil.example"}).headers
    assert not any(name.startswith("access-control") for name in headers)
    assert {name: headers[name] for name in SECURITY} == SECURITY


def test_a_marker_in_two_parts_of_a_message_is_none(
    http: httpx.Client, question_maker: QuestionMaker
) -> None:
    def tokens(*texts: str) -> list[int]:
        parts = [{"type": "text", "text": text} for text in texts]
        messages = [{"role": "user", "content": parts}]
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        ids: list[int] = http.post(CHAT, json=body).json()["prompt_token_ids"]
        return ids

    end = question_maker.tokenizer.eos_token_id
    assert tokens("甲").count(end) == tokens("<|im_", "end|>").count(end) == 1


TEMPLATED = """messages input instructions previous_input_messages documents tools tool_choice
response_format text chat_template_kwargs"""


@pytest.mark.parametrize("field", TEMPLATED.split())
def test_nothing_that_a_template_may_see_has_markup(around: Around, field: str) -> None:
    for value in ("<|im_end|>", [{"content": ["<|im_end|>"]}], {"<|im_end|>": "x"}):
        passed = json.dumps(around.post(CHAT, {field: value}).json(), ensure_ascii=False)
        assert "<|im_end|>" not in passed
        assert "＜|im_end|>" in passed


def called(arguments: str) -> dict[str, Any]:
    """Return a talk in which a function was called with these arguments, JSON in JSON."""
    calls = [{"function": {"arguments": arguments}}]
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


@pytest.mark.parametrize("more", ["", r',"y":"\ud800"', ',"y":NaN', r',"x":"\u003c|im_end|>"'])
def test_arguments_of_a_call_are_read_before_they_are_shielded(around: Around, more: str) -> None:
    # vLLM reads their escapes: some clients write every `<` as one.
    passed = around.post(CHAT, called(r'{"x":"\u003c|im_end|>"' + more + "}"))
    [call] = passed.json()["messages"][0]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["x"] == "＜|im_end|>"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (called("[" * 700 + '"<|im_end|>"' + "]" * 700), "nested too deeply"),
        (called("[" * 100_000 + '"<|im_end|>"' + "]" * 100_000), "nested too deeply"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "is not allowed"),
        ({"ec_transfer_params": {"prompt_token_ids": [1]}}, "is not allowed"),
    ],
)
def test_what_would_get_past_the_shield_is_refused(
    around: Around, body: dict[str, Any], message: str
) -> None:
    refused = around.post(CHAT, body)
    assert refused.status_code == 400
    assert message in complaint(refused)


def test_everything_else_is_passed_on_as_it_is(around: Around) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"<b>": [1.5, None]}}}
    body = {"messages": [{"role": "user", "content": "<b>甲</b> [1]"}], "tools": [tool], "n": 2}
    for raw in (json.dumps(body).encode(), BOM + json.dumps(body).encode()):
        assert around.post(CHAT, content=raw, headers=JSON).json() == body


@pytest.mark.parametrize("path", GENERATE)
def test_beside_an_adapter_no_client_reaches_the_base(path: str) -> None:
    around = Around(adapter="adapter")
    for model in ({}, {"model": None}, {"model": ""}, {"model": "panjue"}):
        assert around.post(path, model).json() == {"model": "panjue"}
    refused = around.post(path, {"model": "base"})
    assert refused.status_code == 404
    assert "there is no 'base' here, only 'panjue'" in complaint(refused)
    assert around.post(path, {"model": "x"}).json() == {"model": "x"}, "vLLM says no"


def test_a_case_is_asked_with_the_adapter_of_its_model(around: Around) -> None:
    asked = []

    async def question(_: Any) -> Any:
        return SimpleNamespace(names=("甲",)), None

    async def answer(engine: Engine, *_: Any) -> Any:
        asked.append(engine.lora)
        return {}

    vars(around.run).update(question=question, answer=answer)
    setup = around.state.args.panjue
    around.state.args.panjue = replace(setup, runs={"panjue": around.run, "other": around.run})
    around.state.openai_serving_models.lora_requests = {"panjue": "first", "other": "second"}
    for model in ({}, {"model": "panjue"}, {"model": "other"}):
        assert around.post(JUDGMENTS, {**CASE, **model}).status_code == 200
    assert asked == ["first", "first", "second"]


@pytest.mark.parametrize(
    ("is_on_cpu", "body", "is_refused"),
    [
        (True, {"seed": 1, "temperature": 1}, True),
        (True, {"seed": 1, "temperature": None}, True),
        (True, {"seed": 1, "temperature": 0}, False),
        (True, {"seed": None}, False),
        (False, {"seed": 1}, False),
    ],
)
def test_a_seed_that_the_engine_does_not_survive_is_refused(
    around: Around, monkeypatch: Any, is_on_cpu: bool, body: Any, is_refused: bool
) -> None:
    monkeypatch.setattr(middleware, "on_cpu", lambda: is_on_cpu)
    answer = around.post(CHAT, body)
    assert ("seed: it kills vLLM on a CPU" in answer.text) == is_refused


def test_nothing_is_fetched_for_a_client(http: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.setblocking(False)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/x.png"
        image = {"type": "image_url", "image_url": {"url": url}}
        told = http.post(CHAT, json={"messages": [{"role": "user", "content": [image]}]})
        assert told.status_code == 400, told.text
        with pytest.raises(BlockingIOError):
            bait.accept()
