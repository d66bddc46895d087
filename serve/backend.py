"""The HTTP client of our own vLLM, which listens on a socket file."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

HEALTH_S = 5.0
"""How long a healthy engine may take to say so."""


class Unavailable(Exception):
    """The engine does not answer now; it may later."""


class Rejected(Exception):
    """The engine refused a request; `status` and `body` are what it said."""

    def __init__(self, status: int, body: bytes) -> None:
        """Keep what was said."""
        super().__init__(f"status {status}")
        self.status, self.body = status, body


class Backend:
    """Requests to vLLM's server. A request whose caller is cancelled is aborted in the engine."""

    def __init__(self, place: Path, timeout_s: float) -> None:
        """Connect on first use to the socket file `place`, with a new key.

        A request may take `timeout_s` from its first byte to its last.
        """
        self.place, self.key = place, secrets.token_urlsafe(32)
        self._headers = {"Authorization": f"Bearer {self.key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def send(
        self, method: str, path: str, payload: Mapping[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and close its connection with the block, read to the end or not.

        Raises:
            Unavailable: The engine is down or took too long.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=self._timeout,
                # The gateway counts its requests itself. vLLM closes a connection after 5 s.
                connector=aiohttp.UnixConnector(str(self.place), limit=0, keepalive_timeout=4),
                read_bufsize=2**20,  # an event with its probabilities is one line
            )
        try:
            async with self._session.request(
                method, f"http://engine{path}", json=payload
            ) as response:
                try:
                    yield response
                finally:
                    if not response.content.at_eof():
                        response.close()  # else vLLM would go on writing for nobody
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(str(error) or type(error).__name__) from None

    async def whole(self, path: str, payload: Mapping[str, Any]) -> bytes:
        """Return the body of the answer to a POST.

        Raises:
            Unavailable: As for `send`, or the engine failed.
            Rejected: It refused.
        """
        async with self.send("POST", path, payload) as response:
            await check(response)
            return await response.read()

    async def events(
        self, path: str, payload: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the server-sent events of a POST.

        Raises:
            Unavailable: As for `send`, or the engine failed half way.
            Rejected: It refused.
        """
        async with self.send("POST", path, payload) as response:
            await check(response)
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise Unavailable("the engine failed")
                    yield event

    async def is_healthy(self) -> bool:
        """Say whether the engine is up and able to answer."""
        try:
            async with asyncio.timeout(HEALTH_S), self.send("GET", "/health") as response:
                return response.status == 200
        except (Unavailable, TimeoutError):
            return False

    async def close(self) -> None:
        """Close all connections."""
        if self._session:
            await self._session.close()


async def check(response: aiohttp.ClientResponse) -> None:
    """Raise `Rejected` for a client's mistake and `Unavailable` for the engine's failure."""
    if response.status >= 500:
        raise Unavailable(f"the engine failed with status {response.status}")
    if response.status >= 400:
        raise Rejected(response.status, await response.read())
