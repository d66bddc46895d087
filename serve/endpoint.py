"""Any OpenAI-compatible endpoint in the engine's place: the same requests, over HTTP."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from panjue.prompts.config import check_known
from panjue.prompts.errors import UserError
from panjue.prompts.openai import FAILURES, REFUSED, Patience, content, key_header, named
from panjue.prompts.render import TEMPLATE_ARGS
from panjue.serve.engine import Request

KEY = "PANJUE_ENDPOINT_KEY"
"""Environment variable with the key that the endpoint wants."""

SAMPLING = ("temperature", "top_p", "max_tokens", "stop", "presence_penalty", "frequency_penalty")
"""Settings of `sampling` that OpenAI's chat completions know too."""

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
    server takes no schema from a client: there `constrained=false` sends none.
    """

    def __init__(
        self,
        name: str,
        sampling: Mapping[str, Any] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Take the address and the model's name there; `transport` where it is no plain HTTP.

        Raises:
            UserError: It is not of that form, or OpenAI has no such sampling.
        """
        found = named(name)
        if found is None:
            raise UserError(
                f"endpoint: {name!r} is not URL#MODEL, as http://127.0.0.1:8000/v1#x is"
            )
        url, self._model = found
        self._place = f"{url}/chat/completions"
        check_known("sampling", sampling or {}, SAMPLING)
        self._sampling = dict(sampling or {})
        self._client = httpx.AsyncClient(
            headers=key_header(KEY),
            timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )
        self.runner, self._failed = asyncio.Runner(), asyncio.Event()

    def close(self) -> None:
        """Ask no more."""
        self.runner.run(self._client.aclose())
        self.runner.close()

    def taken(self, outcomes: Iterator[tuple[Request, Told]]) -> Iterator[tuple[Request, Told]]:
        """Yield the outcomes; refusals are held back until something is answered.

        Raises:
            UserError: So far all is refused: it is the endpoint that cannot do what is asked.
        """
        held: list[tuple[Request, Told]] | None = []
        for request, outcome in outcomes:
            if held is not None and outcome.refused:
                held.append((request, outcome))
                if len(held) >= AT_FIRST:
                    break
                continue
            yield from held or ()
            held = None
            yield request, outcome
        if held:
            raise self._refuses_all(held[0][1])

    def _refuses_all(self, outcome: Told) -> UserError:
        return UserError(
            f"{self._place}: refuses what it is asked ({outcome.refused}); "
            "if it takes no schema, say constrained=false"
        )

    async def ask(self, request: Request) -> Told:
        """Return what the endpoint says to one request; cancelled, its connection is closed.

        Raises:
            UserError: It fails again and again; what still runs is then not tried again either.
        """
        body, patience = self._body(request), Patience(self._place, KEY)
        while True:
            try:
                return _told(await self._client.post(self._place, json=body))
            except FAILURES as error:
                await self._pause(patience, error)

    async def _pause(self, patience: Patience, error: Exception) -> None:
        """Wait until the request is tried again.

        Raises:
            UserError: It is not: it failed too often, or another one did.
        """
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience.pause_after(error)):
                    await self._failed.wait()
            if self._failed.is_set():
                raise UserError(f"{self._place}: the run ended while it was busy")
        except UserError as last:
            self._failed.set()
            raise UserError(
                f"{last}; what is answered is kept, the same command goes on from there"
            ) from None

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


def _told(response: httpx.Response) -> Told:
    """Read a response.

    Raises:
        httpx.HTTPStatusError: It is an error, and no refusal of this one request.
        ValueError: It has not the form of chat completions, or was broken off.
    """
    if response.status_code in REFUSED:
        return Told(refused=f"{response.status_code}: {response.text[:200]}")
    reply = response.raise_for_status().json()
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        raise ValueError("its reply is no chat completion")
    usage = reply.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    each = range(int(counts.get("completion_tokens") or 0) // len(choices))
    details = counts.get("prompt_tokens_details")
    return Told(
        [Choice(content(one), str(one.get("finish_reason")), each) for one in choices],
        int((details or {}).get("cached_tokens") or 0),
        int(counts.get("prompt_tokens") or 0),
    )
