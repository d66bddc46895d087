"""What a connection to the server may do with its time, over real sockets."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from panjue.serve import http
from panjue.serve.http import TimedHttp

LIMIT_S = 1.0
REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"


async def slow_app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body, later than headers may come."""
    body = b""
    while len(body) < 4:
        body += (await receive())["body"]
    await asyncio.sleep(2 * LIMIT_S)
    await PlainTextResponse(body)(scope, receive, send)


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return a connection to a server that gives headers less than a second."""
    monkeypatch.setattr(http, "HEADERS_TIMEOUT_S", LIMIT_S)
    config = uvicorn.Config(slow_app, http=TimedHttp, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), timeout=60) as opened:
                yield opened
        finally:
            server.should_exit = True
            thread.join()


def is_closed(connection: socket.socket) -> bool:
    """Say whether the other side has closed it; what it sent before is read."""
    connection.settimeout(LIMIT_S / 10)
    try:
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def send_slowly(connection: socket.socket) -> None:
    """Send headers that have no end, a byte at a time, until the connection is closed."""
    for byte in b"POST / HTTP/1.1\r\nX: " + b"x" * 1000:
        try:
            connection.send(bytes([byte]))
        except ConnectionError:
            return
        if is_closed(connection):
            return
    pytest.fail("nobody closed it")


def answer(connection: socket.socket) -> bytes:
    received = b""
    connection.settimeout(60)
    while not received.endswith(b"body"):
        piece = connection.recv(1000)
        assert piece
        received += piece
    return received


def test_headers_that_never_end_do_not_hold_a_connection(connection: socket.socket) -> None:
    send_slowly(connection)


def test_who_says_nothing_does_not_either(connection: socket.socket) -> None:
    assert connection.recv(1000) == b""


def test_a_request_takes_as_long_as_it_takes_and_the_next_one_is_watched_again(
    connection: socket.socket,
) -> None:
    for _ in range(2):
        connection.send(REQUEST)
        time.sleep(2 * LIMIT_S)  # bodies have a limit of their own
        connection.send(b"body")
        assert answer(connection).startswith(b"HTTP/1.1 200")
    send_slowly(connection)
