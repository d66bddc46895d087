"""The ASGI app around vLLM's app. It checks every request and answers panjue's own routes."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from panjue.prompts.plumbing.errors import UserError
from panjue.serve.ask import OnText
from panjue.serve.checks import Problem, check_key, for_vllm, read_body, reply_count
from panjue.serve.engine import Engine, VLLMError, check_adapter, on_cpu
from panjue.serve.judge import BadCase, CaseRequest, ServedRun, checked_case
from panjue.serve.settings import BASE, NAME, ServeConfig

T = TypeVar("T")

PAGE = Path(__file__).parent / "page"
PAGE_PATHS = ("/", *(f"/{file.name}" for file in PAGE.iterdir()))
"""Paths of the web page. They need no key, because the page asks for the key."""

GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes that vLLM answers itself."""

JUDGMENTS = "/v1/judgments"
READ = ("GET", "HEAD")
HEALTH = ("/health", "/readyz")  # routes for monitoring; they need no key

MODELS = "/v1/models"
MODEL = f"{MODELS}/NAME"  # stands for any name

METHODS = {
    **dict.fromkeys((*GENERATE, JUDGMENTS), ("POST",)),
    **dict.fromkeys((MODELS, MODEL, "/v1/labels", "/metrics", *HEALTH, *PAGE_PATHS), READ),
}
"""Route -> methods. All other routes of vLLM are blocked."""

SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every response: the page loads nothing from other sites, and no frame shows it."""

FAILED = "the engine failed on this case, or it is stopping; try again"
EVENT_STREAM = Headers(
    {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
)

AnswerCase = Callable[[OnText], Coroutine[Any, Any, dict[str, Any]]]
"""Function that answers one case; its argument receives each new piece of the reply."""


@dataclass(frozen=True)
class Setup:
    """What the middleware needs to know: settings, trainings and key."""

    config: ServeConfig
    runs: Mapping[str, ServedRun]
    """Name for clients -> training. `NAME` answers requests that name no model."""
    key: str | None  # which clients must send; None if none is needed

    def run(self, name: str = NAME) -> ServedRun:
        """Return the training that a request names; Problem: there is none."""
        if name not in self.runs:
            raise self.unknown(name)
        return self.runs[name]

    def unknown(self, name: str) -> Problem:
        """Return the error, status 404, for a name that no training has."""
        names = ", ".join(map(repr, self.runs))
        return Problem(404, f"model: there is no {name!r} here, only {names}")


def setup_of(scope: Scope) -> Setup:
    """Return the setup, which is among the arguments of vLLM's server."""
    setup: Setup = scope["app"].state.args.panjue
    return setup


