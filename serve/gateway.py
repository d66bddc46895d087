"""The HTTP face of a task: what clients may ask, and what they get when they ask wrongly."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from panjue.prompts.errors import UserError
from panjue.prompts.names import MOST, find_defendants
from panjue.prompts.render import TEMPLATE_ARGS, neutralize, shielded
from panjue.prompts.task import Example
from panjue.serve.ask import Question, Refusal
from panjue.serve.backend import Rejected, Unavailable, check
from panjue.serve.judge import Judge, sse
from panjue.serve.meters import Measured, Meters
from panjue.serve.settings import LOOPBACK, NAME
from panjue.serve.supervisor import Supervisor

T = TypeVar("T")

PAGE = Path(__file__).parent / "page"

LARGEST_BODY = 2**18
"""Bytes of a request's body that are read: some 80,000 characters."""

LARGEST_DISCARD = 2**26
"""Bytes that are thrown away, so that a client gets to read why its body was refused."""

BODY_TIMEOUT_S = 30.0
MOST_SAMPLES = 32
ROLES = ("system", "user", "assistant")

CHAT = "/v1/chat/completions"
"""The path here and in vLLM."""

ABORTED = b'"finish_reason":"abort"'
"""How vLLM says, with status 200, that its engine was told to end; a text's quotes are escaped."""

CHAT_FIELDS = (
    "model",
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "stream",
)
"""What of OpenAI's chat completions passes through to vLLM: no `n`, no logprobs, no schema and no
chat template of the client's."""


