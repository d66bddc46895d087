"""vLLM's engine: it takes many requests at once and returns finished completions."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from panjue.prompts.architecture import is_part
from panjue.prompts.model import threads_for
from panjue.prompts.plumbing.config import check_known, check_managed, first_complaint
from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.serve.ask import LONGEST, Budget, Request
from panjue.serve.engine_processes import starting_engine
from panjue.serve.merge import KNOWN_TEXT, Served
from panjue.serve.settings import BACKEND, DEFAULTS, environment

os.environ.update(environment(os.environ))  # vLLM reads it when it is imported

from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm import __version__ as VLLM_VERSION
from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import ModelRegistry
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.kv_cache_interface import MambaSpec
from zmq import ZMQError

# Other modules import vLLM from here, so that the environment variables above are set first.
__all__ = [
    "VLLM_VERSION",
    "AsyncEngineArgs",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "VLLMError",
]

CALL_TIMEOUT_S = 60.0  # time limit of a call of the engine that is no request
POLL_S = 0.5  # how often such a call checks whether the engine has died
TUNING = "enable_flashinfer_autotune"  # engine argument: find FlashInfer's fastest kernels at start
LEAST_CHANGE = 1e-4  # least change of a log-probability by a working adapter

ENGINE_ENDED = (
    "engine: its process has ended or hangs, see what it printed; if memory was short, "
    "lower engine.gpu_memory_utilization or, on a CPU, VLLM_CPU_KVCACHE_SPACE. "
    "Finished rows are kept; run the same command to resume"
)


class EngineEnded(UserError):
    """The engine has died, refuses calls or hangs."""


class Engine:
    """A running vLLM engine."""

    runner: asyncio.Runner
    """Runner of its event loop, unless that is already running; `engine` sets it."""

    def __init__(self, llm: AsyncLLM, lora: LoRARequest | None) -> None:
        self.llm = llm
        self.lora = lora
        self.longest = int(llm.model_config.max_model_len)  # tokens of a prompt with its reply

    @property
    def sequences(self) -> int:
        """Return how many sequences vLLM computes at once."""
        return int(self.llm.vllm_config.scheduler_config.max_num_seqs)

    async def ask(self, request: Request) -> RequestOutput:
        """Return the finished output of one request. If cancelled, let the engine abort it."""
        question = request.question
        on_text = request.on_text
        schema = question.schema
        sampling = {"temperature": 0.0, "max_tokens": question.room or None, **request.sampling}
        if request.with_logprobs:
            # 0: of the chosen token alone. Flat lists are fewer objects for the garbage collector.
            sampling = {"logprobs": 0, "flat_logprobs": True, **sampling}
        params = SamplingParams(
            **sampling,
            structured_outputs=schema and StructuredOutputsParams(json=schema),
            output_kind=RequestOutputKind.CUMULATIVE if on_text else RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=question.prompt)
        key = f"{request.sampling_pass} {request.id}"  # vLLM needs another one for each request
        passed_on = 0  # characters
        try:
            async for output in self.llm.generate(prompt, params, key, lora_request=self.lora):
                if on_text:
                    text = output.outputs[0].text
                    on_text(text[passed_on:])
                    passed_on = len(text)
        except (EngineDeadError, EngineGenerateError):
            await self._check_alive()
            raise  # the engine still runs, so the request itself failed
        # While it shuts down, vLLM returns unfinished replies as finished, with these reasons.
        reasons = {reply.finish_reason for reply in output.outputs}
        if reasons & {"abort", "error"}:
            await self._check_alive()
        if "abort" in reasons:
            raise EngineEnded(ENGINE_ENDED)
        return output

    def switch(self, served: Served) -> None:
        """Answer with another adapter of the same base from now on."""
        assert self.lora, "the engine was started with an adapter"
        number = self.lora.lora_int_id + 1
        self.lora = LoRARequest(f"adapter {number}", number, str(served.adapter))
        self.runner.run(check_adapter(self.llm, self.lora))

    async def _check_alive(self) -> None:
        """Raise UserError if the engine has died, or shuts down and refuses calls."""
        await call_engine(self.llm, self.llm.is_sleeping())  # any call would do


async def call_engine(llm: AsyncLLM, call: Coroutine[Any, Any, Any]) -> None:
    """Await a call that is no request; in vLLM 0.32, it never returns if the engine dies."""
    task = asyncio.ensure_future(call)
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while not task.done():
                await asyncio.wait([task], timeout=POLL_S)
                if llm.errored:
                    raise EngineDeadError
        task.result()
    except Exception:  # any error of vLLM here means that the engine no longer answers
        raise EngineEnded(ENGINE_ENDED) from None
    finally:
        task.cancel()


@asynccontextmanager
async def running_engine(
    served: Served, settings: Mapping[str, Any], budget: Budget, seed: int
) -> AsyncIterator[Engine]:
    """Start vLLM on a model; its processes always stop at the end of the block.

    `settings` are further engine arguments. Memory must suffice for requests of `budget.usual`
    tokens, not of `budget.longest`. The seed is set for the engine, because a seed of a request
    kills the CPU engine when a prefill is chunked.
    """
    lora = LoRARequest("adapter", 1, str(served.adapter)) if served.adapter else None
    settings = {"disable_log_stats": True, **settings}
    arguments = with_own(settings, engine_settings(served, seed, budget))
    with startup_errors(), starting_engine(), threads_for(served.model):
        args = AsyncEngineArgs(**for_this_machine(arguments))
        usage = UsageContext.LLM_CLASS  # its defaults fit many requests at once
        config = args.create_engine_config(usage)
        config.model_config.max_model_len = longest_of(config.model_config, budget)
        is_quiet = args.disable_log_stats
        llm = AsyncLLM.from_vllm_config(config, usage_context=usage, disable_log_stats=is_quiet)
    try:
        # Otherwise vLLM asks this at the first request, and waits forever if the engine dies.
        await call_engine(llm, llm.get_supported_tasks())
        if lora:
            await check_adapter(llm, lora)
        started = Engine(llm, lora)
        check_length(started, budget)
        yield started
    finally:
        llm.shutdown()


@contextmanager
def engine(
    served: Served, settings: Mapping[str, Any], budget: Budget, seed: int
) -> Iterator[Engine]:
    """Run `running_engine` for synchronous callers; its `runner` runs the event loop."""
    with asyncio.Runner() as runner:
        running = running_engine(served, settings, budget, seed)
        started = runner.run(running.__aenter__())
        started.runner = runner
        try:
            yield started
        finally:
            runner.run(running.__aexit__(None, None, None))


def engine_settings(served: Served, seed: int, budget: Budget) -> dict[str, Any]:
    """Return the engine arguments that panjue sets, for generation and for the server."""
    rank = served.lora_rank
    return {
        "model": str(served.model),
        "tokenizer": str(served.model),
        "tokenizer_mode": "hf",  # as `load_tokenizer` loads it, for Mistral's models too
        "hf_token": None,  # not here, since settings are written to files; use HF_TOKEN
        # -1: as many tokens as fit (vllm/v1/core/kv_cache_utils.py:2414), up to `longest_of`
        "max_model_len": budget.usual if budget.usual == budget.longest else -1,
        "seed": seed,
        "structured_outputs_config": StructuredOutputsConfig(**BACKEND),
        # After the mask of the schema: what it forces has probability 1.
        "logprobs_mode": "processed_logprobs",
        "load_format": "safetensors",
        "trust_remote_code": False,
        "language_model_only": is_part(served.model),  # loads no encoder of images
        "enable_lora": rank > 0,
        "max_lora_rank": rank or 16,  # vLLM's own default, which then has no effect
    }


OWN_ARGUMENTS = (
    "model",
    "tokenizer",
    "tokenizer_mode",
    "hf_token",
    "max_model_len",
    "seed",
    "structured_outputs_config",
    "logprobs_mode",
    "load_format",
    "trust_remote_code",
    "language_model_only",
    "enable_lora",
    "max_lora_rank",
)
"""Names of the arguments that `engine_settings` sets."""


def with_own(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's engine arguments and `own` together; refuse one that is in both."""
    check_managed("engine", settings, own)
    return {**DEFAULTS, **settings, **own}


