"""`panjue serve`: run vLLM's server in this process until it is stopped."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import uvicorn
import uvloop
from rich.console import Console
from starlette.types import ASGIApp

from panjue.prompts.plumbing.config import check_known, check_managed
from panjue.prompts.plumbing.errors import SIGNAL_DEBOUNCE_S, UserError
from panjue.serve.engine import AsyncEngineArgs, on_cpu
from panjue.serve.guard import Guard, Rules
from panjue.serve.lifecycle import Lifecycle
from panjue.serve.service import Service, make_service
from panjue.serve.settings import (
    LOOPBACK,
    REMOVED_VARIABLES,
    SERVER_ARGUMENTS,
    SERVER_MANAGED_SETTINGS,
    ServeConfig,
    serve_settings,
    server_key,
)

PROGRESS_S = 5.0


def main(path: Path, overrides: Sequence[str] = ()) -> None:
    """Serve with the config at `path` until stopped."""
    serve(serve_settings(path, overrides))


def serve(config: ServeConfig) -> None:
    """Start the engine and the server; on SIGTERM or Ctrl-C finish running requests and stop.

    Raises:
        UserError: A file or setting is wrong, the port is in use, or the engine does not start.
    """
    console = Console(soft_wrap=True, highlight=False)
    key = server_key(config.host)
    for name in REMOVED_VARIABLES:
        os.environ.pop(name, None)
    check_managed("engine", config.engine, SERVER_MANAGED_SETTINGS)
    known = [*(f.name for f in fields(AsyncEngineArgs)), *SERVER_ARGUMENTS]
    check_known("engine", config.engine, known)
    with bound_socket(config.host, config.port) as listener:
        console.print("preparing the model")
        service = make_service(config)
        guard = Guard(rules(config, service, key))
        with redirect_output(config.run / "engine.log") as terminal:
            uvloop.run(run(service, guard, listener, terminal))


@contextlib.contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket bound to the address; clients can connect only after `listen` is called.

    It is bound before the slow start, so that a port in use is an error at once.

    Raises:
        UserError: The port is in use, or the address does not belong to this machine.
    """
    try:
        family, kind, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise UserError(f"host={host}: {error.strerror or error}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port}: is in use by another program; set port=…") from None
            raise UserError(f"{host}:{port}: {error.strerror or error}") from None
        yield listener


@contextlib.contextmanager
def redirect_output(log: Path) -> Iterator[Console]:
    """Redirect the output of this process and its engine to `log`; yield a console of the terminal.

    Raises:
        UserError: The log cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError as error:
        raise UserError(f"{log}: {error.strerror}") from None
    with file, os.fdopen(os.dup(1), "w") as out, os.fdopen(os.dup(2), "w") as err:
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield Console(file=out, soft_wrap=True, highlight=False)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)


def rules(config: ServeConfig, service: Service, key: str | None) -> Rules:
    """Return the rules for all requests."""
    return Rules(
        service.asker.tokenizer,
        key,
        local=config.host in LOOPBACK,
        adapter=service.served.adapter is not None,
        # On a CPU, vLLM's engine crashes if a request has a seed and its prefill is chunked.
        seeds=not on_cpu(),
        in_flight=config.in_flight,
        timeout_s=config.timeout_s,
    )


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which end the process after the shutdown."""

    _stopped_at = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield

    def stop(self) -> None:
        """Accept no more connections and finish running requests; a second call aborts them.

        A second call within `SIGNAL_DEBOUNCE_S` of the first is ignored.
        """
        self.force_exit = (
            self.should_exit and time.monotonic() - self._stopped_at > SIGNAL_DEBOUNCE_S
        )
        if not self.should_exit:
            self.should_exit, self._stopped_at = True, time.monotonic()


def http_server(app: ASGIApp, drain_s: int) -> Server:
    """Return an HTTP server of `app`."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s,
    )
    return Server(config)


async def run(service: Service, guard: Guard, listener: socket.socket, console: Console) -> None:
    """Run the engine and the HTTP server until one of them ends."""
    server = http_server(guard, service.config.drain_s)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def on_ready(duration: str) -> None:
        console.print(f"ready: {url}/ after {duration} (Ctrl-C stops)")

    engine = asyncio.create_task(Lifecycle(service, guard).run(on_ready, console.print))
    reporting = asyncio.create_task(progress(guard, console))
    serving = asyncio.create_task(server.serve(sockets=[listener]))

    def stop() -> None:
        if not server.should_exit:
            console.print("stopping after the running requests; a second signal stops at once")
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await asyncio.wait((engine, serving), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        try:
            await serving
        except OSError as error:  # two processes can bind a port, but only one can listen
            raise UserError(f"port {port}: {error.strerror}; set port=…") from None
        if engine.done():
            engine.result()
    finally:
        for task in (engine, reporting):
            task.cancel()
        await asyncio.gather(engine, reporting, return_exceptions=True)


async def progress(guard: Guard, console: Console) -> None:
    """Print every `PROGRESS_S` seconds that the engine is still starting."""
    began = time.monotonic()
    while guard.app is None:
        console.print(f"starting the engine, {time.monotonic() - began:.0f} s …")
        await asyncio.sleep(PROGRESS_S)
