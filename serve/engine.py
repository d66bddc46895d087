"""vLLM in this process: requests in, finished completions out, as many at once as it takes."""

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from pydantic import ValidationError
from transformers import TokenizersBackend

from panjue.prompts.plumbing.config import check_known, check_managed
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.orphans import starting_engine
from panjue.serve.alternatives import UNFINISHED
from panjue.serve.settings import BACKEND, ENVIRONMENT
from panjue.serve.source import POLL_S, Grow, Request, quiet
from panjue.serve.trained import Served

# vLLM reads the environment when it is imported.
os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})

from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.config import StructuredOutputsConfig
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from zmq import ZMQError

__all__ = [  # all of vLLM that others need is imported here: what is set above must come before
    "AsyncEngineArgs",
    "CompletionOutput",
    "Engine",
    "EngineDeadError",
    "RequestOutput",
    "Unbroken",
    "UsageContext",
    "VLLMError",
    "answered",
    "check_sampling",
    "engine",
    "engine_settings",
    "on_cpu",
    "ready",
    "start",
    "text_of",
    "told",
    "with_cancellation",
]

READS_TEXT = {
    "detokenize",  # the tests'; `check_sampling` lets nobody else set it
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
}
"""Settings of `sampling` for which vLLM itself makes the text of a reply."""

CALL_S = 60.0
"""How long an engine may take to answer a call that is no request."""

ENDED = (
    "engine: its process has ended or hangs, what it printed may say why; where memory was short, "
    "lower engine.gpu_memory_utilization or, on a CPU, VLLM_CPU_KVCACHE_SPACE. "
    "What is answered is kept, the same command goes on"
)


