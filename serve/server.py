"""`panjue serve`: the engine behind, the gateway in front, from start to drained stop."""

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import uvicorn
import uvloop
from rich.console import Console
from vllm.platforms import current_platform

from panjue.eval.decide import fitted_decider
from panjue.prompts.config import check_known, check_ours
from panjue.prompts.errors import TWICE_S, UserError
from panjue.prompts.files import read_json
from panjue.prompts.labels import load_labels
from panjue.prompts.law import read_law
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker
from panjue.serve.backend import Backend
from panjue.serve.engine import AsyncEngineArgs
from panjue.serve.gateway import Service, create_app
from panjue.serve.judge import Judge
from panjue.serve.orphans import guarded
from panjue.serve.settings import (
    LOOPBACK,
    OF_VLLMS_SERVER,
    SERVER_OURS,
    ServeConfig,
    serve_settings,
    server_key,
    trained_folder,
)
from panjue.serve.supervisor import Supervisor, supervisor
from panjue.serve.trained import served_model

PROGRESS_S = 5.0


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
    # vLLM's command line takes a word for what it begins: `trust_remote_cod` would switch that on.
    known = [*(f.name for f in fields(AsyncEngineArgs)), *OF_VLLMS_SERVER]
    check_known("engine", config.engine, known)
    with (
        bound(config.host, config.port) as listener,
        tempfile.TemporaryDirectory(prefix="panjue-") as private,  # of mode 0700
        guarded(),
    ):
        console.print("preparing the model")
        service = make_service(config, key, Path(private) / "engine")
        uvloop.run(run(config, service, listener, console))


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


def make_service(config: ServeConfig, key: str | None, place: Path) -> Service:
    """Return what the endpoints work with; the engine, to be at `place`, is not started yet."""
    task, trained = load_task(config.task), trained_folder(config)
    if task.by_hand is None:
        raise UserError(f"task: {config.task!r} cannot be asked by hand, it has no 'by_hand'")
    labels = load_labels(trained / "labels.json")
    max_tokens = config.max_tokens or read_json(trained / "manifest.json")["max_tokens"]
    served = served_model(trained, config.adapter, config.base)
    backend = Backend(place, config.timeout_s)
    config.run.mkdir(parents=True, exist_ok=True)
    log = config.run / "engine.log"
    engine = supervisor(served, config.engine, max_tokens, config.seed, log, backend)
    fitted = None if config.adapter == "none" else trained
    decider = fitted_decider(task, labels, fitted) if task.decides else None
    judge = Judge(Asker(task, labels, served.model, max_tokens), decider, backend)
    texts = read_law(config.law) if config.law else {}
    law = {article: texts[article] for article in labels.names("articles") if article in texts}
    # A seed per request kills vLLM's engine on a CPU when a prefill is cut in pieces.
    seeds = not current_platform.is_cpu()
    return Service(
        judge,
        config.task,
        engine,
        config.in_flight,
        key,
        law,
        seeds,
        local=config.host in LOOPBACK,
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


async def run(
    config: ServeConfig, service: Service, listener: socket.socket, console: Console
) -> None:
    """Run engine and gateway side by side until one of them ends."""
    # What torch and transformers brought lives as long as we: walked through by every full
    # collection, it took a third of each request's time and stopped all of them for 0.1 s.
    gc.collect()
    gc.freeze()
    server = Server(
        uvicorn.Config(
            create_app(service),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=config.drain_s,
        )
    )
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    ready = f"ready: {url}/ after {{}} (Ctrl-C stops)"
    engine = asyncio.create_task(
        service.engine.run(lambda took: console.print(ready.format(took)), console.print)
    )
    showing = asyncio.create_task(progress(service.engine, console))
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
        await service.engine.backend.close()


async def progress(engine: Supervisor, console: Console) -> None:
    """Say every few seconds that the engine is still starting."""
    started = time.monotonic()
    while not engine.ready:
        console.print(f"starting the engine, {time.monotonic() - started:.0f} s …")
        await asyncio.sleep(PROGRESS_S)
