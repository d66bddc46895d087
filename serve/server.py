"""`panjue serve` runs vLLM's own server with panjue's middleware around its app."""

import asyncio
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, Never

import uvloop

# Imported before vLLM: serve.engine sets environment variables that vLLM reads on import.
from panjue.prompts.gpu import check_gpu, unused_device
from panjue.serve.engine import (
    check_engine,
    engine_settings,
    for_this_machine,
    startup_errors,
    with_own,
)

# isort: split
from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.generate.structured_decisions import api_router as decisions
from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.utils.argparse_utils import FlexibleArgumentParser

from panjue.finetune.trained import Trained
from panjue.prompts.model import threads_for
from panjue.prompts.plumbing.errors import Stopped, UserError
from panjue.prompts.plumbing.signals import stopping_signals
from panjue.prompts.render import template_args
from panjue.serve.engine_processes import starting_engine
from panjue.serve.http import TimedHttp
from panjue.serve.judge import ServedRun
from panjue.serve.middleware import Setup
from panjue.serve.settings import BASE, NAME, SERVER_ARGUMENTS, ServeConfig, server_key

SWITCH_INTERVAL_S = 5e-4
"""How long a thread that looks at a long text may keep Python's lock while the event loop waits."""


def serve(config: ServeConfig, trainings: Mapping[str, Trained]) -> None:
    """Serve trainings by name. On SIGTERM, Ctrl-C and the like, finish requests and stop."""
    key = server_key(config.host)
    # With these, vLLM would want a key of its own, and would not refuse unknown models.
    for name in ("VLLM_API_KEY", "VLLM_SKIP_MODEL_NAME_VALIDATION"):
        os.environ.pop(name, None)
    check_gpu(answering=True)
    check_engine(config.engine, SERVER_ARGUMENTS)
    config = config.model_copy(update={"port": free_port(config.host, config.port)})
    print("preparing the model", flush=True)
    served = {name: ServedRun(trained, config) for name, trained in trainings.items()}
    for name, run in served.items():
        print(f"who answers ({name}): {run.who_answers}", flush=True)
    setup = Setup(config, served, key)
    with startup_errors():
        args = arguments(setup)
    if device := unused_device():
        print(f"answering on {device}", flush=True)
    print("starting the engine, which takes a minute or more", flush=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # a long text must not hold up other requests
    loop = Loop()
    with (
        startup_errors(),
        starting_engine(),
        threads_for(served[NAME].folders.model),  # all have the same base
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        runner.run(run_vllm(args))
        if not loop.has_stopped:
            raise UserError("engine: it has ended, see above; start the server again")
    print("stopped", flush=True)


async def run_vllm(args: Namespace) -> None:
    """Run vLLM's server as its `run_server` does, but end at a signal while the engine starts.

    `run_server` raises KeyboardInterrupt at a signal. vLLM ignores that while it waits for the
    engine (vllm/utils/network_utils.py:471), and waits ten minutes for an answer that cannot come.
    """

    def stop(number: int, _: object) -> Never:
        raise Stopped("stopped before it could answer", number)

    for number in stopping_signals():
        signal.signal(number, stop)
    # Not needed: requests do not reach vLLM's route of "structured decisions". To prepare it, vLLM
    # renders the chat template with enable_thinking=False, which some templates refuse.
    decisions.init_structured_decisions_state = lambda *_: None
    address, listener = setup_server(args, reuse_port=False)
    # Only h11 limits headers; httptools reads headers of any size.
    await run_server_worker(address, listener, args, http=TimedHttp, server_header=False)


class Loop(uvloop.Loop):
    """An event loop that records whether a signal stops the server, not the death of its engine."""

    has_stopped = False

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: object) -> None:
        """Call `callback` at any signal that stops a command; vLLM itself asks for two of them."""

        def stop() -> None:
            self.has_stopped = True
            callback(*args)

        for number in stopping_signals():
            super().add_signal_handler(number, stop)


def free_port(host: str, port: int) -> int:
    """Return `port`, or a free port if it is 0; UserError, before the slow start, if it is used."""
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        with socket.create_server((host, port), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{host}:{port}: {reason}; set another host=… or port=…") from None


def arguments(setup: Setup) -> Namespace:
    """Return the arguments of vLLM's server; TypeError if they do not fit together.

    Each training of the setup is a model or, unmerged, an adapter. Limits are those of the largest.
    """
    config = setup.config
    runs = setup.runs
    budget = max(run.question_maker.budget for run in runs.values())
    adapters = [
        LoRAModulePath(name=name, path=str(run.folders.adapter))
        for name, run in runs.items()
        if run.folders.adapter
    ]
    of_highest_rank = max((run.folders for run in runs.values()), key=lambda one: one.lora_rank)
    own: dict[str, Any] = {
        **engine_settings(of_highest_rank, config.seed, budget),
        "served_model_name": [BASE if adapters else NAME],  # adapters have the names of `runs`
        "host": config.host,
        "port": config.port,
        # Otherwise vLLM joins parts of a message, which could form a control token.
        "chat_template_content_format": "string",
        "allowed_media_domains": ["nothing.invalid"],  # the server never fetches files for clients
        "allowed_origins": [],
        "generation_config": "vllm",  # the model's own settings may have a repetition penalty
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
        "h11_max_incomplete_event_size": 2**16,  # bytes of headers; enough for any real client
        "h11_max_header_count": 100,
        "middleware": ["panjue.serve.middleware.Panjue"],
        "panjue": setup,
    }
    if adapters:
        own["lora_modules"] = adapters
        own["max_loras"] = len(adapters)
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.default_chat_template_kwargs = template_args(runs[NAME].question_maker.tokenizer)
    args.shutdown_timeout = 30  # seconds for running requests to finish
    for name, value in for_this_machine(with_own(config.engine, own)).items():
        setattr(args, name, value)
    validate_parsed_serve_args(args)
    return args
