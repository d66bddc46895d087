"""Any OpenAI-compatible endpoint instead of the engine: the same requests, over HTTP."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.config import check_known
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.openai import (
    REFUSED_STATUSES,
    REQUEST_ERRORS,
    RetryPolicy,
    error_message,
    events,
    key_header,
    parse_endpoint,
    reply_text,
)
from panjue.prompts.render import TEMPLATE_ARGS
from panjue.prompts.task import Task
from panjue.serve.source import OnText, Question, Request, ignore_text

KEY = "PANJUE_ENDPOINT_KEY"
"""Environment variable with the endpoint's API key."""

SAMPLING = ("temperature", "top_p", "max_tokens", "stop", "presence_penalty", "frequency_penalty")
"""Settings of `sampling` that OpenAI's chat completions have too."""

MAX_FIRST_REFUSALS = 64
"""After so many refusals and no reply, the run ends: the endpoint cannot do this task."""


@dataclass(frozen=True)
class Choice:
    """One reply, with the fields of vLLM's CompletionOutput."""

    text: str
    finish_reason: str
    token_ids: range
    logprobs: None = None


@dataclass(frozen=True)
class EndpointOutput:
    """The outcome of a request, with the fields of vLLM's RequestOutput, or why it was refused."""

    outputs: list[Choice] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_tokens: int = 0
    refused: str = ""


