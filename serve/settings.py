"""Settings of generation and of the server, and what is checked before vLLM is imported."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from panjue.prompts.plumbing.config import Config, load_config
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.reader import OnBadRow
from panjue.prompts.task import load_task

NAME = "panjue"
"""What clients call the model that answers."""

BASE = "base"
"""What vLLM calls the base beside an adapter; no client reaches it."""

KEY = "PANJUE_API_KEY"
"""Environment variable with the key that clients must show."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes a share of all memory
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # the default leaves one core of two idle
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # plumbing.orphans watches what is spawned
}
"""Of every process of vLLM, where the user has not set them."""

MANAGED_SETTINGS = {
    "model": "trained",
    "tokenizer": "trained",
    "seed": "seed",
    "max_model_len": "max_tokens",
    "enable_lora": "adapter",
    "max_lora_rank": "adapter",
    "structured_outputs_config": "constrained",
    "load_format": "nothing: only safetensors are loaded",
    "trust_remote_code": "nothing: a model's code is never run",
    "hf_token": "the environment variable HF_TOKEN: what is set here is written down",
}
"""Engine arguments that panjue makes itself -> the setting to use instead."""

RESOURCES = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "cpu_offload_gb",
    "block_size",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_parallel_loading_workers",
    "distributed_executor_backend",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "disable_log_stats",
)
"""Engine arguments of memory and speed. A run goes on under others: where memory ran out, that is
what must change."""

BACKEND = {"backend": "guidance", "disable_any_whitespace": True}
"""Each case has a schema of its own, and llguidance builds it in milliseconds; xgrammar takes some
twenty times as long (tests/bench/schema.py); `auto` would mix them."""


SERVER_MANAGED_SETTINGS = {
    **MANAGED_SETTINGS,
    "host": "host",
    "port": "port",
    "uds": "nothing: set host and port",
    "api_key": f"the environment variable {KEY}",
    "served_model_name": "nothing: it is called panjue",
    "generation_config": "nothing: requests say how to sample",
    "lora_modules": "adapter",
    "max_num_queued_reqs": "in_flight",
    "uvicorn_log_level": "nothing: see engine.log",
    "disable_fastapi_docs": "nothing: they cannot be reached",
}
"""The same for the arguments of vLLM's server."""


SERVER_ARGUMENTS = (
    "chat_template",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "tool_call_parser",
)
"""Arguments of vLLM's own server, beside its engine's, that matter here."""


IGNORED_VARIABLES = ("VLLM_API_KEY", "VLLM_SKIP_MODEL_NAME_VALIDATION")
"""Environment variables of vLLM's server that would undo what ours sees to: key and model name."""


class EngineConfig(Config):
    """Which training result is served, and how."""

    task: str = "judgment"
    """Name of a folder in prompts/tasks/."""
    run: Path
    """Folder that is written to."""
    trained: Path | None = None
    """Adapter or model folder of a training run; by default the one in `run`."""
    base: str | None = None
    """Where the base is now, folder or hub name, if it has moved since training; the same files."""
    adapter: Literal["merge", "lora", "none"] = "merge"
    """Serve the adapter folded into a cached copy of its base, as it is, or the base alone."""
    max_tokens: int | None = Field(None, ge=64)
    """Prompt plus reply; by default what training had, so that cases are shortened alike. Of an
    endpoint without `trained`, the reply alone; by default as long as the endpoint lets it be."""
    seed: int = 0
    """Of the engine."""
    in_flight: int = Field(256, ge=1)
    """Replies in the engine at once. More wait; the server asks their clients to come back."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM's engine as they are."""
    endpoint: str | None = None
    """URL#MODEL of an OpenAI-compatible server that answers instead of an engine of our own."""


class GenerateConfig(EngineConfig):
    """Settings of one generation; completions and submission are written to `run`."""

    test: Path
    """Cases to answer."""
    constrained: bool = True
    """Decode under each case's schema. Without it replies are free text, repaired if need be."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM's SamplingParams as they are; greedy by default."""
    samples: int = Field(0, ge=0)
    """Further replies per case, drawn at temperature 1; with them, answers are decided."""
    on_bad_row: OnBadRow = "stop"
    """What a row of `test` does that is no case: stop the run, or be listed and left out."""
    solve: dict[str, Any] = Field(default_factory=dict)
    """How an example of several calls is solved; what is not set is as it was in training."""
    held_out: bool = False
    """Answer only the tenth of `test` that training on it held out: `panjue tune` fits on that."""


class ServeConfig(EngineConfig):
    """Settings of the server; the engine's output goes to `run`/engine.log."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond this machine only with a key in PANJUE_API_KEY."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    law: Path | None = None
    """JSON file, article -> {"text": …}, whose texts are shown beside articles."""
    timeout_s: float = Field(600, gt=0)
    """The longest that one request may take."""
    drain_s: int = Field(30, ge=0)
    """How long running requests may go on after a stop was asked for."""


def trained_folder(config: EngineConfig) -> Path:
    """Return the folder of the training result to serve.

    Raises:
        UserError: It has no labels or manifest, or was trained for another task.
    """
    candidates = (
        [config.trained] if config.trained else [config.run / "adapter", config.run / "model"]
    )
    for folder in candidates:
        if (folder / "manifest.json").exists():
            check_trained(folder, config.task)
            return folder
    raise UserError(
        f"{candidates[0]}: nothing trained is there; run `panjue sft` first or set trained=FOLDER"
    )


def check_trained(folder: Path, task: str) -> None:
    """Refuse what was trained for another task, or with other labels than lie beside it now.

    Raises:
        UserError: Names the folder and what does not match.
    """
    made = read_json(folder / "manifest.json")
    if "task" not in made or not (folder / "labels.json").exists():
        raise UserError(f"{folder}: is no adapter or model folder; take RUN/adapter or RUN/model")
    if made["task"] != task:
        raise UserError(f"{folder}: was trained for the task {made['task']!r}, not {task!r}")
    if sha256(folder / "labels.json") != made["labels_sha256"]:
        raise UserError(
            f"{folder}: labels.json is not the one it was trained with; restore it or train again"
        )


def server_key(host: str) -> str | None:
    """Return the key that clients must show, if the environment has one.

    Raises:
        UserError: It cannot be sent in a header, or is missing though other machines reach `host`.
    """
    key = os.environ.get(KEY) or None
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"{KEY}: must be of printable ASCII characters without spaces")
    if host not in LOOPBACK and not key:
        raise UserError(f"host={host}: can be reached by others; set {KEY} to a secret")
    return key


def generate_settings(path: Path, overrides: Sequence[str] = ()) -> GenerateConfig:
    """Read the config at `path`, and refuse what is wrong with it before vLLM is imported.

    Raises:
        UserError: A key or value is wrong, or the task, test file or training result is not there.
    """
    config = load_config(GenerateConfig, path, overrides)
    load_task(config.task)
    if not config.test.exists():
        raise UserError(f"test: no file {config.test}")
    if config.trained or not config.endpoint:
        trained_folder(config)
    return config


def serve_settings(path: Path, overrides: Sequence[str] = ()) -> ServeConfig:
    """Read the config at `path`, and refuse what is wrong with it before vLLM is imported.

    Raises:
        UserError: A key or value is wrong, the task or training result is not there, or other
            machines reach the address and there is no key.
    """
    config = load_config(ServeConfig, path, overrides)
    load_task(config.task)
    server_key(config.host)
    trained_folder(config)
    return config
