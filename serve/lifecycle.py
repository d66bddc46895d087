"""Start the server's engine and vLLM's app, and restart them when the engine dies."""

import asyncio
import contextlib
import multiprocessing
import re
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from fastapi import FastAPI

from panjue.prompts.plumbing.errors import UserError
from panjue.serve.app import arguments, build_vllm_app
from panjue.serve.endpoint import Endpoint
from panjue.serve.engine import (
    AsyncEngineArgs,
    Engine,
    EngineDeadError,
    StrictLLM,
    UsageContext,
    call_engine,
    start,
    startup_errors,
    wait_until_ready,
)
from panjue.serve.guard import Guard
from panjue.serve.service import Service
from panjue.serve.settings import NAME

WATCH_S = 1.0
IDLE_S = 5.0
LOG_TAIL = 2**16
"""Bytes at the end of the log that are searched for the reason why a running engine ended."""

LONGEST_PAUSE_S = 60.0

Print = Callable[[str], None]


class Lifecycle:
    """Starts the engine and vLLM's app, and restarts them with growing pauses."""

    def __init__(self, service: Service, guard: Guard) -> None:
        """Take the parts of the server, and the guard that receives its requests."""
        self._service, self._guard = service, guard

    async def run(self, on_ready: Print, report: Print) -> None:
        """Keep the engine running until cancelled.

        Args:
            on_ready: Called each time the engine is ready, with the time it took.
            report: Called with each failure and what is done about it.

        Raises:
            UserError: The first start failed.
        """
        if self._service.config.endpoint:
            async with self._endpoint_app(self._service.config.endpoint) as self._guard.app:
                on_ready("0 s")
                await asyncio.Event().wait()
        pause, was_ready = 1.0, False
        while True:
            began, offset, is_ready = time.monotonic(), log_size(self._service.log), False
            try:
                async with self._engine_app() as (app, llm):
                    self._guard.app, was_ready, is_ready = app, True, True
                    on_ready(f"{time.monotonic() - began:.0f} s")
                    await self._until_dead(llm)
            except Exception as error:
                if not (was_ready or isinstance(error, UserError)):
                    raise
                if is_ready:
                    offset = max(0, log_size(self._service.log) - LOG_TAIL)
                line = error_line(self._service.log, offset)
                more = f" (full log: {self._service.log})" if line else ""
                reason = line or str(error).removeprefix("engine: ")
                if not was_ready:
                    raise UserError(f"engine: {reason}{more}") from None
            pause = 1.0 if time.monotonic() - began > 2 * LONGEST_PAUSE_S else pause
            report(f"the engine ended: {reason}; restarting it in {pause:.0f} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _endpoint_app(self, name: str) -> AsyncIterator[FastAPI]:
        """Build an app with panjue's routes only; an endpoint answers them."""
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.get("/health")(lambda: None)
        async with contextlib.aclosing(Endpoint(name)) as endpoint:
            self._service.routes(endpoint).attach(app)
            yield app

    @contextlib.asynccontextmanager
    async def _engine_app(self) -> AsyncIterator[tuple[FastAPI, StrictLLM]]:
        """Start an engine and build vLLM's app with panjue's routes; shut both down at the end."""
        with startup_errors():
            args = arguments(self._service.config, self._service.served, self._service.max_tokens)
            llm = await start_engine(args)
        try:
            with startup_errors():
                app = await build_vllm_app(llm, args)
            models = app.state.openai_serving_models
            lora = models.lora_requests[NAME] if self._service.served.adapter else None
            self._service.routes(Engine(llm, lora)).attach(app)
            async with app.router.lifespan_context(app):
                try:
                    yield app, llm
                finally:
                    self._guard.app = None
                    llm.output_processor.propagate_error(EngineDeadError())  # in case it hangs
                    await self._guard.idle(IDLE_S)  # clients get their errors
        finally:
            await asyncio.to_thread(llm.shutdown)

    async def _until_dead(self, llm: StrictLLM) -> None:
        """Wait until a running engine dies.

        Raises:
            UserError: It died, or did not answer within `timeout_s` of a request.
        """
        while True:
            await call_engine(llm, llm.is_sleeping(), self._service.config.timeout_s)
            await asyncio.sleep(WATCH_S)


async def start_engine(args: Namespace) -> StrictLLM:
    """Start an engine in a thread, so that clients are answered meanwhile: they are told to retry.

    Raises:
        UserError: The engine does not start with these settings.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    context = UsageContext.OPENAI_API_SERVER
    starting = asyncio.ensure_future(asyncio.to_thread(start, engine_args, context))
    try:
        llm = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _stop_start(starting)
        raise
    return await wait_until_ready(llm)


async def _stop_start(starting: asyncio.Future[StrictLLM]) -> None:
    """Stop an engine that is starting; its thread ends when its processes are killed."""
    while not starting.done():
        for process in multiprocessing.active_children():
            process.kill()
        await asyncio.wait([starting], timeout=WATCH_S)
    if starting.exception() is None:
        starting.result().shutdown()


def log_size(log: Path) -> int:
    """Return the size of a log in bytes; 0 if there is no such file."""
    return log.stat().st_size if log.exists() else 0


def error_line(log: Path, offset: int) -> str:
    """Return the first error line of the engine's log after `offset` bytes, if any."""
    output = ""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(offset)
        output = file.read().decode("utf-8", errors="replace")
    # The first error is the cause; later ones only say that the engine did not start.
    match = re.search(r"^.*\b\w*[Ee]rror: \S.*$", output, re.MULTILINE)
    cause = match[0] if match else ""
    return re.sub(r"^(\(\w+ pid=\d+\) )?([A-Z]+ [\d: -]+\[[^\]]*\] )?", "", cause).strip()
