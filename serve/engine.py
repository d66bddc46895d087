"""vLLM in this process: requests in, finished completions out, as many at once as it takes."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from panjue.prompts.config import check_known, check_ours
from panjue.prompts.errors import UserError
from panjue.serve.ask import Question
from panjue.serve.orphans import guarded
from panjue.serve.settings import BACKEND, ENVIRONMENT, engine_arguments
from panjue.serve.trained import Served

# vLLM reads the environment when it is imported.
os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams, TokensPrompt
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from zmq import ZMQError

__all__ = [
    "AsyncEngineArgs",
    "CompletionOutput",
    "Engine",
    "Request",
    "RequestOutput",
    "Sampling",
    "check_sampling",
    "complete",
    "engine",
    "requests",
]

POLL_S = 0.5
"""How often, at the least, `complete` looks whether it is to end."""

CALL_S = 60.0
"""How long an engine may take to answer a call that is no request."""

Outcome_co = TypeVar("Outcome_co", covariant=True)

Sampling = Mapping[str, Any]
"""Settings of vLLM's SamplingParams."""

ENDED = (
    "engine: its process has ended, what it printed above may say why; where memory was short, "
    "lower engine.gpu_memory_utilization or, on a CPU, VLLM_CPU_KVCACHE_SPACE. "
    "What is answered is kept, the same command goes on"
)


@dataclass(frozen=True)
class Request:
    """One question and how to sample its reply.

    Attributes:
        id: The example's id.
        question: What is asked.
        params: How to sample, the schema included.
        turn: 0, 1, … of the requests that together make one example's row.
    """

    id: int | str
    question: Question
    params: SamplingParams
    turn: int = 0


