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
from types import SimpleNamespace

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
from panjue.prompts.render import TEMPLATE_ARGS
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker
from panjue.serve.engine import (
    AsyncEngineArgs,
    Engine,
    FlexibleArgumentParser,
    LoRAModulePath,
    Unbroken,
    UsageContext,
    answered,
    build_app,
    engine_settings,
    init_app_state,
    make_arg_parser,
    on_cpu,
    start,
    told,
)
from panjue.serve.guard import Guard, Rules
from panjue.serve.judge import Judge
from panjue.serve.judgments import Judgments
from panjue.serve.settings import (
    BASE,
    LOOPBACK,
    NAME,
    OF_VLLMS_SERVER,
    SERVER_OURS,
    ServeConfig,
    serve_settings,
    server_key,
    trained_folder,
)
from panjue.serve.trained import Served, served_model

PROGRESS_S = 5.0
WATCH_S = 1.0
IDLE_S = 5.0
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
    def log(self) -> Path:
        """Return the file with the engine's output."""
        return self.config.run / "engine.log"


def make_service(config: ServeConfig) -> Service:
    """Read what is served, and merge it if need be; the engine is not started yet."""
    task, trained = load_task(config.task), trained_folder(config)
    if task.by_hand is None:
        raise UserError(f"task: {config.task!r} cannot be asked by hand, it has no 'by_hand'")
    labels = load_labels(trained / "labels.json")
    max_tokens = config.max_tokens or read_json(trained / "manifest.json")["max_tokens"]
    texts = read_law(config.law) if config.law else {}
    served = served_model(trained, config.adapter, config.base)
    fitted = None if config.adapter == "none" else trained
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
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    try:
        await asyncio.wait((engine, answering), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await answering
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
        pause, came_up = 1.0, False
        while True:
            began, mark = time.monotonic(), self._service.log.stat().st_size
            try:
                async with self._app() as (app, llm):
                    self._guard.app, came_up = app, True
                    on_ready(f"{time.monotonic() - began:.0f} s")
                    await self._until_dead(llm)
            except UserError as error:
                why = complaint(self._service.log, mark) or str(error)
                if not came_up:
                    raise UserError(f"engine: {why} (all of it: {self._service.log})") from None
            pause = 1.0 if time.monotonic() - began > 2 * LONGEST_PAUSE_S else pause
            say(f"the engine ended: {why}; starting it again in {pause:.0f} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _app(self) -> AsyncIterator[tuple[FastAPI, Unbroken]]:
        """Start an engine and build vLLM's app over it, with our routes; end both."""
        service, args = self._service, arguments(self._service)
        llm = await started(args)
        try:
            tasks = await llm.get_supported_tasks()
            app = build_app(args, tasks, llm.model_config)
            # vLLM's handler of a dead engine's errors tells its server to end: we see to that.
            app.state.server = SimpleNamespace()
            await init_app_state(llm, app.state, args, tasks)
            lora = app.state.openai_serving_models.lora_requests.get(NAME)
            judge = Judge(service.asker, service.decider, Engine(llm, lora))
            Judgments(judge, service.config.task, service.law).attach(app)
            async with app.router.lifespan_context(app):
                try:
                    yield app, llm
                finally:
                    self._guard.app = None
                    await self._guard.idle(IDLE_S)  # who asked is told that the engine died
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


def arguments(service: Service) -> Namespace:
    """Return the arguments of vLLM's server."""
    config, served = service.config, service.served
    given = {
        "max_num_queued_reqs": config.in_flight,
        "default_chat_template_kwargs": TEMPLATE_ARGS,
        **config.engine,
        **engine_settings(served, config.seed, service.asker.max_tokens),
        "model": str(served.model),
        "served_model_name": [BASE if served.adapter else NAME],
        "generation_config": "vllm",  # not the hub's: a repetition penalty would skew the answers
        "disable_fastapi_docs": True,
    }
    if served.adapter:
        given["lora_modules"] = [LoRAModulePath(name=NAME, path=str(served.adapter))]
    defaults = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    return Namespace(**{**vars(defaults), **given})


async def started(args: Namespace) -> Unbroken:
    """Start an engine in a thread: clients who ask meanwhile are told to come back.

    Raises:
        UserError: It does not start with these settings.
    """
    with told():
        engine_args = AsyncEngineArgs.from_cli_args(args)
        context = UsageContext.OPENAI_API_SERVER
        starting = asyncio.ensure_future(asyncio.to_thread(start, engine_args, context))
        try:
            llm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _ended(starting)
            raise
    await answered(llm, llm.get_supported_tasks())
    return llm


async def _ended(starting: asyncio.Future[Unbroken]) -> None:
    """End an engine that is starting: its thread gives up when its processes are gone."""
    while not starting.done():
        for process in multiprocessing.active_children():
            process.kill()
        await asyncio.wait([starting], timeout=WATCH_S)
    if starting.exception() is None:
        starting.result().shutdown()


def complaint(log: Path, mark: int) -> str:
    """Return the line of the engine's output behind `mark` that says best why it ended, if any."""
    with log.open("rb") as file:
        file.seek(mark)
        output = file.read().decode("utf-8", errors="replace")
    # The first error is the cause, later ones say that the engine did not start because of it.
    line = re.search(r"^.*\b\w*[Ee]rror: \S.*$", output, re.MULTILINE)
    cause = line[0] if line else ""
    return re.sub(r"^(\(\w+ pid=\d+\) )?([A-Z]+ [\d: -]+\[[^\]]*\] )?", "", cause).strip()
