"""What offline decoding and the server have in common: vLLM's settings, those of a run's engine."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from panjue.prompts.config import Config

NAME = "panjue"
"""What clients call the model that answers."""

KEY = "PANJUE_API_KEY"
"""Environment variable with the key that clients must show."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes a share of all memory
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # the default leaves one core of two idle
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked engine would not bear orphans.MARK
}
"""Of every process of vLLM, where the user has not set them."""

OURS = {
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

BACKEND = {"backend": "guidance", "disable_any_whitespace": True}
"""Each case has a schema of its own, and llguidance builds it in milliseconds; xgrammar takes some
twenty times as long (tests/bench/schema.py); `auto` would mix them."""


SERVER_OURS = {
    **OURS,
    "host": "host",
    "port": "port",
    "uds": "nothing: the engine is reached through the gateway",
    "api_key": f"the environment variable {KEY}",
    "served_model_name": "nothing: it is called panjue",
    "generation_config": "nothing: requests say how to sample",
    "lora_modules": "adapter",
    "uvicorn_log_level": "nothing: see engine.log",
    "disable_fastapi_docs": "nothing: they cannot be reached",
}
"""The same for the arguments of vLLM's server."""


OF_VLLMS_SERVER = (
    "chat_template",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "tool_call_parser",
)
"""Arguments of vLLM's own server, beside its engine's, that matter behind the gateway."""


def engine_arguments(max_tokens: int, seed: int) -> dict[str, Any]:
    """Return vLLM's arguments that offline decoding and the server must have alike."""
    return {
        "load_format": "safetensors",
        "max_model_len": max_tokens,
        "seed": seed,
        "structured_outputs_config": BACKEND,
    }


class EngineConfig(Config):
    """Which training result is served, and how."""

    task: str = "judgment"
    """Name of a file in prompts/tasks/."""
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