def for_this_machine(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine arguments with further ones that this GPU and this model need.

    `max_num_seqs` is lowered for a model that keeps a state of each sequence, such as one with
    linear attention. `TUNING` is switched off on a Hopper GPU for a model that does not need it.
    """
    # Made at most once: both functions may call it, or neither.
    model_config = cache(engine_args(arguments).create_model_config)
    return without_needless_tuning(with_room_for_states(arguments, model_config), model_config)


FOR_ACTIVATIONS = 2**31
"""Least bytes of a GPU that hold neither weights nor the states of sequences."""


def with_room_for_states(
    arguments: Mapping[str, Any], model_config: Callable[[], ModelConfig]
) -> dict[str, Any]:
    """Return engine arguments with no more sequences at once than a GPU has room for their states.

    Layers such as linear attention keep a state for each sequence. With them, vLLM refuses to have
    more sequences than cache blocks (vllm/config/compilation.py:1519), but only after it has loaded
    the weights. A block has the states of some layers, in Qwen3.5 of a quarter. This estimate takes
    the states of all layers for a sequence, so it may be too high.
    """
    args = engine_args(arguments)
    if args.max_num_seqs or on_cpu() or not model_config().is_hybrid:
        return dict(arguments)
    config = args.create_engine_config(UsageContext.LLM_CLASS)
    parallel = config.parallel_config
    model = config.model_config
    available = args.kv_cache_memory_bytes
    if available is None:
        weights = sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
        used = config.cache_config.gpu_memory_utilization
        memory = used * current_platform.get_device_total_memory()
        available = int(memory - weights / parallel.world_size - FOR_ACTIVATIONS)
    kind, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    state = MambaSpec(
        shapes=kind.get_mamba_state_shape_from_config(config),
        dtypes=kind.get_mamba_state_dtype_from_config(config),
        block_size=-1,
    )
    fitting = available // (state.page_size_bytes * model.get_num_layers(parallel))
    most = min(config.scheduler_config.max_num_seqs, max(1, fitting))
    return {**arguments, "max_num_seqs": most}


HOPPER = 90
"""vLLM tunes FlashInfer from these GPUs on. On newer ones, dense models use it, too."""


def without_needless_tuning(
    arguments: Mapping[str, Any], model_config: Callable[[], ModelConfig]
) -> dict[str, Any]:
    """Return engine arguments with which a Hopper GPU does not tune FlashInfer for nothing.

    There, vLLM 0.32 uses FlashInfer only for quantized weights and for experts, but tunes it at the
    start of every model (vllm/model_executor/warmup/kernel_warmup.py:267).
    """
    decided = {TUNING, "kernel_config"} & arguments.keys()
    if decided or not current_platform.is_device_capability_family(HOPPER):
        return dict(arguments)
    model = model_config()
    if model.is_moe or model.quantization:
        return dict(arguments)
    return {**arguments, TUNING: False}


def engine_args(arguments: Mapping[str, Any]) -> AsyncEngineArgs:
    """Return vLLM's arguments, without those of a server."""
    known = {field.name for field in fields(AsyncEngineArgs)}
    return AsyncEngineArgs(**{name: arguments[name] for name in known & arguments.keys()})


def longest_of(model: ModelConfig, budget: Budget) -> int:
    """Return the engine's limit on prompt plus reply: `budget.longest`, if the model allows it.

    Some models have a native context, such as 4,096 tokens, and scale positions for more. With
    longrope and a limit above 4,096, vLLM scales the positions of every prompt; transformers, in
    training, only those of longer prompts. So the limit of these models is 4,096 even if
    `budget.longest` is 32,768. If they were trained with more, `budget.usual`, that is the limit.
    """
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    native = rope.get("original_max_position_embeddings") or budget.longest
    wanted = max(budget.usual, min(budget.longest, native))
    return int(min(model.max_model_len, wanted))


def check_length(engine: Engine, budget: Budget) -> None:
    """Refuse an engine whose memory is too small for requests as long as in training."""
    if engine.longest < budget.usual:
        raise UserError(
            f"engine: its memory is enough for {engine.longest} tokens, but the training had "
            f"{budget.usual}; raise engine.gpu_memory_utilization or VLLM_CPU_KVCACHE_SPACE"
        )


async def check_adapter(llm: AsyncLLM, lora: LoRARequest) -> None:
    """Refuse an adapter that vLLM cannot load, or that changes nothing.

    vLLM silently ignores matrices of layers whose names it does not know.
    """
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await llm.add_lora(lora)
        # Without a time limit: the first request compiles, which takes minutes on a busy machine.
        of_base = await first_token_logprobs(llm, None)
        adapted = await first_token_logprobs(llm, lora)
    except (EngineDeadError, TimeoutError):
        raise EngineEnded(ENGINE_ENDED) from None
    except Exception as error:  # whatever the process has raised
        raise UserError(f"adapter=lora: {first_line(error)} Use adapter=merge") from None
    changes = [abs(adapted.get(token, 0) - logprob) for token, logprob in of_base.items()]
    if max(changes) < LEAST_CHANGE:
        raise UserError("adapter=lora: in vLLM it changes nothing; use adapter=merge")


async def first_token_logprobs(llm: AsyncLLM, lora: LoRARequest | None) -> dict[int, float]:
    """Return token id -> log-probability of the 20 likeliest tokens after `KNOWN_TEXT`.

    If they are the same with an adapter and without, the adapter has no effect.
    """
    assert llm.tokenizer
    prompt = TokensPrompt(prompt_token_ids=llm.tokenizer.encode(KNOWN_TEXT))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, detokenize=False)
    outputs = llm.generate(prompt, params, f"check {lora}", lora_request=lora)
    [logprobs] = [output.outputs[0].logprobs async for output in outputs]
    assert logprobs, "they were asked for"
    return {token: one.logprob for token, one in logprobs[0].items()}


