"""Requests to an OpenAI-compatible server: address, key, retries.

Not OpenAI's own client: it has one retry limit for both busy servers and wrong addresses, so that
waiting ten minutes for a busy server would mean ten minutes for a typing error.
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
"""Pauses before the retries of a failed request."""

BUSY_STATUSES = frozenset({429, 503})
LONGEST_BUSY_S = 600
"""Maximum time to wait for a busy server."""

REFUSED = frozenset({400, 413, 422, 501})
PERMANENT_STATUSES = REFUSED | {401, 403, 404}
"""HTTP statuses that a retry would get again."""

ABORT_REASONS = frozenset({"abort", "error"})
"""Finish reasons of a reply that neither the model nor a limit has ended: vLLM sends them for
running requests when its engine is stopped."""

FAILURES = (httpx.HTTPError, RuntimeError, LookupError, ValueError, TypeError)
"""Errors of a request (a closed client raises RuntimeError) and of reading the reply."""


def address(url: str) -> httpx.URL | None:
    """Return `url` parsed; None if it is no valid address of a server."""
    try:
        place = httpx.URL(url)
        place.host.encode("idna")  # a connection would raise UnicodeError here
    except (httpx.InvalidURL, UnicodeError):
        return None
    return place if place.scheme in {"http", "https"} and place.host else None


def named(name: str) -> tuple[str, str] | None:
    """Return the address and the model of `URL#MODEL`; None if it is not of that form.

    Raises:
        UserError: The address has a password, which would be saved in files.
    """
    url, _, model = name.partition("#")
    place = address(url)
    if place and place.userinfo:
        raise UserError(f"{place.host}: no password in an address; set its key variable instead")
    return (url.rstrip("/"), model) if place and model else None


def key_header(*variables: str) -> dict[str, str]:
    """Return the header with the key of the first environment variable that is set.

    Raises:
        UserError: The key has invalid characters; the message does not show it.
    """
    for variable in variables:
        key = os.environ.get(variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{variable}: must be of printable ASCII characters")
        if key:
            return {"Authorization": f"Bearer {key}"}
    return {}


def post(url: str, body: dict[str, Any], variable: str, read: Callable[[Any], T]) -> T:
    """Send one request, with retries, and return `read` of the JSON of the response.

    Raises:
        UserError: There is no response, or `read` fails; names the address.
    """
    headers, patience = key_header(variable), Patience(url, variable)
    while True:
        try:
            response = httpx.post(url, json=body, headers=headers, timeout=120)
            return read(response.raise_for_status().json())
        except FAILURES as error:
            seconds = patience.pause_after(error)
        print(f"{url}: no answer yet, next try in {seconds:g} s", file=sys.stderr)
        time.sleep(seconds)


def content(choice: Any) -> str:
    """Return the text of one choice of a chat completion.

    Raises:
        LookupError, TypeError: It is no such choice.
        ValueError: The server aborted the reply.
    """
    text = str(choice["message"]["content"] or "")
    if choice.get("finish_reason") in ABORT_REASONS:
        raise ValueError("the server aborted its reply")
    return text


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield (name, data) of the server-sent events of a response; the default name is `message`."""
    event, rest = "message", b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")  # not at other line separators of Unicode
        for line in lines:
            name, _, value = line.decode("utf-8").rstrip("\r").partition(":")
            if name == "event":
                event = value.strip()
            elif name == "data" and value.strip() != "[DONE]":
                yield event, json.loads(value)
                event = "message"


def complaint(body: Any) -> str:
    """Return the message of a server's error response, in any of the usual formats."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


class Patience:
    """The retry policy of one request: wait while the server is busy, retry a few failures."""

    def __init__(self, url: str, variable: str) -> None:
        """Set the address and the key's environment variable, both for messages."""
        self._url, self._variable = url, variable
        self._pauses, self._busy_until = list(PAUSES_S), time.monotonic() + LONGEST_BUSY_S

    def pause_after(self, error: Exception) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            UserError: The error is permanent, or there are no retries left.
        """
        response = error.response if isinstance(error, httpx.HTTPStatusError) else None
        is_busy = response is not None and response.status_code in BUSY_STATUSES
        if response is not None and is_busy and time.monotonic() < self._busy_until:
            return _seconds(response.headers.get("retry-after", ""))
        if self._pauses and (response is None or response.status_code not in PERMANENT_STATUSES):
            return self._pauses.pop(0)
        raise UserError(f"{self._url}: {_reason(error, self._variable)}") from None


def _seconds(retry_after: str) -> float:
    with suppress(ValueError):
        return min(max(0.1, float(retry_after)), 60.0)  # in this order NaN gives 0.1
    return 2.0


def _reason(error: Exception, variable: str) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        hint = f"; is {variable} right?" if status in {401, 403} else ""
        with suppress(ValueError):
            hint = f" ({complaint(error.response.json())[:200]}){hint}"
        return f"{status} {error.response.reason_phrase}".rstrip() + hint
    if isinstance(error, LookupError | TypeError):
        return "its reply is not in OpenAI's format"
    return str(error) or type(error).__name__
