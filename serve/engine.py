"""vLLM's offline engine: requests in, finished completions out, as many at once as it takes."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from multiprocessing import connection
from pathlib import Path
from threading import Thread
from typing import Any, Concatenate, ParamSpec

from panjue.prompts.config import check_known, check_ours
from panjue.prompts.errors import UserError
from panjue.serve.ask import Question
from panjue.serve.orphans import guarded
from panjue.serve.settings import ENVIRONMENT, engine_arguments

# vLLM reads the environment when it is imported.
os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})

from vllm import LLM, AsyncEngineArgs, EngineArgs, SamplingParams, TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import CoreEngineProcManager
from zmq import ZMQError

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "CompletionOutput",
    "EngineArgs",
    "LoRARequest",
    "Pending",
    "Request",
    "RequestOutput",
    "Sampling",
    "check_sampling",
    "complete",
    "engine",
    "requests",
]

P = ParamSpec("P")

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
        lora_rank: The largest rank of an adapter that requests may bring, 0 for none.

    Raises:
        UserError: It does not start with these settings, or dies.
    """
    ours: dict[str, Any] = {
        **engine_arguments(max_tokens, seed),
        "trust_remote_code": False,
        "enable_lora": lora_rank > 0,
        **({"max_lora_rank": lora_rank} if lora_rank else {}),
    }
    with guarded():
        try:
            llm = LLM(model=str(model), **{**settings, **ours})
        except (ValueError, TypeError, VLLMValidationError, ZMQError) as error:
            # ZMQError: its sockets cannot be made, in a TMPDIR with a long name, say
            raise UserError(f"engine: {str(error).splitlines()[0]}") from None
        except EngineDeadError:
            raise UserError(ENDED) from None
        except RuntimeError as error:  # of its process, which has printed why
            why = "where memory is short, lower engine.gpu_memory_utilization or max_tokens"
            raise UserError(f"engine: {str(error).splitlines()[0]} {why}") from None
        try:
            yield llm
        except (EngineDeadError, ZMQError):  # vLLM closes the sockets when its process ends
            raise UserError(ENDED) from None
        finally:
            llm.llm_engine.engine_core.shutdown()


def tell_of_its_death(client: SyncMPClient) -> None:
    """Have the end of an engine's process end every wait for it with EngineDeadError.

    vLLM notices too and closes all, but whoever waits for an output, or while the engine starts
    for the outcome of a call, then waits for ever.
    """
    # The thread holds no client: vLLM ends an engine whose client nobody has any more.
    resources, calls, outputs = client.resources, client.utility_results, client.outputs_queue
    manager = resources.engine_manager
    if not isinstance(manager, CoreEngineProcManager):
        return  # no processes of this machine

    def watch() -> None:
        connection.wait(manager.sentinels())
        resources.engine_dead = True  # calls to come fail by this
        for call in list(calls.values()):
            if not call.done():
                call.set_exception(EngineDeadError())
        outputs.put_nowait(EngineDeadError())

    Thread(target=watch, name="death of the engine", daemon=True).start()


def _watched(
    make: Callable[Concatenate[SyncMPClient, P], None],
) -> Callable[Concatenate[SyncMPClient, P], None]:
    @wraps(make)
    def made(client: SyncMPClient, /, *args: P.args, **kwargs: P.kwargs) -> None:
        make(client, *args, **kwargs)
        tell_of_its_death(client)

    return made


# Its first calls wait within LLM(), where nobody else has a hold of it.
SyncMPClient.__init__ = _watched(SyncMPClient.__init__)


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
    llm: LLM,
    requests: Iterable[Request | None],
    in_flight: int,
    lora: LoRARequest | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Request, RequestOutput]]:
    """Yield every request with its output, in the order they finish.

    Requests are drawn one by one, at most `in_flight` wait in the engine: memory stays flat and
    preparing the next prompts overlaps with decoding. None among them says that the next depends
    on an output that is still to come. `check` is called between steps.

    Raises:
        UserError: The engine was told to end: it then calls every request finished.
    """
    pending = Pending(requests)
    running: dict[str, Request] = {}
    try:
        while running or not pending.exhausted:
            check()
            for request in pending.draw(in_flight - len(running)):
                key = f"{request.turn} {request.id}"
                running[key] = request
                prompt = TokensPrompt(prompt_token_ids=request.question.prompt)
                llm.llm_engine.add_request(key, prompt, request.params, lora_request=lora)
            for output in llm.llm_engine.step() if running else ():
                if any(reply.finish_reason == "abort" for reply in output.outputs):
                    raise UserError(ENDED)
                if output.finished:
                    yield running.pop(output.request_id), output
    finally:
        if running:  # else whoever uses this engine next gets their outputs
            llm.llm_engine.abort_request(list(running))


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
