"""Requests to an OpenAI-compatible server: address, key, retries.

OpenAI's own client is not used, because it has only one retry limit. A limit of ten minutes, which
a busy server may need, would also delay the error for a mistyped address by ten minutes.
"""

import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx

from panjue.prompts.plumbing.endpoint import parse_address, parse_endpoint
from panjue.prompts.plumbing.errors import UserError

__all__ = ("parse_address", "parse_endpoint")  # for callers that have not moved yet

PAUSES_S = (1, 4, 16)
"""Seconds to wait before each retry of a failed request."""

BUSY_STATUSES = frozenset({429, 503})
MAX_BUSY_S = 600
"""Maximum seconds to wait for a busy server."""

REFUSED_STATUSES = frozenset({400, 413, 422, 501})
PERMANENT_STATUSES = REFUSED_STATUSES | {401, 403, 404}
"""HTTP statuses for which a retry is useless: it would get the same status."""

ABORT_REASONS = frozenset({"abort", "error"})
"""Finish reasons of a reply that was ended neither by the model nor by a token limit. vLLM sends
them for running requests when its engine is stopped."""

REQUEST_ERRORS = (httpx.HTTPError, RuntimeError, LookupError, ValueError, TypeError)
"""Exceptions of sending a request (RuntimeError: the client is closed) and of reading its reply."""


def key_header(*variables: str) -> dict[str, str]:
    """Return the header with the key of the first environment variable that is set."""
    for variable in variables:
        key = os.environ.get(variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{variable}: must be of printable ASCII characters")
        if key:
            return {"Authorization": f"Bearer {key}"}
    return {}


def reply_text(choice: Any) -> str:
    """Return the text of one choice of a chat completion.

    Raises:
        LookupError, TypeError: `choice` does not have this format.
        ValueError: The server aborted the reply.
    """
    text = str(choice["message"]["content"] or "")
    if choice.get("finish_reason") in ABORT_REASONS:
        raise ValueError("the server aborted its reply")
    return text


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the name and data of each server-sent event; an event without a name is a `message`."""
    event, rest = "message", b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")  # only at newlines: data may contain U+2028
        for line in lines:
            name, _, value = line.decode("utf-8").rstrip("\r").partition(":")
            if name == "event":
                event = value.strip()
            elif name == "data" and value.strip() != "[DONE]":
                yield event, json.loads(value)
                event = "message"


def error_message(body: Any) -> str:
    """Return the message of a server's error response, in any of the usual formats."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


class RetryPolicy:
    """The retry policy of one request: wait for a busy server, retry other errors a few times."""

    def __init__(self, url: str, variable: str) -> None:
        """Set the address and the key's environment variable; error messages name both."""
        self._url, self._variable = url, variable
        self._pauses, self._busy_until = list(PAUSES_S), time.monotonic() + MAX_BUSY_S

    def pause_after(self, error: Exception) -> float:
        """Return the seconds to wait before the next try."""
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
            hint = f" ({error_message(error.response.json())[:200]}){hint}"
        return f"{status} {error.response.reason_phrase}".rstrip() + hint
    if isinstance(error, LookupError | TypeError):
        return "its reply is not in OpenAI's format"
    return str(error) or type(error).__name__
