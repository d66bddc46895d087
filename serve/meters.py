"""What the gateway counts, for Prometheus."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = ("/", "/v1/judgments", "/v1/chat/completions", "/v1/models", "/v1/labels")
"""Paths that are counted by name; all others together, or clients could make any number."""

SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every response: the page loads nothing from elsewhere and stands in no frame."""


class Meters:
    """The meters behind `/metrics`."""

    def __init__(self) -> None:
        """Make them, at nought."""
        self.registry = CollectorRegistry()
        of: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("panjue_requests", "Requests", ["path", "status"], **of)
        self.seconds = Histogram("panjue_request_seconds", "To the last byte", ["path"], **of)
        self.question = Histogram(
            "panjue_question_seconds", "To fit and render a case and build its schema", **of
        )
        self.running = Gauge("panjue_requests_running", "Requests in the engine", **of)
        self.ready = Gauge("panjue_engine_ready", "1 where the engine can answer", **of)
        self.restarts = Gauge("panjue_engine_restarts", "Times it was started again", **of)


class Measured:
    """ASGI middleware: counts every request, times it, and adds the headers of `SECURITY`."""

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        """Stand in front of `app`."""
        self._app, self._meters = app, meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(SECURITY)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self._meters.requests.labels(path, str(status)).inc()
            self._meters.seconds.labels(path).observe(time.perf_counter() - started)