class Endpoint:
    """Sends chat completions to `URL#MODEL`, with the schema as the response format.

    A refused request (its prompt is too long, say) has no reply, and the run continues. If the
    endpoint refuses all requests or fails repeatedly, the run ends; finished rows are kept.
    """

    def __init__(
        self, name: str, sampling: Mapping[str, Any] | None = None, keys: Sequence[str] = (KEY,)
    ) -> None:
        """Take `URL#MODEL`, sampling settings, and the variables that may hold the key.

        Raises:
            UserError: `name` is not of that form, or OpenAI has no such sampling setting.
        """
        url_and_model = parse_endpoint(name)
        if url_and_model is None:
            raise UserError(f"endpoint: {name!r} is not URL#MODEL, e.g. http://127.0.0.1:8000/v1#x")
        url, self._model = url_and_model
        self._url = f"{url}/chat/completions"
        check_known("sampling", sampling or {}, SAMPLING)
        self._sampling = dict(sampling or {})
        self._client = httpx.AsyncClient(
            headers=key_header(*keys),
            timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=None),
        )
        self._key = keys[0]
        self.runner, self._failed, self._running = asyncio.Runner(), asyncio.Event(), 0

    def close(self) -> None:
        """Close all connections and the event loop."""
        self.runner.run(self.aclose())
        self.runner.close()

    async def aclose(self) -> None:
        """Close all connections; call it in the event loop that made the requests."""
        await self._client.aclose()

    def check_outcomes(
        self, outcomes: Iterator[tuple[Request, EndpointOutput]]
    ) -> Iterator[tuple[Request, EndpointOutput]]:
        """Yield the outcomes; hold refusals back until there is a first reply.

        Raises:
            UserError: All requests so far are refused, so the endpoint cannot do this task.
        """
        held: list[tuple[Request, EndpointOutput]] | None = []
        for request, outcome in outcomes:
            if held is not None and outcome.refused:
                held.append((request, outcome))
                if len(held) >= MAX_FIRST_REFUSALS:
                    break
                continue
            yield from held or ()
            held = None
            yield request, outcome
        if held:
            raise UserError(
                f"{self._url}: refuses all requests ({held[0][1].refused}); "
                "if it takes no schema, set constrained=false"
            )

    async def ask(self, request: Request, on_text: OnText = ignore_text) -> EndpointOutput:
        """Return the outcome of one request; when cancelled, its connection is closed.

        Raises:
            UserError: It failed too often; the other running requests are not retried either.
        """
        body, policy = self._body(request), RetryPolicy(self._url, self._key)
        self._running += 1
        try:
            while True:
                try:
                    if on_text is not ignore_text:
                        return await self._stream_reply(body, on_text)
                    response = await self._client.post(self._url, json=body)
                    return _refused(response) or _read_reply(response.raise_for_status().json())
                except REQUEST_ERRORS as error:
                    await self._pause(policy, error)
        finally:
            self._running -= 1
            if not self._running:  # later requests are retried again
                self._failed.clear()

    async def _stream_reply(self, body: dict[str, Any], on_text: OnText) -> EndpointOutput:
        """Return one streamed reply.

        Raises:
            UserError: The stream broke off; it is not retried, since the user has seen a part.
        """
        text, finish_reason = "", None
        async with self._client.stream(
            "POST", self._url, json={**body, "stream": True}
        ) as response:
            if response.is_error:
                await response.aread()
                if refused := _refused(response):
                    return refused
                response.raise_for_status()
            try:
                async for _, data in events(response.aiter_bytes()):
                    if "error" in data and not text and _code(data) in REFUSED_STATUSES:
                        return EndpointOutput(refused=f"{_code(data)}: {error_message(data)[:200]}")
                    if "error" in data:
                        raise ValueError(error_message(data))
                    for choice in data.get("choices") or ():
                        piece = choice.get("delta", {}).get("content") or ""
                        text += piece
                        on_text(piece)
                        finish_reason = choice.get("finish_reason") or finish_reason
                if finish_reason is None:
                    raise ValueError("the stream ended without a finish_reason")
                choice = {"message": {"content": text}, "finish_reason": finish_reason}
                return _read_reply({"choices": [choice]})
            except REQUEST_ERRORS as error:
                raise UserError(f"{self._url}: the reply broke off ({error}); ask again") from None

    async def _pause(self, policy: RetryPolicy, error: Exception) -> None:
        """Wait before the request is retried.

        Raises:
            UserError: It is not retried: this request or another one failed too often.
        """
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(policy.pause_after(error)):
                    await self._failed.wait()
            if self._failed.is_set():
                raise UserError(f"{self._url}: the run ended while the endpoint was busy")
        except UserError as last:
            self._failed.set()
            raise UserError(
                f"{last}; finished rows are kept, run the same command to resume"
            ) from None

    def _body(self, request: Request) -> dict[str, Any]:
        question, sampling = request.question, request.sampling
        max_tokens = sampling.get("max_tokens", question.room)
        body: dict[str, Any] = {
            "model": self._model,
            "messages": question.messages,
            "temperature": 0.0,
            **self._sampling,
            **{name: sampling[name] for name in ("temperature", "n") if name in sampling},
            **({"max_tokens": max_tokens} if max_tokens else {}),
        }
        if question.prompt:  # our own model: the chat template must render as in training
            body["chat_template_kwargs"] = TEMPLATE_ARGS
        if question.schema:
            json_schema = {"name": "reply", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return body


def _code(data: Any) -> Any:
    """Return the status in an error event; the first event of a vLLM stream may be one."""
    return data["error"].get("code") if isinstance(data["error"], dict) else None


def _refused(response: httpx.Response) -> EndpointOutput | None:
    """Return the outcome of a request that is refused; None if it is not."""
    if response.status_code not in REFUSED_STATUSES:
        return None
    return EndpointOutput(refused=f"{response.status_code}: {response.text[:200]}")


def _read_reply(reply: Any) -> EndpointOutput:
    """Read a reply.

    Raises:
        ValueError: It is no chat completion, or it broke off.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        raise ValueError("the reply is no chat completion")
    usage = reply.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    tokens_each = range(int(counts.get("completion_tokens") or 0) // len(choices))
    details = counts.get("prompt_tokens_details")
    return EndpointOutput(
        [Choice(reply_text(item), str(item.get("finish_reason")), tokens_each) for item in choices],
        int((details or {}).get("cached_tokens") or 0),
        int(counts.get("prompt_tokens") or 0),
    )


class PlainAsker:
    """Makes questions for an endpoint with another tokenizer; prompts are not shortened."""

    tokenizer = None

    def __init__(self, task: Task, labels: Labels, max_tokens: int, *, constrained: bool) -> None:
        """Take the longest reply in tokens as `max_tokens`; 0 means the endpoint's limit."""
        self.task, self.labels = task, labels
        self._max_tokens, self._constrained = max_tokens, constrained

    def question(self, example: Example) -> Question:
        """Return the question for one example."""
        schema = self.task.ask.schema(example, self.labels) if self._constrained else None
        return Question([], schema, self._max_tokens, 0, messages=self.task.ask.prompt(example))