class Problem(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        """Say what is wrong and, in `message`, the way out."""
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers


class Case(BaseModel):
    """Body of `POST /v1/judgments`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    fact: str
    """The facts."""
    defendants: list[str] | None = Field(None, max_length=MOST)
    """Their names, in order; found in the facts by rule where they are not given."""
    task: str | None = None
    """The task that is meant, if the client wants to be sure."""
    samples: int = Field(0, ge=0, le=MOST_SAMPLES)
    """Replies drawn beside the greedy one; with them the answer is decided by expected score."""
    stream: bool = False
    """Answer with server-sent events: `start`, `delta`s, then `result` or `error`."""


class Service(NamedTuple):
    """What the endpoints work with.

    Attributes:
        judge: Answers cases.
        task: Name of the task.
        engine: vLLM, supervised.
        in_flight: Replies in the engine at once; clients beyond are asked to come back.
        key: What clients must show, None for nothing.
        law: Article -> its text, to show beside the label.
        seeds: Whether the engine survives a seed per request.
        local: Whether only this machine can connect.
        timeout_s: The longest that one request may take, a slow reader's included.
    """

    judge: Judge
    task: str
    engine: Supervisor
    in_flight: int
    key: str | None = None
    law: Mapping[str, str] = {}
    seeds: bool = True
    local: bool = True
    timeout_s: float = 600


class Gateway:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        """Begin with nothing running."""
        self._judge, self._engine, self._service = service.judge, service.engine, service
        self.running = 0
        self.meters = Meters()

    async def authorize(self, request: Request) -> None:
        """Refuse a request without the key, where one is set.

        Without one, and for this machine only, a page elsewhere must not reach us under a name
        that it points here.
        """
        if self._service.key is None:
            if self._service.local and request.url.hostname not in LOOPBACK:
                raise Problem(400, "without a key, ask by the name localhost or 127.0.0.1")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # As bytes: compare_digest refuses text that is not ASCII.
        same = hmac.compare_digest(given.strip().encode(), self._service.key.encode())
        if scheme.lower() != "bearer" or not same:
            told = {"WWW-Authenticate": "Bearer"}
            raise Problem(401, "no key or a wrong one; send 'Authorization: Bearer KEY'", **told)

    def check_ready(self) -> None:
        """Ask to come back while the engine cannot answer."""
        if not self._engine.ready:
            raise Problem(503, "the engine is not ready; try again", **{"Retry-After": "5"})

    @contextmanager
    def places(self, replies: int = 1) -> Iterator[None]:
        """Hold places in the engine for `replies` while the block runs."""
        self.check_ready()
        if self.running and self.running + replies > self._service.in_flight:
            raise Problem(503, "too many requests at once; try again", **{"Retry-After": "1"})
        self.running += replies
        try:
            yield
        finally:
            self.running -= replies

    async def judgments(self, request: Request) -> Response:
        """Answer one case."""
        try:
            case = Case.model_validate(await json_body(request))
        except ValidationError as error:
            raise Problem(400, complaint(error)) from None
        async with AsyncExitStack() as held:
            held.enter_context(self.places(1 + case.samples))
            example = await asyncio.to_thread(self._example, case)
            question = await self._question(example)
            if case.stream:
                return self._held(self._events(example, question, case.samples), held)
            result = await until_gone(request, self._judge.answer(example, question, case.samples))
        return JSONResponse({"defendants": list(example.names), **result})

    def _example(self, case: Case) -> Example:
        if case.task not in (None, self._service.task):
            raise Problem(400, f"task: this server answers {self._service.task!r} only")
        names = find_defendants(case.fact) if case.defendants is None else case.defendants
        if case.defendants is None and case.fact.strip() and not names:
            raise Problem(
                400, "no defendant is found behind 被告人 in 'fact'; list them in 'defendants'"
            )
        by_hand = self._judge.task.by_hand
        assert by_hand is not None, "checked at start"
        try:
            return by_hand(case.fact, names)
        except UserError as error:
            raise Problem(400, str(error)) from None

    async def _question(self, example: Example) -> Question:
        started = time.perf_counter()
        try:
            return await self._judge.question(example)
        except Refusal as refusal:
            raise Problem(400, f"this case cannot be asked: {refusal}") from None
        finally:
            self.meters.question.observe(time.perf_counter() - started)

    async def _events(
        self, example: Example, question: Question, samples: int
    ) -> AsyncIterator[bytes]:
        named = {"defendants": list(example.names)}
        yield sse("start", named)
        try:
            async with aclosing(self._judge.stream(example, question, samples)) as events:
                async for event, data in events:
                    yield sse(event, {**named, **data} if event == "result" else data)
        except (Unavailable, Rejected) as error:
            yield sse("error", error_body(503, f"the engine failed half way: {error}"))

    async def labels(self) -> dict[str, Any]:
        """Return the label sets that answers are made of, with their counts in training."""
        labels = self._judge.asker.labels
        return {
            "task": self._service.task,
            "labels": labels.counts,
            "most": labels.most,
            "law": self._service.law,
        }

    async def models(self) -> Response:
        """Return the model that answers, as OpenAI lists models."""
        self.check_ready()
        async with self._engine.backend.send("GET", "/v1/models") as answer:
            await check(answer)
            listed = (await answer.json())["data"]
        # Not vLLM's own words, which tell where the model lies on disk.
        kept = ("id", "object", "created", "owned_by", "max_model_len")
        mine = [{k: model.get(k) for k in kept} for model in listed if model["id"] == NAME]
        return JSONResponse({"object": "list", "data": mine})

    async def chat(self, request: Request) -> Response:
        """Pass a chat completion through, with what may pass."""
        payload = self._chat_payload(await json_body(request))
        async with AsyncExitStack() as held:
            held.enter_context(self.places())
            backend = self._engine.backend
            if payload.get("stream"):
                sent = backend.send("POST", CHAT, payload)
                answer = await until_gone(request, held.enter_async_context(sent))
                await check(answer)
                return self._held(relayed(answer), held)
            body = await until_gone(request, backend.whole(CHAT, payload))
        if ABORTED in body:
            raise Unavailable("the engine is ending")
        return Response(body, media_type="application/json")

    def _held(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> Response:
        return Held(events, held.pop_all(), self._service.timeout_s)

    def _chat_payload(self, body: Mapping[str, Any]) -> dict[str, Any]:
        unknown = next((name for name in body if name not in CHAT_FIELDS), None)
        if unknown is not None:
            taken = ", ".join(CHAT_FIELDS)
            raise Problem(400, f"{unknown!r} is not taken here; what is: {taken}")
        if not isinstance(body.get("stream", False), bool | None):
            raise Problem(400, "stream: must be true or false")
        greedy = body.get("temperature") == 0  # left out, it is 1
        if not self._service.seeds and body.get("seed") is not None and not greedy:
            raise Problem(
                400, "seed: vLLM on a CPU does not survive it; leave it out, or sample not"
            )
        if body.get("model", NAME) != NAME:  # beside an adapter vLLM would also answer as its base
            raise Problem(404, f"model: there is no {body['model']!r} here, only {NAME!r}")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Problem(400, "messages: must be a list of {role, content}")
        return {
            "model": NAME,
            **body,
            "messages": shielded(
                self._service.judge.asker.tokenizer, [_message(message) for message in messages]
            ),
            "chat_template_kwargs": TEMPLATE_ARGS,
        }

    async def readyz(self) -> dict[str, str]:
        """Say that requests can be answered."""
        self.check_ready()
        return {"status": "ready"}

    async def metrics(self) -> Response:
        """Return the meters for Prometheus."""
        self.meters.running.set(self.running)
        self.meters.ready.set(self._engine.ready)
        self.meters.restarts.set(self._engine.restarts)
        return Response(generate_latest(self.meters.registry), media_type=CONTENT_TYPE_LATEST)


async def healthz() -> dict[str, str]:
    """Say that the gateway itself lives."""
    return {"status": "ok"}


def create_app(service: Service) -> FastAPI:
    """Return the app of all endpoints and the page; nothing else of vLLM can be reached."""
    gateway = Gateway(service)
    # No interactive docs: their scripts would come from another machine.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    keyed = [Depends(gateway.authorize)]
    app.post("/v1/judgments", dependencies=keyed)(gateway.judgments)
    app.post(CHAT, dependencies=keyed)(gateway.chat)
    app.get("/v1/models", dependencies=keyed)(gateway.models)
    app.get("/v1/labels", dependencies=keyed)(gateway.labels)
    app.get("/healthz")(healthz)
    app.get("/readyz")(gateway.readyz)
    app.get("/metrics")(gateway.metrics)
    app.mount("/", StaticFiles(directory=PAGE, html=True))

    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Rejected, _rejected)
    for down in (Unavailable, aiohttp.ClientError):
        app.add_exception_handler(down, _unavailable)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, _gone)
    app.add_middleware(Measured, meters=gateway.meters)
    return app


async def _problem(_: Request, error: Any) -> Response:
    return JSONResponse(error_body(error.status, error.message), error.status, error.headers)


async def _http(_: Request, error: Any) -> Response:
    return JSONResponse(error_body(error.status_code, error.detail), error.status_code)


async def _rejected(_: Request, error: Any) -> Response:
    return Response(error.body, error.status, media_type="application/json")


async def _unavailable(_: Request, error: Exception) -> Response:
    body = error_body(503, f"the engine does not answer, it is looked after ({error})")
    return JSONResponse(body, 503, {"Retry-After": "5"})


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; nginx's number, for the meters


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def complaint(error: ValidationError) -> str:
    """Return the first thing that is wrong with a body, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{place!r} is not taken here; what is: {', '.join(Case.model_fields)}"
    return f"{place}: {first['msg']}"


def _message(message: Any) -> dict[str, str]:
    """Return a chat message whose text can forge no marker of the chat template."""
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise Problem(400, "messages: each must have a 'role' and a 'content', and nothing else")
    role, content = message["role"], message["content"]
    if role not in ROLES or not isinstance(content, str):
        raise Problem(400, f"messages: a role is one of {', '.join(ROLES)}, a content is text")
    return {"role": role, "content": neutralize(content)}


async def json_body(request: Request) -> dict[str, Any]:
    """Return a request's body, read from JSON.

    Raises:
        Problem: It is too large, too slow, not declared as JSON, or no JSON object.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Problem(415, "send JSON, with 'Content-Type: application/json'")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _body(request)
        found = from_json(body)
    except TimeoutError:
        raise Problem(408, "the body came too slowly", Connection="close") from None
    except ValueError as error:
        raise Problem(400, f"the body is no JSON in UTF-8: {error}") from None
    if not isinstance(found, dict):
        raise Problem(400, "the body must be a JSON object")
    return found


async def _body(request: Request) -> bytes:
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= LARGEST_BODY:
            body += piece
        elif size > LARGEST_DISCARD:
            break
    if size > LARGEST_BODY:
        raise Problem(413, f"the body is larger than {LARGEST_BODY} bytes", Connection="close")
    return bytes(body)


class ClientGone(Exception):
    """The client has hung up before its answer was there."""


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it, and so its request, when the client hangs up.

    Raises:
        ClientGone: It did.
    """
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def relayed(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield a body as it comes, up to where its engine breaks it off."""
    failed = b"\n\n" + sse("error", error_body(503, "the engine failed half way"))
    rest = b""
    try:
        async for piece in answer.content.iter_any():
            events, end, rest = (rest + piece).rpartition(b"\n\n")
            good, aborted, _ = events.partition(ABORTED)
            if aborted:
                yield b"".join(good.rpartition(b"\n\n")[:2]) + failed
                return
            yield events + end
        yield rest
    except (aiohttp.ClientError, TimeoutError):
        yield failed


class Held(StreamingResponse):
    """A stream of events that holds what it needs until it is over, however it ends."""

    def __init__(
        self, events: AsyncIterator[bytes], held: AsyncExitStack, timeout_s: float
    ) -> None:
        """Take the events, what to let go of after them, and the longest they may take."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._held, self._timeout_s = held, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a reader that stops reading is cut off in the end."""
        async with self._held:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await super().__call__(scope, receive, send)
