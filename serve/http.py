"""uvicorn's HTTP/1.1, with a time limit for the headers of a request."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_TIMEOUT_S = 30.0


class TimedHttp(H11Protocol):
    """Closes a connection if the headers of a request do not arrive in time.

    Otherwise anyone who sends a byte now and then would keep a connection forever, and a process
    has only a limited number. Bodies have their own limit (serve.checks). An answer has no limit.
    """

    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_clock()

    def _watch(self) -> None:
        """Start the clock while headers are awaited, and stop it when they have arrived.

        It closes the connection when it ends.
        """
        if self.conn.their_state is not h11.IDLE:
            self._stop_clock()
        elif self._clock is None:
            self._clock = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)

    def _stop_clock(self) -> None:
        if self._clock:
            self._clock.cancel()
            self._clock = None
