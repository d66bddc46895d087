"""Starts the engine of a server and vLLM's app over it, and starts them again when it dies."""

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
LAST_WORDS = 2**16
"""Bytes of the log that may say why an engine ended that was up."""

LONGEST_PAUSE_S = 60.0

Say = Callable[[str], None]


class Lifecycle:
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
    async def _over_engine(self) -> AsyncIterator[tuple[FastAPI, StrictLLM]]:
        """Start an engine and build vLLM's app over it, with our routes; end both."""
        with startup_errors():
            args = arguments(self._service.config, self._service.served, self._service.max_tokens)
            llm = await started(args)
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
                    llm.output_processor.propagate_error(EngineDeadError())  # of one that hangs
                    await self._guard.idle(IDLE_S)  # who asked is startup_errors
        finally:
            await asyncio.to_thread(llm.shutdown)

    async def _until_dead(self, llm: StrictLLM) -> None:
        """Watch a running engine.

        Raises:
            UserError: It died, or hangs: it is silent for as long as a request may take.
        """
        while True:
            await call_engine(llm, llm.is_sleeping(), self._service.config.timeout_s)
            await asyncio.sleep(WATCH_S)


async def started(args: Namespace) -> StrictLLM:
    """Start an engine in a thread: clients who ask meanwhile are startup_errors to come back.

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
    return await wait_until_ready(llm)


async def _ended(starting: asyncio.Future[StrictLLM]) -> None:
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