def requests(key: int | str, question: Question, turns: Sequence[Sampling]) -> list[Request]:
    """Return the requests that put one question, one for each of `turns`: greedy by default."""
    schema = StructuredOutputsParams(json=question.schema) if question.schema else None
    return [
        Request(
            key,
            question,
            SamplingParams(
                **{"temperature": 0.0, "max_tokens": question.room or None, **turn},
                structured_outputs=schema,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
            number,
        )
        for number, turn in enumerate(turns)
    ]


class Source(Protocol[Outcome_co]):
    """What answers requests.

    Attributes:
        runner: Of the event loop that its requests run on.
    """

    runner: asyncio.Runner

    async def ask(self, request: Request) -> Outcome_co:
        """Return what it answers; cancelled, it lets go of the request.

        Raises:
            UserError: It can answer no more.
        """
        ...


class Engine:
    """vLLM's engine with a model, and with an adapter beside it, if any."""

    def __init__(
        self, runner: asyncio.Runner, llm: AsyncLLMEngine, lora: LoRARequest | None
    ) -> None:
        """Take an engine that was started on the loop of `runner`."""
        self.runner, self.llm, self._lora = runner, llm, lora

    async def ask(self, request: Request) -> RequestOutput:
        """Return the finished output of one request; cancelled, it is aborted in the engine.

        Raises:
            UserError: The engine has died, or was told to end: it then calls all finished.
        """
        prompt = TokensPrompt(prompt_token_ids=request.question.prompt)
        key = f"{request.turn} {request.id}"
        outputs = self.llm.generate(prompt, request.params, key, lora_request=self._lora)
        try:
            [output] = [output async for output in outputs]
        except (EngineDeadError, EngineGenerateError):
            if not self.llm.errored:
                raise
            raise UserError(ENDED) from None
        reasons = {reply.finish_reason for reply in output.outputs}
        if "abort" in reasons:
            raise UserError(ENDED)
        if "error" in reasons:  # so too says an engine that is ending of what comes to it then
            await answered(self.llm, self.llm.is_sleeping())  # which it then refuses
        return output


async def answered(llm: AsyncLLMEngine, call: Coroutine[Any, Any, Any]) -> None:
    """Wait for a call of an engine, which in vLLM 0.32 has no end where its process dies meanwhile.

    Raises:
        UserError: The engine has died, is ending and refuses it, or takes `CALL_S`.
    """
    asked = asyncio.ensure_future(call)
    try:
        async with asyncio.timeout(CALL_S):
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
    rank = served.lora_rank
    ours: dict[str, Any] = {
        **engine_arguments(max_tokens, seed),
        "structured_outputs_config": StructuredOutputsConfig(**BACKEND),
        "trust_remote_code": False,
        "enable_lora": rank > 0,
        **({"max_lora_rank": rank} if rank else {}),
    }
    lora = LoRARequest("adapter", 1, str(served.adapter)) if served.adapter else None
    given = {"disable_log_stats": True, **settings, **ours}
    with guarded(), asyncio.Runner() as runner:
        try:
            args = AsyncEngineArgs(model=str(served.model), **given)
            llm = runner.run(_started(args))
        except (ValueError, TypeError, VLLMValidationError, ZMQError) as error:
            # ZMQError: its sockets cannot be made, in a TMPDIR with a long name, say
            raise UserError(f"engine: {str(error).splitlines()[0]}") from None
        except EngineDeadError:
            raise UserError(ENDED) from None
        except RuntimeError as error:  # of its process, which has printed why
            why = "where memory is short, lower engine.gpu_memory_utilization or max_tokens"
            raise UserError(f"engine: {str(error).splitlines()[0]} {why}") from None
        try:
            yield Engine(runner, llm, lora)
        finally:
            llm.shutdown()


async def _started(args: AsyncEngineArgs) -> AsyncLLMEngine:
    # As vLLM's own class for offline use: its defaults are for many requests at once.
    llm = AsyncLLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    await answered(llm, llm.get_supported_tasks())  # every request asks this; it is remembered
    return llm


class Pending:
    """Requests that are drawn as there is room for them.

    Attributes:
        exhausted: Whether no more will come.
    """

    def __init__(self, requests: Iterable[Request | None]) -> None:
        """Take the requests; None among them says that the next depends on an output to come."""
        self._requests, self.exhausted = iter(requests), False

    def draw(self, most: int) -> Iterator[Request]:
        """Yield the next requests, at most so many, as far as they depend on nothing to come."""
        end = object()
        while most > 0 and not self.exhausted:
            request = next(self._requests, end)
            self.exhausted = request is end
            if not isinstance(request, Request):
                return
            most -= 1
            yield request


def complete(
    source: Source[Outcome_co],
    requests: Iterable[Request | None],
    in_flight: int,
    check: Callable[[], None] = lambda: None,
) -> Generator[tuple[Request, Outcome_co], None, None]:
    """Yield every request with its outcome, in the order they finish.

    Requests are drawn one by one, at most `in_flight` run at once: memory stays flat and preparing
    the next prompts overlaps with decoding. None among them says that the next depends on an
    outcome that is still to come. `check` is called between outcomes, and twice a second.

    Raises:
        UserError: The source can answer no more; what runs is waited for and yielded first.
    """
    pending, failure = Pending(requests), None
    running: dict[asyncio.Task[Outcome_co], Request] = {}
    try:
        while running or not pending.exhausted:
            check()
            for request in pending.draw(in_flight - len(running)):
                task = source.runner.get_loop().create_task(source.ask(request))
                running[task] = request
            if not running:
                return  # the next depends on an outcome that nobody has handed on
            for task in source.runner.run(_some(running)):
                request = running.pop(task)
                error = task.exception()
                if error is None:
                    yield request, task.result()
                elif isinstance(error, UserError):
                    failure, pending.exhausted = failure or error, True
                else:
                    raise error
        if failure:
            raise failure
    finally:
        if running:  # else whoever asks this source next waits for their outcomes too
            source.runner.run(_cancelled(running))


async def _some(running: Iterable[asyncio.Task[Outcome_co]]) -> set[asyncio.Task[Outcome_co]]:
    """Return those that are done by now, of which there may be none."""
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait(running, timeout=POLL_S, return_when=first)
    return done


async def _cancelled(running: Iterable[asyncio.Task[Any]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.wait(running)


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Refuse sampling settings that vLLM does not have or does not survive.

    Raises:
        UserError: Names the setting and what is wrong with it.
    """
    ours = {"structured_outputs": "constrained", "output_kind": "nothing: rows are final"}
    check_ours("sampling", sampling, ours)
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
