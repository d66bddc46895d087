"""What asking an OpenAI-compatible server takes, whatever is asked: a name, a key, patience.

Not OpenAI's own client: its one number of retries is for busy servers and wrong addresses alike,
so that waiting ten minutes for a busy one would mean ten minutes for a typing error.
"""

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from panjue.prompts.plumbing.errors import UserError

T = TypeVar("T")

PAUSES_S = (1, 4, 16)
"""Before a request that failed for no fault of its own is tried again."""

BUSY = frozenset({429, 503})
LONGEST_BUSY_S = 600
"""How long a server may say that it is busy."""

REFUSED = frozenset({400, 413, 422, 501})
LASTING = REFUSED | {401, 403, 404}
"""What another try would meet again."""

BROKEN_OFF = frozenset({"abort", "error"})
"""What a server says of a reply that neither its model nor a limit has ended: vLLM's, for one, of
all that are under way when its engine is told to end."""

FAILURES = (httpx.HTTPError, RuntimeError, LookupError, ValueError, TypeError)
"""Of asking (a client that is closed raises RuntimeError) and of reading what came."""


def address(url: str) -> httpx.URL | None:
    """Return the address that `url` says; None where no server can have it."""
    try:
        place = httpx.URL(url)
        place.host.encode("idna")  # as a connection does, whose UnicodeError nobody expects
    except (httpx.InvalidURL, UnicodeError):
        return None
    return place if place.scheme in {"http", "https"} and place.host else None


def named(name: str) -> tuple[str, str] | None:
    """Return the address and the model of `URL#MODEL`; None where it is not of that form.

    Raises:
        UserError: It has a password in it, which would be written down.
    """
    url, _, model = name.partition("#")
    place = address(url)
    if place and place.userinfo:
        raise UserError(f"{place.host}: no password goes into an address; keys are in variables")
    return (url.rstrip("/"), model) if place and model else None


def key_header(*variables: str) -> dict[str, str]:
    """Return the header that shows the key of the first environment variable that has one.

    Raises:
        UserError: It is no key; does not show it.
    """
    for variable in variables:
        key = os.environ.get(variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{variable}: must be of printable ASCII characters, as keys are")
        if key:
            return {"Authorization": f"Bearer {key}"}
    return {}


def post(url: str, body: dict[str, Any], variable: str, read: Callable[[Any], T]) -> T:
    """Send one request and return what `read` makes of its reply's JSON.

    Raises:
        UserError: There was none, or not what is read; names the address.
    """
    headers, patience = key_header(variable), Patience(url, variable)
    while True:
        try:
            reply = httpx.post(url, json=body, headers=headers, timeout=120)
            return read(reply.raise_for_status().json())
        except FAILURES as error:
            seconds = patience.pause_after(error)
        print(f"{url}: has no answer yet, asking again in {seconds:g} s", file=sys.stderr)
        time.sleep(seconds)


def content(choice: Any) -> str:
    """Return the text of one choice of a chat completion.

    Raises:
        LookupError, TypeError: It is none.
        ValueError: The server broke it off.
    """
    text = str(choice["message"]["content"] or "")
    if choice.get("finish_reason") in BROKEN_OFF:
        raise ValueError("it broke its reply off")
    return text


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the server-sent events of a response; those without a name are called `message`."""
    event, rest = "message", b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")  # not at the other ends of lines in Unicode
        for line in lines:
            name, _, value = line.decode("utf-8").rstrip("\r").partition(":")
            if name == "event":
                event = value.strip()
            elif name == "data" and value.strip() != "[DONE]":
                yield event, json.loads(value)
                event = "message"


def complaint(body: Any) -> str:
    """Return what a server's error says, in whatever form."""
    told = body.get("error", body) if isinstance(body, dict) else body
    return str(told.get("message", told) if isinstance(told, dict) else told)


class Patience:
    """How long one request is tried: while the server is busy, and after a few failures."""

    def __init__(self, url: str, variable: str) -> None:
        """Name the address in messages, and where a key is refused its variable as well."""
        self._url, self._variable = url, variable
        self._pauses, self._busy_until = list(PAUSES_S), time.monotonic() + LONGEST_BUSY_S

    def pause_after(self, error: Exception) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            UserError: There is none: another would meet the same, or there were enough.
        """
        reply = error.response if isinstance(error, httpx.HTTPStatusError) else None
        is_busy = reply is not None and reply.status_code in BUSY
        if reply is not None and is_busy and time.monotonic() < self._busy_until:
            return _seconds(reply.headers.get("retry-after", ""))
        if self._pauses and (reply is None or reply.status_code not in LASTING):
            return self._pauses.pop(0)
        raise UserError(f"{self._url}: {_told(error, self._variable)}") from None


def _seconds(retry_after: str) -> float:
    with suppress(ValueError):
        return min(max(0.1, float(retry_after)), 60.0)  # in this order NaN is 0.1
    return 2.0


def _told(error: Exception, variable: str) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        more = f"; is {variable} right?" if status in {401, 403} else ""
        with suppress(ValueError):
            more = f" ({complaint(error.response.json())[:200]}){more}"
        return f"{status} {error.response.reason_phrase}".rstrip() + more
    if isinstance(error, LookupError | TypeError):
        return "its reply has not OpenAI's form"
    return str(error) or type(error).__name__