class Panjue:
    """The middleware. vLLM makes it around its own app."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._running = 0
        self._page = StaticFiles(directory=PAGE, html=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Leave a websocket without an answer, so that uvicorn refuses it."""
        if scope["type"] == "lifespan":
            await self._start_and_stop(scope, receive, send)
        elif scope["type"] == "http":
            app: ASGIApp = self._respond
            if origins := setup_of(scope).config.origins:  # this answers their OPTIONS itself
                app = CORSMiddleware(app, origins, ("GET", "POST"), allow_headers=("*",))
            await app(scope, receive, with_headers(send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, at least by saying what is wrong with it."""
        try:
            await self._answer(scope, receive, send)
        except Problem as problem:
            response = JSONResponse(problem.body, problem.status, problem.headers)
            await response(scope, receive, send)
        except ClientDisconnect:
            pass

    async def _start_and_stop(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the adapters. Then let vLLM's app start, and stop with the server."""
        state = scope["app"].state
        try:
            for lora in state.openai_serving_models.lora_requests.values():
                await check_adapter(state.engine_client, lora)
        except UserError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        saying = asyncio.create_task(say_ready(state.server, setup_of(scope)))
        await self.app(scope, receive, send)
        saying.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check route, method and key of a request; answer it, or let vLLM do so."""
        path = scope["path"]
        method = scope["method"]
        is_one_model = path.startswith(f"{MODELS}/") and path != f"{MODELS}/"
        route = MODEL if is_one_model else path
        if route not in METHODS:
            raise Problem(404, f"{path}: there is no such route")
        if method not in METHODS[route]:
            allowed = ", ".join(METHODS[route])
            raise Problem(405, f"{method} {path}: only {allowed}", Allow=allowed)
        if method == "HEAD":  # vLLM has no HEAD routes; uvicorn then sends no body
            scope = {**scope, "method": "GET"}
        if path in PAGE_PATHS:
            await self._page(scope, receive, send)
            return
        if path not in HEALTH:
            check_key(Request(scope), setup_of(scope).key)
        if path == JUDGMENTS:
            await self._judge(scope, receive, send)
        elif path in GENERATE:
            await self._generate(scope, receive, send)
        elif route in OWN_ROUTES:
            body = await OWN_ROUTES[route](scope)
            await JSONResponse(body)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @contextmanager
    def _slots(self, limit: int, count: int = 1) -> Iterator[None]:
        """Count the replies of a request while it runs; refuse it if there are too many."""
        if count > limit:
            raise Problem(400, f"n × prompts: {count} replies; one request may ask for {limit}")
        if self._running + count > limit:
            raise Problem(503, "too many requests at once; try again later")
        self._running += count
        try:
            yield
        finally:
            self._running -= count

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the body of a request to OpenAI's API, and let vLLM answer it."""
        body = await read_body(Request(scope, receive))
        setup = setup_of(scope)
        run = setup.run()
        if run.folders.adapter:
            # Under adapters, vLLM also knows the base, which answers requests that name no model.
            # Clients must get an adapter, so the base is treated as unknown.
            body["model"] = body.get("model") or NAME
            if body["model"] == BASE:
                raise setup.unknown(BASE)
        # In a thread: long texts take tens of milliseconds.
        checked = await asyncio.to_thread(
            for_vllm, body, run.question_maker.tokenizer, seeds=not on_cpu()
        )
        with self._slots(setup.config.slots(), reply_count(body)):
            await self.app(scope, with_body(checked, receive), send)

    async def _judge(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `POST /v1/judgments`, in one response or as events."""
        request = Request(scope, receive)
        body = await read_body(request)
        await ready(scope)
        setup = setup_of(scope)
        state = scope["app"].state
        try:
            case = checked_case(CaseRequest, body)
            run = setup.run(case.model)
            lora = state.openai_serving_models.lora_requests.get(case.model)
            engine = Engine(state.engine_client, lora)
            with self._slots(setup.config.slots()):
                example, question = await run.question(case)
                answer = partial(run.answer, engine, case, example, question)
                if case.stream:
                    await while_connected(request, send_events(example.names, answer, send))
                else:
                    judgments = await while_connected(request, answer())
                    await JSONResponse(judgments)(scope, receive, send)
        except BadCase as error:
            raise Problem(400, str(error)) from None
        except (UserError, VLLMError):
            raise Problem(503, FAILED) from None


async def ready(scope: Scope) -> dict[str, Any]:
    """Report that the engine runs. If it has died, the server is about to end."""
    if scope["app"].state.engine_client.errored:
        raise Problem(503, "the engine has ended; try again when the server has restarted")
    return {"status": "ready"}


async def models(scope: Scope) -> dict[str, Any]:
    """Return vLLM's models, without the base under adapters and without paths on disk."""
    listed = await scope["app"].state.openai_serving_models.show_available_models()
    body: dict[str, Any] = listed.model_dump()
    body["data"] = [card for card in body["data"] if card["id"] in setup_of(scope).runs]
    for card in body["data"]:
        card["root"] = card["id"]
        card["parent"] = None
    return body


async def model(scope: Scope) -> dict[str, Any]:
    """Return the model that the path names, as `models` does; Problem: there is none."""
    name = scope["path"].removeprefix(f"{MODELS}/")
    setup = setup_of(scope)
    card: dict[str, Any]
    for card in (await models(scope))["data"]:
        if card["id"] == name:
            return card
    raise setup.unknown(name)


async def labels(scope: Scope) -> dict[str, Any]:
    """Return a training's task, its labels with their counts, and whether it is a demo.

    `most` is the largest number of labels in one answer.
    """
    run = setup_of(scope).run(Request(scope).query_params.get("model", NAME))
    known = run.question_maker.labels
    counts = {"labels": known.counts, "most": known.most, "pairs": known.pairs}
    return {"task": run.task_name, **counts, "demo": run.demo}


OWN_ROUTES = {MODELS: models, MODEL: model, "/v1/labels": labels, "/readyz": ready}
"""Route -> function that returns the body of the response."""


async def send_events(defendants: Sequence[str], answer: AnswerCase, send: Send) -> None:
    """Send the answer to a case as server-sent events; the last one may report a failure."""
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM.raw})
    await send(event("start", {"defendants": list(defendants)}))
    pieces: asyncio.Queue[str | None] = asyncio.Queue()  # None marks the end
    answering = asyncio.create_task(answer(pieces.put_nowait))
    answering.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            await send(event("delta", {"text": piece}))
        last = event("result", answering.result())
    except (UserError, VLLMError):
        last = event("error", Problem(503, FAILED).body)
    finally:
        answering.cancel()  # it still runs if the client has disconnected
        await asyncio.gather(answering, return_exceptions=True)
    await send({**last, "more_body": False})


def event(name: str, data: Mapping[str, Any]) -> Message:
    """Return the message with one server-sent event; more events follow."""
    text = f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. If the client disconnects, cancel it, and so its requests in the engine."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(disconnect(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnect(request: Request) -> None:
    """Return when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def with_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` for a request that was read: it returns `body`, then new messages."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return unread.pop() if unread else await receive()

    return receive_next


def with_headers(send: Send) -> Send:
    """Return a `send` that adds the common headers to a response."""

    async def send_next(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(SECURITY)
            if message["status"] == 503:
                headers.setdefault("Retry-After", "5")
        await send(message)

    return send_next


async def say_ready(server: Any, setup: Setup) -> None:
    """Print the address as soon as uvicorn listens, after the start of the app."""
    while not server.started:
        await asyncio.sleep(0.05)
    host = setup.config.host
    if ":" in host:
        host = f"[{host}]"
    scheme = "https" if "ssl_certfile" in setup.config.engine else "http"
    print(f"ready: {scheme}://{host}:{setup.config.port}/ (Ctrl-C stops)", flush=True)
