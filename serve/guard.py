"""Check requests before vLLM's server sees them: path, key, size, form and content."""

import asyncio
import hmac
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import URL, Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from panjue.prompts.render import neutralize_tokens
from panjue.serve.settings import BASE, LOOPBACK, NAME

PAGE = Path(__file__).parent / "page"

GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes that vLLM answers itself."""

POSTED = (*GENERATE, "/v1/judgments")
READ = ("/v1/models", "/v1/labels", "/metrics")
HEALTH = ("/health", "/readyz")
"""Routes for monitoring; they need no key."""

PAGE_PATHS = ("/", *(f"/{file.name}" for file in PAGE.iterdir()))
"""Files of the web page; they need no key, the page asks for it."""

ALLOWED = {
    **dict.fromkeys(POSTED, ("POST",)),
    **dict.fromkeys((*READ, *HEALTH), ("GET",)),
    **dict.fromkeys(PAGE_PATHS, ("GET", "HEAD")),
}
"""Path -> methods. All other routes of vLLM are blocked."""

PROMPT_FIELDS = (
    *("messages", "input", "instructions", "previous_input_messages", "documents"),
    *("tools", "tool_choice", "response_format", "text", "chat_template_kwargs"),
)
"""Fields of a request body that a chat template may put into the prompt; control tokens in their
texts are escaped. The `prompt` of completions is passed on unchanged."""

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Fields that vLLM servers send each other; `prompt_token_ids` in them would replace the prompt."""

LARGEST_BODY = 2**18
"""Bytes of a request body that are read: some 80,000 characters."""

LARGEST_DISCARD = 2**26
"""Bytes of a larger body that are discarded, so that its client can read the error."""

BODY_TIMEOUT_S = 30.0
GRACE_S = 1.0
"""Longest time for vLLM to abort a request that timed out."""

SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every response: the page loads nothing from other sites and fits in no frame."""


class Problem(Exception):
    """An error response to a request."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        """Take the HTTP status, a message on what is wrong and what to do, and further headers."""
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers

    @property
    def body(self) -> dict[str, Any]:
        """Return the error in the form of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "service_unavailable"
        error = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return {"error": error}

    async def send(self, send: Send) -> None:
        """Send the response."""
        raw = json.dumps(self.body, ensure_ascii=False).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        items = {**fields, **self.headers}.items()
        headers = [(name.lower().encode(), value.encode()) for name, value in items]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})


@dataclass(frozen=True)
class Rules:
    """The rules for all requests.

    Attributes:
        tokenizer: The model's tokenizer; its control tokens are escaped in texts of requests.
        key: The key that clients must send; None if none is needed.
        local: Whether only this machine can connect.
        adapter: Whether vLLM serves an adapter and its base model; clients cannot use the base.
        seeds: Whether the engine survives a seed per request.
        in_flight: Requests that run at once; further clients are told to retry.
        timeout_s: Longest time for one request, including a client that reads slowly.
    """

    tokenizer: Any
    key: str | None = None
    local: bool = True
    adapter: bool = False
    seeds: bool = True
    in_flight: int = 256
    timeout_s: float = 600


