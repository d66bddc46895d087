"""vLLM's offline engine: requests in, finished completions out, as many at once as it takes."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panjue.prompts.errors import UserError

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes a share of all memory
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # the default leaves one core of two idle
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})

from vllm import LLM, EngineArgs, SamplingParams, TokensPrompt  # noqa: E402  # reads the environment
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: E402

__all__ = [
    "LLM",
    "OURS",
    "CompletionOutput",
    "EngineArgs",
    "LoRARequest",
    "Request",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "VLLMValidationError",
    "complete",
    "engine",
    "on_cpu",
]

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
}
"""Engine arguments that panjue makes itself -> the setting to use instead."""

BACKEND = {"backend": "guidance", "disable_any_whitespace": True}
"""Each case has a schema of its own. xgrammar compiles each from nothing (0.4 s for two defendants,
20 s for 63), llguidance builds it in milliseconds; `auto` would mix them."""


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids, and how to sample its reply.

    Attributes:
        id: The example's id.
        prompt: Token ids up to where the reply begins.
        params: How to sample, the schema included.
        dropped: Sentences that `fit` left out of the prompt.
        turn: 0, 1, … of the requests that together make one example's row.
    """

    id: int | str
    prompt: list[int]
    params: SamplingParams
    dropped: int = 0
    turn: int = 0


@contextmanager
def engine(
    model: Path, settings: Mapping[str, Any], max_tokens: int, seed: int, lora_rank: int = 0
) -> Iterator[LLM]:
    """Start vLLM on a model folder, and stop its processes however the block ends.

    Args:
        model: Folder of the model.
        settings: vLLM's further engine arguments.
        max_tokens: Prompt plus reply of the longest request.
        seed: Of the engine. A seed per request kills the CPU engine when a prefill is chunked.
        lora_rank: Rank of the adapter that requests will bring, 0 for none.
    """
    ours: dict[str, Any] = {
        "load_format": "safetensors",
        "trust_remote_code": False,
        "max_model_len": max_tokens,
        "seed": seed,
        "structured_outputs_config": BACKEND,
        "enable_lora": lora_rank > 0,
        **({"max_lora_rank": _allowed_rank(lora_rank)} if lora_rank else {}),
    }
    try:
        llm = LLM(model=str(model), **{**settings, **ours})
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise UserError(f"engine: {str(error).splitlines()[0]}") from None
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _allowed_rank(rank: int) -> int:
    """Round up to a rank that vLLM has kernels for."""
    allowed = [size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank]
    if not allowed:
        raise UserError(
            f"adapter: vLLM serves ranks up to 512, this one has {rank}; use adapter=merge"
        )
    return allowed[0]


def complete(
    llm: LLM, requests: Iterable[Request], in_flight: int, lora: LoRARequest | None = None
) -> Iterator[tuple[Request, RequestOutput]]:
    """Yield every request with its output, in the order they finish.

    Requests are drawn one by one, at most `in_flight` wait in the engine: memory stays flat and
    preparing the next prompts overlaps with decoding.
    """
    source = iter(requests)
    running: dict[str, Request] = {}
    exhausted = False
    while running or not exhausted:
        while not exhausted and len(running) < in_flight:
            request = next(source, None)
            if request is None:
                exhausted = True
                break
            key = f"{request.turn} {request.id}"
            running[key] = request
            prompt = TokensPrompt(prompt_token_ids=request.prompt)
            llm.llm_engine.add_request(key, prompt, request.params, lora_request=lora)
        for output in llm.llm_engine.step() if running else ():
            if output.finished:
                yield running.pop(output.request_id), output


def on_cpu() -> bool:
    """Say whether vLLM runs on the processor."""
    return bool(current_platform.is_cpu())
