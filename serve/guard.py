"""What stands before vLLM's own server: who may ask, for what, how much, and in what form."""

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

from panjue.prompts.render import shield
from panjue.serve.settings import BASE, LOOPBACK, NAME

PAGE = Path(__file__).parent / "page"

GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""What vLLM answers itself, as it answers anybody."""

POSTED = (*GENERATE, "/v1/judgments")
READ = ("/v1/models", "/v1/labels", "/metrics")
HEALTH = ("/health", "/readyz")
"""What monitors ask; no key is needed."""

PAGE_PATHS = ("/", *(f"/{file.name}" for file in PAGE.iterdir()))
"""The page; it asks for the key itself."""

ALLOWED = {
    **dict.fromkeys(POSTED, ("POST",)),
    **dict.fromkeys((*READ, *HEALTH), ("GET",)),
    **dict.fromkeys(PAGE_PATHS, ("GET", "HEAD")),
}
"""Path -> methods. Nothing else of vLLM can be reached, whatever routes it has."""

PROMPT_FIELDS = (
    *("messages", "input", "instructions", "previous_input_messages", "documents"),
    *("tools", "tool_choice", "response_format", "text", "chat_template_kwargs"),
)
"""What of a request's body a chat template may put into the prompt: text of a case is no markup
there. The `prompt` of completions is token for token the client's."""

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""What vLLM's servers tell one another; `prompt_token_ids` in there would replace the prompt."""

LARGEST_BODY = 2**18
"""Bytes of a request's body that are read: some 80,000 characters."""

LARGEST_DISCARD = 2**26
"""Bytes that are thrown away, so that a client gets to read why its body was refused."""

BODY_TIMEOUT_S = 30.0
GRACE_S = 1.0
"""How long vLLM may take to let go of a request that takes too long."""


SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every response: the page loads nothing from elsewhere and stands in no frame."""


class Problem(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        """Say what is wrong and, in `message`, the way out."""
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers

    @property
    def body(self) -> dict[str, Any]:
        """Return the error in the form that OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "service_unavailable"
        told = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return {"error": told}

    async def send(self, send: Send) -> None:
        """Answer with it."""
        raw = json.dumps(self.body, ensure_ascii=False).encode()
        told = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **self.headers}
        headers = [(name.lower().encode(), value.encode()) for name, value in told.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})


@dataclass(frozen=True)
class Rules:
    """What holds for every request.

    Attributes:
        tokenizer: Of the model: no text of a request's talk is read as one of its control tokens.
        key: What clients must show, None for nothing.
        local: Whether only this machine can connect.
        adapter: Whether an adapter answers beside its base, which no client reaches.
        seeds: Whether the engine survives a seed per request.
        in_flight: Requests that are answered at once; clients beyond are asked to come back.
        timeout_s: The longest that one request may take, a slow reader's included.
    """

    tokenizer: Any
    key: str | None = None
    local: bool = True
    adapter: bool = False
    seeds: bool = True
    in_flight: int = 256
    timeout_s: float = 600