class Guard:
    """The ASGI app of the server; it passes allowed requests on to vLLM's app.

    Attributes:
        app: vLLM's app with our routes; None while no engine is ready.
        running: Number of requests that were passed on and are not answered yet.
    """

    def __init__(self, rules: Rules) -> None:
        """Start without an engine."""
        self.rules, self.running = rules, 0
        self.app: ASGIApp | None = None
        self._page = StaticFiles(directory=PAGE, html=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; with an error if it is not allowed."""
        if scope["type"] != "http":
            return  # websockets: without an answer, uvicorn refuses them
        response = Response(send)
        task = asyncio.create_task(self._pass_on(scope, receive, response))
        try:
            await asyncio.wait([task], timeout=self.rules.timeout_s)
            if not task.done():
                # This tells vLLM that the client disconnected: cancelled handlers would leave the
                # request in the engine. A started response is cut off, also for a stalled reader.
                response.is_late.set()
                await asyncio.wait([task], timeout=GRACE_S)
                if not response.started:
                    await Problem(503, "this took too long; try again").send(response.send_late)
            else:
                task.result()
        except Problem as problem:
            await problem.send(response.send)
        except ClientDisconnect:
            pass
        finally:
            task.cancel()

    async def _pass_on(self, scope: Scope, receive: Receive, response: "Response") -> None:
        path, method = scope["path"], scope["method"]
        if method not in ALLOWED.get(path, ()):
            raise Problem(404, f"{method} {path}: there is no such route")
        if path in PAGE_PATHS:
            await self._page(scope, receive, response.send)
            return
        if path not in HEALTH:
            self._authorize(scope)
        if self.app is None:
            raise Problem(503, "the engine is not ready; try again")
        if path in POSTED and self.running >= self.rules.in_flight:
            raise Problem(503, "too many requests at once; try again")
        if path not in POSTED:
            await self.app(scope, receive, response.send)
            return
        body = self._checked(path, await read_json(Headers(scope=scope), receive))
        raw = json.dumps(body, ensure_ascii=False).encode()
        self.running += 1
        try:
            await self.app(scope, response.replay_body(raw, receive), response.send)
        finally:
            self.running -= 1

    async def idle(self, timeout_s: float) -> None:
        """Wait until all running requests are answered, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await asyncio.sleep(0.05)

    def _authorize(self, scope: Scope) -> None:
        if self.rules.key is None:
            # DNS rebinding: a foreign page must not reach us under a host name of its own.
            with suppress(ValueError):  # the Host header is not valid
                if not self.rules.local or URL(scope=scope).hostname in LOOPBACK:
                    return
            raise Problem(400, "without a key, use the host name localhost or 127.0.0.1")
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # As bytes: compare_digest refuses non-ASCII text.
        same = hmac.compare_digest(given.strip().encode(), self.rules.key.encode())
        if scheme.lower() != "bearer" or not same:
            message = "the key is missing or wrong; send 'Authorization: Bearer KEY'"
            raise Problem(401, message, **{"WWW-Authenticate": "Bearer"})

    def _checked(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body to pass on.

        Raises:
            Problem: It asks for something that is not allowed.
        """
        if path not in GENERATE:
            return body
        if field := next((name for name in TRANSFER_FIELDS if body.get(name)), None):
            raise Problem(400, f"{field}: is not allowed")
        if self.rules.adapter:  # vLLM uses the base model if a request names no model
            if body.get("model") == BASE:
                raise Problem(404, f"model: there is no {BASE!r} here, only {NAME!r}")
            body = {**body, "model": body.get("model") or NAME}
        greedy = body.get("temperature") == 0  # the default is 1
        if not self.rules.seeds and body.get("seed") is not None and not greedy:
            raise Problem(400, "seed: it kills vLLM on a CPU; leave it out or set temperature 0")
        neutralized = {name: self._neutralize(body[name]) for name in PROMPT_FIELDS if name in body}
        return {**body, **neutralized}

    def _neutralize(self, value: Any) -> Any:
        """Return a JSON value with the control tokens in its texts escaped."""
        if isinstance(value, str):
            return neutralize_tokens(self.rules.tokenizer, value)
        if isinstance(value, list):
            return [self._neutralize(item) for item in value]
        if isinstance(value, dict):
            result = {self._neutralize(key): self._neutralize(item) for key, item in value.items()}
            if isinstance(value.get("arguments"), str):  # vLLM parses this JSON: `\u003c` is a `<`
                with suppress(ValueError):
                    arguments = self._neutralize(from_json(value["arguments"]))
                    result["arguments"] = json.dumps(arguments, ensure_ascii=False)
            return result
        return value


async def read_json(headers: Headers, receive: Receive) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        Problem: The body is too large, too slow, not declared as JSON, or no JSON object.
        ClientDisconnect: The client disconnected.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Otherwise a foreign page could send requests (not read replies): only for JSON do browsers
        # ask for permission first.
        raise Problem(415, "send JSON, with 'Content-Type: application/json'")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _body(receive)
        value = from_json(body)
    except TimeoutError:
        raise Problem(408, "the body came too slowly", Connection="close") from None
    except ValueError as error:
        raise Problem(400, f"the body is no JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object")
    return value


async def _body(receive: Receive) -> bytes:
    body, size, more = bytearray(), 0, True
    while more and size <= LARGEST_DISCARD:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size <= LARGEST_BODY:
            body += piece
        more = message.get("more_body", False)
    if size > LARGEST_BODY:
        raise Problem(413, f"the body is larger than {LARGEST_BODY} bytes", Connection="close")
    return bytes(body)


class Response:
    """The response to one client.

    Attributes:
        started: Whether anything was sent.
        is_late: Set after the timeout; later parts of the response are not sent.
    """

    def __init__(self, send: Send) -> None:
        """Start with nothing sent."""
        self._send, self.started, self.is_late = send, False, asyncio.Event()

    def replay_body(self, body: bytes, receive: Receive) -> Receive:
        """Return a `receive` that first returns a body that was already read, then later messages.

        When the response is late, it reports that the client disconnected.
        """
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_next() -> Message:
            if unread:
                return unread.pop()
            message = asyncio.ensure_future(receive())
            late = asyncio.ensure_future(self.is_late.wait())
            try:
                await asyncio.wait((message, late), return_when=asyncio.FIRST_COMPLETED)
                return message.result() if message.done() else {"type": "http.disconnect"}
            finally:
                message.cancel()
                late.cancel()

        return receive_next

    async def send(self, message: Message) -> None:
        """Send a part of the response, unless it is late."""
        if not self.is_late.is_set():
            await self.send_late(message)

    async def send_late(self, message: Message) -> None:
        """Send a part of the response, even if it is late, with the common headers."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(SECURITY)
            if message["status"] == 503:
                headers.setdefault("Retry-After", "5")
        self.started = True
        await self._send(message)


def sse(event: str, data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"event: {event}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