@contextmanager
def startup_errors() -> Iterator[None]:
    """Raise UserError in place of the errors of a vLLM that cannot start."""
    try:
        yield
    except EngineDeadError:
        raise EngineEnded(ENGINE_ENDED) from None
    except ValidationError as error:  # from pydantic, about vLLM's settings
        raise UserError(f"engine: {first_complaint(error)}") from None
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, VLLMError, ZMQError) as error:
        # RuntimeError: the first error of its processes, see `starting_engine`.
        # ZMQError: its sockets cannot be created, for example if TMPDIR is too long.
        reason = first_line(error).rstrip(".")
        if "__main__" in str(error):  # twenty lines of multiprocessing
            guard = 'put your code under `if __name__ == "__main__":`'
            reason = f"its processes import your file again; {guard}"
        if "memory" in reason.lower():
            reason += "; set engine.gpu_memory_utilization or engine.max_num_seqs"
        raise UserError(f"engine: {reason}") from None


def check_engine(settings: Mapping[str, Any], further: Sequence[str] = ()) -> None:
    """Refuse engine settings that panjue sets or vLLM lacks, before anything is written.

    `further` are names that are allowed besides the arguments of vLLM's engine.
    """
    check_managed("engine", settings, OWN_ARGUMENTS)
    known = (field.name for field in fields(AsyncEngineArgs))
    check_known("engine", settings, [*known, *further])


MAX_LOGPROBS = 20  # of vLLM, without its setting `max_logprobs`


def check_sampling(sampling: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Refuse sampling settings that panjue sets itself, that vLLM lacks, or that crash vLLM.

    `engine` are the settings of the engine; some must agree with those of sampling.
    """
    most = engine.get("max_logprobs", MAX_LOGPROBS)  # -1: all tokens, as for `logprobs`
    for name in ("logprobs", "prompt_logprobs"):
        wanted = sampling.get(name)
        if isinstance(wanted, int) and most != -1 and (wanted == -1 or wanted > most):
            raise UserError(f"sampling.{name}: at most {most}; or set engine.max_logprobs={wanted}")
    if "seed" in sampling and on_cpu():
        raise UserError(
            "sampling.seed: a seed per request kills vLLM on the CPU; set the top-level seed"
        )
    try:
        # Made only for its checks; TypeError if panjue sets one of `sampling` itself.
        SamplingParams(
            # It refuses `min_tokens` above `max_tokens`.
            **{"temperature": 0.0, "max_tokens": LONGEST, **sampling},
            structured_outputs=None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=True,
        )
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise UserError(f"sampling: {first_line(error)}") from None


def on_cpu() -> bool:
    return bool(current_platform.is_cpu())