class Unbroken(AsyncLLM):  # type: ignore[misc]  # to mypy vLLM is Any here
    """vLLM's engine, whose replies are whole: one that it breaks off as it ends is an error.

    Told to end, it calls all that are under way finished ("abort"), as if that were the reply.
    """

    async def generate(self, *given: Any, **named: Any) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of one request as it grows."""
        async with aclosing(super().generate(*given, **named)) as outputs:
            async for output in outputs:
                if any(reply.finish_reason == "abort" for reply in output.outputs):
                    raise EngineDeadError
                yield output


class Engine:
    """A running engine of vLLM, as what answers requests."""

    def __init__(
        self, llm: Unbroken, lora: LoRARequest | None, runner: asyncio.Runner | None = None
    ) -> None:
        """Take an engine, and the adapter beside its model, if any."""
        self.llm, self._lora, self.runner = llm, lora, runner
        # Other tokenizers (Mistral's own, slow ones) decode by rules that vLLM has for each.
        self._is_fast = isinstance(llm.tokenizer, TokenizersBackend)

    async def ask(self, request: Request, grow: Grow = quiet) -> RequestOutput:
        """Return the finished output of one request; cancelled, it is aborted in the engine.

        Raises:
            UserError: The engine has died, or was told to end.
        """
        question, kind = request.question, RequestOutputKind
        reads = self._is_fast and not READS_TEXT & request.sampling.keys()
        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": question.room or None, **request.sampling},
            **({"detokenize": False} if reads else {}),
            structured_outputs=StructuredOutputsParams(json=question.schema)
            if question.schema
            else None,
            output_kind=kind.FINAL_ONLY if grow is quiet else kind.CUMULATIVE,
        )
        prompt = TokensPrompt(prompt_token_ids=question.prompt)
        key = f"{request.sampling_pass} {request.id}"
        seen = 0
        try:
            async for output in self.llm.generate(prompt, params, key, lora_request=self._lora):
                for reply in output.outputs if reads else ():
                    reply.text = text_of(reply, self.llm.tokenizer)
                text = output.outputs[0].text
                grow(text[seen:])
                seen = len(text)
        except (EngineDeadError, EngineGenerateError):
            await self._check_alive()
            raise
        if any(reply.finish_reason == "error" for reply in output.outputs):
            await self._check_alive()  # so too says an engine that is ending of what comes to it
        return output

    async def _check_alive(self) -> None:
        """Raise a UserError where the engine can answer no more: when it is ending, it refuses."""
        await answered(self.llm, self.llm.is_sleeping())


def text_of(reply: CompletionOutput, tokenizer: Any) -> str:
    """Return the whole characters of a reply, which may still grow.

    vLLM makes texts of each token and of all its alternatives one by one, which takes longer than
    all else that this process does for a request (tests/bench/serve.py). Its texts are these, but
    that it leaves out a last token of which a part is no character, and keeps the space before the
    first word that tokenizers with `▁` write.
    """
    tokens = list(reply.token_ids)
    if reply.finish_reason == "stop":
        tokens = tokens[:-1]  # the last one says so
    text: str = tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text.rstrip(UNFINISHED)


async def answered(
    llm: Unbroken, call: Coroutine[Any, Any, Any], longest_s: float = CALL_S
) -> None:
    """Wait for a call of an engine, which in vLLM 0.32 has no end where its process dies meanwhile.

    Raises:
        UserError: The engine has died, is ending and refuses it, or takes longer than `longest_s`.
    """
    asked = asyncio.ensure_future(call)
    try:
        async with asyncio.timeout(longest_s):
            while not asked.done():
                await asyncio.wait([asked], timeout=POLL_S)
                if llm.errored:
                    raise EngineDeadError
        asked.result()
    except Exception:  # whatever vLLM says: it answers no more
        raise UserError(ENDED) from None
    finally:
        asked.cancel()


@contextmanager
def engine(
    served: Served, settings: Mapping[str, Any], max_tokens: int, seed: int
) -> Iterator[Engine]:
    """Start vLLM on a model, and stop its processes however the block ends.

    Args:
        served: The model, and the adapter beside it, if any.
        settings: vLLM's further engine arguments.
        max_tokens: Prompt plus reply of the longest request.
        seed: Of the engine. A seed per request kills the CPU engine when a prefill is chunked.

    Raises:
        UserError: It does not start with these settings, or dies.
    """
    lora = LoRARequest("adapter", 1, str(served.adapter)) if served.adapter else None
    given = {"disable_log_stats": True, **settings, **engine_settings(served, seed, max_tokens)}
    with asyncio.Runner() as runner:
        with told():
            args = AsyncEngineArgs(model=str(served.model), **given)
            llm = runner.run(_started(args))
        try:
            yield Engine(llm, lora, runner)
        finally:
            llm.shutdown()


def engine_settings(served: Served, seed: int, max_tokens: int) -> dict[str, Any]:
    """Return the engine arguments that panjue makes, offline and in the server alike."""
    rank = served.lora_rank
    return {
        "max_model_len": max_tokens,
        "seed": seed,
        "structured_outputs_config": StructuredOutputsConfig(**BACKEND),
        "load_format": "safetensors",
        "trust_remote_code": False,
        "enable_lora": rank > 0,
        **({"max_lora_rank": rank} if rank else {}),
    }


@contextmanager
def told() -> Iterator[None]:
    """Turn what vLLM raises where it cannot start into a UserError."""
    try:
        yield
    except EngineDeadError:
        raise UserError(ENDED) from None
    except ValidationError as error:  # pydantic's, of vLLM's settings
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"engine: {place}: {first['msg']}".replace(": : ", ": ")) from None
    except (ValueError, TypeError, KeyError, OSError, VLLMValidationError, ZMQError) as error:
        # ZMQError: its sockets cannot be made, in a TMPDIR with a long name, say
        raise UserError(f"engine: {(str(error) or type(error).__name__).splitlines()[0]}") from None
    except RuntimeError as error:  # of its process, which has printed why
        why = "where memory is short, lower engine.gpu_memory_utilization or max_tokens"
        raise UserError(f"engine: {str(error).splitlines()[0]}; {why}") from None


async def _started(args: AsyncEngineArgs) -> Unbroken:
    # As vLLM's own class for offline use: its defaults are for many requests at once.
    return await ready(start(args, UsageContext.LLM_CLASS))


async def ready(llm: Unbroken) -> Unbroken:
    """Return an engine when it has answered for the first time; end it where it does not.

    Raises:
        UserError: It does not.
    """
    try:
        await answered(llm, llm.get_supported_tasks())  # every request asks this; it is remembered
    except BaseException:
        llm.shutdown()
        raise
    return llm


def start(args: AsyncEngineArgs, context: UsageContext) -> Unbroken:
    """Start the processes of an engine, which end with this one, and wait until they are up."""
    with starting_engine():
        llm: Unbroken = Unbroken.from_engine_args(args, usage_context=context)
    return llm


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Refuse sampling settings that vLLM does not have or does not survive.

    Raises:
        UserError: Names the setting and what is wrong with it.
    """
    ours = {
        "structured_outputs": "constrained",
        "output_kind": "nothing: rows are final",
        "detokenize": "nothing: rows have texts",
    }
    check_managed("sampling", sampling, ours)
    check_known("sampling", sampling, SamplingParams.__struct_fields__)
    if "seed" in sampling and on_cpu():
        raise UserError(
            "sampling.seed: a seed per request kills vLLM on the CPU; set the top-level seed"
        )
    try:
        SamplingParams(**{"temperature": 0.0, **sampling})
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise UserError(f"sampling: {str(error).splitlines()[0]}") from None


def on_cpu() -> bool:
    """Say whether vLLM runs on the processor."""
    return bool(current_platform.is_cpu())
