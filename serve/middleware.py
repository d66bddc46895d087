"""The ASGI app around vLLM's: it checks every request, and answers panjue's own routes."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from panjue.prompts.plumbing.errors import UserError
from panjue.serve.ask import OnText
from panjue.serve.checks import Problem, check_key, for_vllm, read_body, replies
from panjue.serve.engine import Engine, VLLMError, check_adapter, on_cpu
from panjue.serve.judge import BadCase, ServedRun, case_request
from panjue.serve.settings import BASE, ServeConfig

T = TypeVar("T")

PAGE = Path(__file__).parent / "page"
PAGE_PATHS = ("/", *(f"/{file.name}" for file in PAGE.iterdir()))
"""Files of the web page; they need no key, the page asks for it."""

GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes that vLLM answers itself."""

JUDGMENTS = "/v1/judgments"
HEALTH = ("/health", "/readyz")  # routes for monitoring; they need no key

METHODS = {
    **dict.fromkeys((*GENERATE, JUDGMENTS), ("POST",)),
    **dict.fromkeys(("/v1/models", "/v1/labels", "/metrics", *HEALTH), ("GET",)),
    **dict.fromkeys(PAGE_PATHS, ("GET", "HEAD")),
}
"""Path -> methods. All other routes of vLLM are blocked."""

SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every response: the page loads nothing from other sites and fits in no frame."""

FAILED = "the engine failed on this case, or it is stopping; try again"
EVENT_STREAM = Headers(
    {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
)

Answering = Callable[[OnText], Coroutine[Any, Any, dict[str, Any]]]
"""Function that answers a case, and passes on each new piece of the reply."""


@dataclass(frozen=True)
class Setup:
    """What the middleware needs to know."""

    config: ServeConfig
    runs: Mapping[str, ServedRun]
    """Name for clients -> training; the first one answers requests without a model."""
    key: str | None
    """The key that clients must send; None if none is needed."""
    port: int

    def run(self, name: str | None = None) -> ServedRun:
        """Return the training of this name; the first one if none is given."""
        first, *_ = self.runs
        if run := self.runs.get(first if name is None else name):
            return run
        names = ", ".join(map(repr, self.runs))
        raise Problem(404, f"model: there is no {name!r} here, only {names}")


class Panjue:
    """The middleware; vLLM makes it with the app alone, whose state has our setup in its `args`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._running = 0
        self._page = StaticFiles(directory=PAGE, html=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a websocket gets no answer, so that uvicorn refuses it."""
        state = scope["app"].state
        setup: Setup = state.args.panjue
        if scope["type"] == "lifespan":
            try:
                for lora in state.openai_serving_models.lora_requests.values():
                    await check_adapter(state.engine_client, lora)
            except UserError as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            saying = asyncio.create_task(say_ready(state.server, setup))
            await self.app(scope, receive, send)
            saying.cancel()
        elif scope["type"] == "http":
            send = with_headers(send)
            try:
                await self._answer(setup, scope, receive, send)
            except Problem as problem:
                response = JSONResponse(problem.body, problem.status, problem.headers)
                await response(scope, receive, send)
            except ClientDisconnect:
                pass

    async def _answer(self, setup: Setup, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        method = scope["method"]
        if path not in METHODS:
            raise Problem(404, f"{path}: there is no such route")
        if method not in METHODS[path]:
            allowed = ", ".join(METHODS[path])
            raise Problem(405, f"{method} {path}: only {allowed}", Allow=allowed)
        if path in PAGE_PATHS:
            await self._page(scope, receive, send)
            return
        if path not in HEALTH:
            check_key(Request(scope), setup.key, setup.config.host)
        if path == JUDGMENTS:
            await self._judge(setup, scope, receive, send)
        elif path in GENERATE:
            await self._generate(setup, scope, receive, send)
        elif path in OWN:
            await JSONResponse(await OWN[path](setup, scope))(scope, receive, send)
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

    async def _generate(self, setup: Setup, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(Request(scope, receive))
        first = setup.run()
        if first.folders.adapter:  # vLLM would use the base if none is named
            if body.get("model") == BASE:
                setup.run(BASE)
            body["model"] = body.get("model") or next(iter(setup.runs))
        # In a thread: long texts take tens of milliseconds.
        raw = await asyncio.to_thread(for_vllm, body, first.asker.tokenizer, seeds=not on_cpu())
        with self._slots(setup.config.slots, replies(body)):
            await self.app(scope, replayed(raw, receive), send)

    async def _judge(self, setup: Setup, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(Request(scope, receive))
        await ready(setup, scope)
        state = scope["app"].state
        try:
            case = case_request(body)
            run = setup.run(case.model)
            lora = state.openai_serving_models.lora_requests.get(case.model)
            engine = Engine(state.engine_client, lora)
            with self._slots(setup.config.slots):
                example, question = await run.question(case)
                answer = partial(run.answer, engine, example, question)
                if case.stream:
                    await while_connected(receive, send_events(example.names, answer, send))
                elif judged := await while_connected(receive, answer()):
                    await JSONResponse(judged)(scope, receive, send)
        except BadCase as error:
            raise Problem(400, str(error)) from None
        except (UserError, VLLMError):
            raise Problem(503, FAILED) from None


async def ready(_: Setup, scope: Scope) -> dict[str, Any]:
    """Report that the engine runs; if it has died, the server is about to end."""
    if scope["app"].state.engine_client.errored:
        raise Problem(503, "the engine has ended; try again when the server has restarted")
    return {"status": "ready"}


async def models(setup: Setup, scope: Scope) -> dict[str, Any]:
    """Return vLLM's models, without the base under adapters and without paths on disk."""
    listed = await scope["app"].state.openai_serving_models.show_available_models()
    body: dict[str, Any] = listed.model_dump()
    body["data"] = [card for card in body["data"] if card["id"] in setup.runs]
    for card in body["data"]:
        card["root"] = card["id"]
        card["parent"] = None
    return body


async def labels(setup: Setup, scope: Scope) -> dict[str, Any]:
    """Return the labels of training with their counts, also in pairs, and what answers."""
    run = setup.run(Request(scope).query_params.get("model"))
    known = run.asker.labels
    counts = {"labels": known.counts, "most": known.most, "pairs": known.pairs}
    return {"task": run.task_name, **counts, "demo": run.demo}


OWN = {"/v1/models": models, "/v1/labels": labels, "/readyz": ready}
"""Path -> function that returns the body of the response."""


async def send_events(names: Sequence[str], answer: Answering, send: Send) -> None:
    """Send the answer to a case as server-sent events; if the engine fails, this is the last."""
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM.raw})
    await send(event("start", {"defendants": list(names)}))
    pieces: asyncio.Queue[str | None] = asyncio.Queue()  # None: the end
    answering = asyncio.create_task(answer(pieces.put_nowait))
    answering.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            await send(event("delta", {"text": piece}))
        last = event("result", answering.result())
    except (UserError, VLLMError):
        last = event("error", Problem(503, FAILED).body)
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    await send({**last, "more_body": False})


def event(name: str, data: Mapping[str, Any]) -> Message:
    text = f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`; cancel it, and so its requests in the engine, when the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns a body that was already read, then later messages."""
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
    """Print the address as soon as uvicorn listens, which is after the start of the app."""
    while not server.started:
        await asyncio.sleep(0.05)
    host = setup.config.host
    if ":" in host:
        host = f"[{host}]"
    scheme = "https" if "ssl_certfile" in setup.config.engine else "http"
    print(f"ready: {scheme}://{host}:{setup.port}/ (Ctrl-C stops)", flush=True)