class Guard:
    """The ASGI app that is served; it passes on what may pass.

    Attributes:
        app: vLLM's app with our routes; None while there is no engine.
        running: Requests that were passed on and are not answered.
    """

    def __init__(self, rules: Rules) -> None:
        """Begin without an engine."""
        self.rules, self.running = rules, 0
        self.app: ASGIApp | None = None
        self._page = StaticFiles(directory=PAGE, html=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with an error where it may not pass."""
        if scope["type"] != "http":
            return  # there are no websockets here: unanswered, uvicorn refuses them
        answer = Answer(send)
        passing = asyncio.create_task(self._pass_on(scope, receive, answer))
        try:
            await asyncio.wait([passing], timeout=self.rules.timeout_s)
            if not passing.done():
                # To vLLM this is a client that hung up: cancelled, its handlers leave the request
                # in the engine. What has begun is cut off, a reader that does not read as well.
                answer.is_late.set()
                await asyncio.wait([passing], timeout=GRACE_S)
                if not answer.begun:
                    await Problem(503, "this took too long; try again").send(answer.send_late)
            else:
                passing.result()
        except Problem as problem:
            await problem.send(answer.send)
        except ClientDisconnect:
            pass
        finally:
            passing.cancel()

    async def _pass_on(self, scope: Scope, receive: Receive, answer: "Answer") -> None:
        path, method = scope["path"], scope["method"]
        if method not in ALLOWED.get(path, ()):
            raise Problem(404, f"{method} {path}: there is no such thing here")
        if path in PAGE_PATHS:
            await self._page(scope, receive, answer.send)
            return
        if path not in HEALTH:
            self._authorize(scope)
        if self.app is None:
            raise Problem(503, "the engine is not ready; try again")
        if path in POSTED and self.running >= self.rules.in_flight:
            raise Problem(503, "too many requests at once; try again")
        if path not in POSTED:
            await self.app(scope, receive, answer.send)
            return
        body = self._checked(path, await read_json(Headers(scope=scope), receive))
        raw = json.dumps(body, ensure_ascii=False).encode()
        self.running += 1
        try:
            await self.app(scope, answer.again(raw, receive), answer.send)
        finally:
            self.running -= 1

    async def idle(self, longest_s: float) -> None:
        """Wait until what was passed on is answered, but no longer than so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                while self.running:
                    await asyncio.sleep(0.05)

    def _authorize(self, scope: Scope) -> None:
        if self.rules.key is None:
            # A page elsewhere must not reach us under a name that it points here.
            with suppress(ValueError):  # of a Host that is no name
                if not self.rules.local or URL(scope=scope).hostname in LOOPBACK:
                    return
            raise Problem(400, "without a key, ask by the name localhost or 127.0.0.1")
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # As bytes: compare_digest refuses text that is not ASCII.
        same = hmac.compare_digest(given.strip().encode(), self.rules.key.encode())
        if scheme.lower() != "bearer" or not same:
            told = {"WWW-Authenticate": "Bearer"}
            raise Problem(401, "no key or a wrong one; send 'Authorization: Bearer KEY'", **told)

    def _checked(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body as it is passed on.

        Raises:
            Problem: It asks for what nobody gets here.
        """
        if path not in GENERATE:
            return body
        if between := next((name for name in TRANSFER_FIELDS if body.get(name)), None):
            raise Problem(400, f"{between}: is not taken here")
        if self.rules.adapter:  # beside which vLLM answers as its base, to who names no model too
            if body.get("model") == BASE:
                raise Problem(404, f"model: there is no {BASE!r} here, only {NAME!r}")
            body = {**body, "model": body.get("model") or NAME}
        greedy = body.get("temperature") == 0  # left out, it is 1
        if not self.rules.seeds and body.get("seed") is not None and not greedy:
            raise Problem(
                400, "seed: vLLM on a CPU does not survive it; leave it out, or set temperature 0"
            )
        return {
            **body,
            **{part: self._shielded(body[part]) for part in PROMPT_FIELDS if part in body},
        }

    def _shielded(self, part: Any) -> Any:
        """Return a part of the talk in whose texts the model's tokenizer reads no control token."""
        if isinstance(part, str):
            return shield(self.rules.tokenizer, part)
        if isinstance(part, list):
            return [self._shielded(one) for one in part]
        if isinstance(part, dict):
            made = {self._shielded(name): self._shielded(one) for name, one in part.items()}
            if isinstance(part.get("arguments"), str):  # JSON, which vLLM reads: `\u003c` is a `<`
                with suppress(ValueError):
                    read = self._shielded(from_json(part["arguments"]))
                    made["arguments"] = json.dumps(read, ensure_ascii=False)
            return made
        return part


async def read_json(headers: Headers, receive: Receive) -> dict[str, Any]:
    """Return a request's body, read from JSON.

    Raises:
        Problem: It is too large, too slow, not declared as JSON, or no JSON object.
        ClientDisconnect: The client hung up.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Without this a page elsewhere could ask, though not read: browsers ask us first for JSON.
        raise Problem(415, "send JSON, with 'Content-Type: application/json'")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _body(receive)
        found = from_json(body)
    except TimeoutError:
        raise Problem(408, "the body came too slowly", Connection="close") from None
    except ValueError as error:
        raise Problem(400, f"the body is no JSON in UTF-8: {error}") from None
    if not isinstance(found, dict):
        raise Problem(400, "the body must be a JSON object")
    return found


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


class Answer:
    """What is sent to one client.

    Attributes:
        begun: Whether something was.
        is_late: Whether it took too long: what comes now is not sent.
    """

    def __init__(self, send: Send) -> None:
        """Begin with nothing sent."""
        self._send, self.begun, self.is_late = send, False, asyncio.Event()

    def again(self, body: bytes, receive: Receive) -> Receive:
        """Return a `receive` that gives a body which was read already, and then what comes after.

        That is a hung up client, too, when the answer is late.
        """
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def after() -> Message:
            if given:
                return given.pop()
            coming = asyncio.ensure_future(receive())
            late = asyncio.ensure_future(self.is_late.wait())
            try:
                await asyncio.wait((coming, late), return_when=asyncio.FIRST_COMPLETED)
                return coming.result() if coming.done() else {"type": "http.disconnect"}
            finally:
                coming.cancel()
                late.cancel()

        return after

    async def send(self, message: Message) -> None:
        """Send a part of the answer, unless it is late."""
        if not self.is_late.is_set():
            await self.send_late(message)

    async def send_late(self, message: Message) -> None:
        """Send a part of an answer, with the headers that every answer has."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(SECURITY)
            if message["status"] == 503:
                headers.setdefault("Retry-After", "5")
        self.begun = True
        await self._send(message)


def sse(event: str, data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"event: {event}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
