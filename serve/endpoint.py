"""Any OpenAI-compatible endpoint in the engine's place: the same requests, over HTTP."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from panjue.prompts.config import check_settings
from panjue.prompts.errors import UserError
from panjue.prompts.render import TEMPLATE_ARGS
from panjue.serve.engine import Request

KEY = "PANJUE_ENDPOINT_KEY"
"""Environment variable with the key that the endpoint wants."""

SAMPLING = ("temperature", "top_p", "max_tokens", "stop", "presence_penalty", "frequency_penalty")
"""Settings of `sampling` that OpenAI's chat completions know too."""

PAUSES_S = (1, 4, 16)
"""Before a request that failed for no fault of its own is tried again."""

BUSY = frozenset({429, 503})
LONGEST_BUSY_S = 600
"""How long an endpoint may say that it is busy."""

REFUSED = frozenset({400, 413, 422})
AT_FIRST = 64
"""So many refusals before any reply: then it is the endpoint that cannot do what is asked."""


@dataclass(frozen=True)
class Choice:
    """One reply, as vLLM's CompletionOutput has it."""

    text: str
    finish_reason: str
    token_ids: range
    logprobs: None = None


@dataclass(frozen=True)
class Told:
    """The outcome of a request, as vLLM's RequestOutput has it; or why there is none."""

    outputs: list[Choice] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_tokens: int = 0
    refused: str = ""


class Endpoint:
    """Asks `URL#MODEL`: chat completions, with the schema as the format of the response.

    What the endpoint refuses (a prompt that is too long, say) costs that request only; where it
    refuses all, or fails again and again, the run ends, with what is answered by then. Panjue's own
    server takes no schema from a client: there `constrained=false` sends none. Good for one run.
    """

    def __init__(
        self,
        name: str,
        sampling: Mapping[str, Any] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Take the address and the model's name there; `transport` where it is no plain HTTP.

        Raises:
            UserError: It is not of that form, or OpenAI has no such sampling.
        """
        self._url, _, self._model = name.partition("#")
        check_settings("sampling", sampling or {}, SAMPLING)
        self._sampling = dict(sampling or {})
        key = os.environ.get(KEY, "")
        try:
            if not httpx.URL(self._url).host or not self._model:
                raise httpx.InvalidURL("")
        except httpx.InvalidURL:
            told = f"endpoint: {name!r} is not URL#MODEL, as http://127.0.0.1:8000/v1#x is"
            raise UserError(told) from None
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )
        self._ending = threading.Event()

    def complete(
        self, requests: Iterable[Request | None], in_flight: int, check: Callable[[], None]
    ) -> Iterator[tuple[Request, Any]]:
        """Yield every request with its outcome, as `engine.complete` does."""
        pool = ThreadPoolExecutor(in_flight)
        try:
            yield from self._outcomes(pool, requests, in_flight, check)
        finally:  # nobody waits for replies that nobody wants
            self._ending.set()
            self._client.close()
            pool.shutdown(wait=False, cancel_futures=True)

    def _outcomes(
        self,
        pool: ThreadPoolExecutor,
        requests: Iterable[Request | None],
        in_flight: int,
        check: Callable[[], None],
    ) -> Iterator[tuple[Request, Told]]:
        source, end = iter(requests), object()
        running: dict[Future[Told], Request] = {}
        held: list[tuple[Request, Told]] | None = []  # refusals before any reply
        exhausted, failure = False, None
        while running or not exhausted:
            check()
            while not exhausted and len(running) < in_flight:
                request = next(source, end)
                exhausted = request is end
                if not isinstance(request, Request):
                    break
                running[pool.submit(self._ask, request)] = request
            if held and (not running or len(held) >= AT_FIRST):
                raise self._refuses_all(held[0][1])
            done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                request = running.pop(future)
                try:
                    outcome = future.result()
                except UserError as error:
                    failure, exhausted = failure or error, True
                    self._ending.set()  # those that run end as they can, none is tried again
                    continue
                if held is not None and outcome.refused:
                    held.append((request, outcome))
                    continue
                yield from held or ()
                held = None
                yield request, outcome
        if failure:
            raise failure
        if held:
            raise self._refuses_all(held[0][1])

    def _refuses_all(self, outcome: Told) -> UserError:
        return UserError(
            f"{self._url}: refuses what it is asked ({outcome.refused}); "
            "if it takes no schema, say constrained=false"
        )

    def _ask(self, request: Request) -> Told:
        pauses, busy_until = list(PAUSES_S), time.monotonic() + LONGEST_BUSY_S
        while True:
            try:
                reply = self._client.post(f"{self._url}/chat/completions", json=self._body(request))
                if reply.status_code in REFUSED:
                    return Told(refused=f"{reply.status_code}: {reply.text[:200]}")
                if reply.status_code in BUSY and time.monotonic() < busy_until:
                    self._pause(_seconds(reply.headers.get("retry-after", "")))
                    continue
                reply.raise_for_status()
                return _told(reply.json())
            except (httpx.HTTPError, RuntimeError, LookupError, ValueError, TypeError) as error:
                status = getattr(getattr(error, "response", None), "status_code", 500)
                if not pauses or status in {401, 403, 404} or self._ending.is_set():
                    raise UserError(
                        f"{self._url}: {error or type(error).__name__}; what is answered is kept, "
                        "the same command goes on from there"
                    ) from None
                self._pause(pauses.pop(0))

    def _pause(self, seconds: float) -> None:
        if self._ending.wait(seconds):
            raise UserError(f"{self._url}: the run ended while it was busy")

    def _body(self, request: Request) -> dict[str, Any]:
        question, params = request.question, request.params
        body: dict[str, Any] = {
            "model": self._model,
            "messages": question.messages,
            **self._sampling,
            "temperature": params.temperature,
        }
        if params.n > 1:
            body["n"] = params.n
        if params.max_tokens:
            body["max_tokens"] = params.max_tokens
        if question.prompt:  # a model of our training: the template must render as it did there
            body["chat_template_kwargs"] = TEMPLATE_ARGS
        if question.schema:
            form = {"name": "reply", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


def _seconds(retry_after: str) -> float:
    with suppress(ValueError):
        return min(max(float(retry_after), 0.1), 60.0)
    return 2.0


def _told(reply: Any) -> Told:
    """Read a reply.

    Raises:
        ValueError: It has not the form of chat completions.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        raise ValueError("its reply is no chat completion")
    usage = reply.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    each = range(int(counts.get("completion_tokens") or 0) // len(choices))
    details = counts.get("prompt_tokens_details")
    return Told(
        [
            Choice(str(one["message"]["content"] or ""), str(one.get("finish_reason")), each)
            for one in choices
        ],
        int((details or {}).get("cached_tokens") or 0),
        int(counts.get("prompt_tokens") or 0),
    )
