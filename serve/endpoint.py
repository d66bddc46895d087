"""Any OpenAI-compatible endpoint in the engine's place: the same requests, over HTTP."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import httpx

from panjue.prompts.errors import UserError
from panjue.serve.engine import Request

KEY = "PANJUE_ENDPOINT_KEY"
"""Environment variable with the key that the endpoint wants."""

PATIENCE_S = (1, 4, 16)
"""Pauses before a request that failed for no fault of its own is tried again."""


@dataclass(frozen=True)
class Choice:
    """One reply, as vLLM's CompletionOutput has it."""

    text: str
    finish_reason: str
    token_ids: range
    logprobs: None = None


@dataclass(frozen=True)
class Told:
    """The outcome of a request, as vLLM's RequestOutput has it."""

    outputs: list[Choice]
    num_cached_tokens: int


class Endpoint:
    """Asks `URL#MODEL`: chat completions, with the schema as the format of the response.

    What the endpoint refuses (a prompt that is too long, say) costs that request only, whose reply
    is empty. An endpoint that is gone, or fails again and again, ends the run. Panjue's own server
    takes no schema from a client: there, and wherever else, `constrained=false` sends none.
    """

    def __init__(self, name: str, transport: httpx.BaseTransport | None = None) -> None:
        """Take the address and the model's name there; `transport` where it is no plain HTTP.

        Raises:
            UserError: It is not of that form.
        """
        self._url, _, self._model = name.partition("#")
        if not self._url.startswith(("http://", "https://")) or not self._model:
            raise UserError(
                f"endpoint: {name!r} is not URL#MODEL, as http://127.0.0.1:8000/v1#x is"
            )
        key = os.environ.get(KEY, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(600, connect=10)
        self._client = httpx.Client(headers=headers, timeout=timeout, transport=transport)

    def complete(
        self, requests: Iterable[Request | None], in_flight: int, check: Callable[[], None]
    ) -> Iterator[tuple[Request, Any]]:
        """Yield every request with its outcome, as `engine.complete` does."""
        source, end = iter(requests), object()
        running: dict[Future[Told], Request] = {}
        exhausted = False
        with self._client, ThreadPoolExecutor(in_flight) as pool:
            try:
                while running or not exhausted:
                    check()
                    while not exhausted and len(running) < in_flight:
                        request = next(source, end)
                        exhausted = request is end
                        if not isinstance(request, Request):
                            break
                        running[pool.submit(self._ask, request)] = request
                    done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield running.pop(future), future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _ask(self, request: Request) -> Told:
        for pause in (*PATIENCE_S, None):
            try:
                reply = self._client.post(f"{self._url}/chat/completions", json=self._body(request))
                if reply.status_code in {400, 413, 422}:
                    return Told([Choice("", f"refused: {reply.text[:200]}", range(0))], 0)
                reply.raise_for_status()
                return _told(reply.json())
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                status = getattr(getattr(error, "response", None), "status_code", 500)
                if pause is None or status in {401, 403, 404}:
                    raise UserError(
                        f"{self._url}: {error or type(error).__name__}; what is answered is kept, "
                        "the same command goes on from there"
                    ) from None
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _body(self, request: Request) -> dict[str, Any]:
        question, params = request.question, request.params
        body: dict[str, Any] = {
            "model": self._model,
            "messages": question.messages,
            "temperature": params.temperature,
        }
        if params.n > 1:
            body["n"] = params.n
        if question.room:
            body["max_tokens"] = question.room
        if question.schema:
            form = {"name": "reply", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


def _told(reply: dict[str, Any]) -> Told:
    usage = reply.get("usage") or {}
    number = len(reply["choices"])
    each = range(int(usage.get("completion_tokens") or 0) // max(number, 1))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Told(
        [
            Choice(str(one["message"]["content"] or ""), str(one.get("finish_reason")), each)
            for one in reply["choices"]
        ],
        int(cached),
    )
