"""`panjue serve`: vLLM's own server in this process, from start to drained stop."""

import asyncio
import contextlib
import errno
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from rich.console import Console
from starlette.types import ASGIApp

from panjue.eval.decide import Decider, fitted_decider
from panjue.prompts.config import check_known, check_ours
from panjue.prompts.errors import TWICE_S, UserError
from panjue.prompts.files import read_json
from panjue.prompts.labels import load_labels
from panjue.prompts.law import read_law
from panjue.prompts.task import load_task
from panjue.serve.app import arguments, vllms_app
from panjue.serve.ask import Asker
from panjue.serve.endpoint import Endpoint
from panjue.serve.engine import (
    AsyncEngineArgs,
    Engine,
    EngineDeadError,
    Unbroken,
    UsageContext,
    answered,
    on_cpu,
    ready,
    start,
    told,
)
from panjue.serve.guard import Guard, Rules
from panjue.serve.judge import Judge
from panjue.serve.judgments import Judgments
from panjue.serve.settings import (
    LOOPBACK,
    NAME,
    OF_PLAIN_VLLM,
    OF_VLLMS_SERVER,
    SERVER_OURS,
    ServeConfig,
    serve_settings,
    server_key,
    trained_folder,
)
from panjue.serve.source import Source
from panjue.serve.trained import Served, served_model

PROGRESS_S = 5.0
WATCH_S = 1.0
IDLE_S = 5.0
LAST_WORDS = 2**16
"""Bytes of the log that may say why an engine ended that was up."""

LONGEST_PAUSE_S = 60.0

Say = Callable[[str], None]


def main(path: Path, overrides: Sequence[str] = ()) -> None:
    """Serve as the config at `path` says, until stopped."""
    serve(serve_settings(path, overrides))


def serve(config: ServeConfig) -> None:
    """Start everything and answer until SIGTERM or Ctrl-C; then finish what runs, and stop.

    Raises:
        UserError: A file or setting is wrong, the port is in use, or the engine does not start.
    """
    console = Console(soft_wrap=True, highlight=False)
    key = server_key(config.host)
    for name in OF_PLAIN_VLLM:
        os.environ.pop(name, None)
    check_ours("engine", config.engine, SERVER_OURS)
    known = [*(f.name for f in fields(AsyncEngineArgs)), *OF_VLLMS_SERVER]
    check_known("engine", config.engine, known)
    with bound(config.host, config.port) as listener:
        console.print("preparing the model")
        service = make_service(config)
        guard = Guard(rules(config, service, key))
        with output_to(config.run / "engine.log") as terminal:
            uvloop.run(run(service, guard, listener, terminal))


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Take the address before anything slow begins; nobody can connect before it listens.

    Raises:
        UserError: It is taken, or is none of this machine.
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
def output_to(log: Path) -> Iterator[Console]:
    """Append what this process and its engine print to `log`; yield a console of the terminal.

    Raises:
        UserError: It cannot be written to.
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


@dataclass(frozen=True)
class Service:
    """What is served.

    Attributes:
        config: The settings.
        asker: Makes questions.
        decider: Decides; None for tasks without.
        law: Article -> its text, to show beside the label.
        served: Folders of the model and of the adapter beside it.
    """

    config: ServeConfig
    asker: Asker
    decider: Decider | None
    law: Mapping[str, str]
    served: Served

    @property
    def max_tokens(self) -> int:
        """Return how long prompt and reply may be together."""
        return self.asker.max_tokens

    @property
    def log(self) -> Path:
        """Return the file with the engine's output."""
        return self.config.run / "engine.log"

    def routes(self, source: Source[Any]) -> Judgments:
        """Return our routes over what answers."""
        judge = Judge(self.asker, self.decider, source)
        return Judgments(judge, self.config.task, self.law, self.config.in_flight)


def make_service(config: ServeConfig) -> Service:
    """Read what is served, and merge it if need be; the engine is not started yet."""
    task, trained = load_task(config.task), trained_folder(config)
    if task.by_hand is None:
        raise UserError(f"task: {config.task!r} cannot be asked by hand, it has no 'by_hand'")
    labels = load_labels(trained / "labels.json")
    max_tokens = config.max_tokens or read_json(trained / "manifest.json")["max_tokens"]
    texts = read_law(config.law) if config.law else {}
    adapter = "none" if config.endpoint else config.adapter
    served = served_model(trained, adapter, config.base)
    fitted = None if adapter == "none" else trained
    return Service(
        config,
        Asker(task, labels, served.model, max_tokens),
        fitted_decider(task, labels, fitted) if task.decides else None,
        {article: texts[article] for article in labels.names("articles") if article in texts},
        served,
    )


def rules(config: ServeConfig, service: Service, key: str | None) -> Rules:
    """Return what holds for every request."""
    return Rules(
        service.asker.tokenizer,
        key,
        local=config.host in LOOPBACK,
        adapter=service.served.adapter is not None,
        # A seed per request kills vLLM's engine on a CPU when a prefill is cut in pieces.
        seeds=not on_cpu(),
        in_flight=config.in_flight,
        timeout_s=config.timeout_s,
    )


class Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers: they kill the process when it has drained."""

    _asked = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield

    def stop(self) -> None:
        """Take no more connections and finish what runs; asked again, leave it.

        A signal that follows at once is the first once more.
        """
        self.force_exit = self.should_exit and time.monotonic() - self._asked > TWICE_S
        if not self.should_exit:
            self.should_exit, self._asked = True, time.monotonic()


def http_server(app: ASGIApp, drain_s: int) -> Server:
    """Return a server that answers through `app`."""
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
    """Run engine and HTTP server side by side until one of them ends."""
    server = http_server(guard, service.config.drain_s)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    ready = f"ready: {url}/ after {{}} (Ctrl-C stops)"
    lives = Lives(service, guard)
    engine = asyncio.create_task(
        lives.run(lambda took: console.print(ready.format(took)), console.print)
    )
    showing = asyncio.create_task(progress(guard, console))
    answering = asyncio.create_task(server.serve(sockets=[listener]))

    def stop() -> None:
        if not server.should_exit:
            console.print("stopping: what runs is finished; a second signal ends it at once")
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await asyncio.wait((engine, answering), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        try:
            await answering
        except OSError as error:  # both of two that bind before they listen got the port
            raise UserError(f"port {port}: {error.strerror}; set port=…") from None
        if engine.done():
            engine.result()
    finally:
        for task in (engine, showing):
            task.cancel()
        await asyncio.gather(engine, showing, return_exceptions=True)


async def progress(guard: Guard, console: Console) -> None:
    """Say every few seconds that the engine is still starting."""
    began = time.monotonic()
    while guard.app is None:
        console.print(f"starting the engine, {time.monotonic() - began:.0f} s …")
        await asyncio.sleep(PROGRESS_S)


class Lives:
    """Starts the engine and vLLM's app over it, and starts them again with growing pauses."""

    def __init__(self, service: Service, guard: Guard) -> None:
        """Take what is served, and what stands before it."""
        self._service, self._guard = service, guard

    async def run(self, on_ready: Say, say: Say) -> None:
        """Keep the engine running until cancelled.

        Args:
            on_ready: Called each time that it can answer, with how long that took.
            say: Called with each misfortune and what is done about it.

        Raises:
            UserError: It never came up.
        """
        if self._service.config.endpoint:
            async with self._over_endpoint(self._service.config.endpoint) as self._guard.app:
                on_ready("0 s")
                await asyncio.Event().wait()
        pause, came_up = 1.0, False
        while True:
            began, mark, is_up = time.monotonic(), size(self._service.log), False
            try:
                async with self._over_engine() as (app, llm):
                    self._guard.app, came_up, is_up = app, True, True
                    on_ready(f"{time.monotonic() - began:.0f} s")
                    await self._until_dead(llm)
            except Exception as error:
                if not (came_up or isinstance(error, UserError)):
                    raise
                mark = max(0, size(self._service.log) - LAST_WORDS) if is_up else mark
                printed = complaint(self._service.log, mark)
                more = f" (all of it: {self._service.log})" if printed else ""
                why = printed or str(error).removeprefix("engine: ")
                if not came_up:
                    raise UserError(f"engine: {why}{more}") from None
            pause = 1.0 if time.monotonic() - began > 2 * LONGEST_PAUSE_S else pause
            say(f"the engine ended: {why}; starting it again in {pause:.0f} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _over_endpoint(self, name: str) -> AsyncIterator[FastAPI]:
        """Build an app of our routes alone, over a server that is none of ours."""
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.get("/health")(lambda: None)
        async with contextlib.aclosing(Endpoint(name)) as endpoint:
            self._service.routes(endpoint).attach(app)
            yield app

    @contextlib.asynccontextmanager
    async def _over_engine(self) -> AsyncIterator[tuple[FastAPI, Unbroken]]:
        """Start an engine and build vLLM's app over it, with our routes; end both."""
        with told():
            args = arguments(self._service.config, self._service.served, self._service.max_tokens)
            llm = await started(args)
        try:
            with told():
                app = await vllms_app(llm, args)
            models = app.state.openai_serving_models
            lora = models.lora_requests[NAME] if self._service.served.adapter else None
            self._service.routes(Engine(llm, lora)).attach(app)
            async with app.router.lifespan_context(app):
                try:
                    yield app, llm
                finally:
                    self._guard.app = None
                    llm.output_processor.propagate_error(EngineDeadError())  # of one that hangs
                    await self._guard.idle(IDLE_S)  # who asked is told
        finally:
            await asyncio.to_thread(llm.shutdown)

    async def _until_dead(self, llm: Unbroken) -> None:
        """Watch a running engine.

        Raises:
            UserError: It died, or hangs: it is silent for as long as a request may take.
        """
        while True:
            await answered(llm, llm.is_sleeping(), self._service.config.timeout_s)
            await asyncio.sleep(WATCH_S)


async def started(args: Namespace) -> Unbroken:
    """Start an engine in a thread: clients who ask meanwhile are told to come back.

    Raises:
        UserError: It does not start with these settings.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    context = UsageContext.OPENAI_API_SERVER
    starting = asyncio.ensure_future(asyncio.to_thread(start, engine_args, context))
    try:
        llm = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _ended(starting)
        raise
    return await ready(llm)


async def _ended(starting: asyncio.Future[Unbroken]) -> None:
    """End an engine that is starting: its thread gives up when its processes are gone."""
    while not starting.done():
        for process in multiprocessing.active_children():
            process.kill()
        await asyncio.wait([starting], timeout=WATCH_S)
    if starting.exception() is None:
        starting.result().shutdown()


def size(log: Path) -> int:
    """Return how long a log is; 0 where somebody has moved it away."""
    return log.stat().st_size if log.exists() else 0


def complaint(log: Path, mark: int) -> str:
    """Return the line of the engine's output behind `mark` that says best why it ended, if any."""
    output = ""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(mark)
        output = file.read().decode("utf-8", errors="replace")
    # The first error is the cause, later ones say that the engine did not start because of it.
    line = re.search(r"^.*\b\w*[Ee]rror: \S.*$", output, re.MULTILINE)
    cause = line[0] if line else ""
    return re.sub(r"^(\(\w+ pid=\d+\) )?([A-Z]+ [\d: -]+\[[^\]]*\] )?", "", cause).strip()
