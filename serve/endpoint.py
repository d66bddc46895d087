"""Any OpenAI-compatible endpoint in the engine's place: the same requests, over HTTP."""

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
    FAILURES,
    REFUSED,
    Patience,
    complaint,
    content,
    events,
    key_header,
    named,
)
from panjue.prompts.render import TEMPLATE_ARGS
from panjue.prompts.task import Task
from panjue.serve.source import Grow, Question, Request, quiet

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
    refuses all, or fails again and again, the run ends, with what is answered by then.
    """

    def __init__(
        self, name: str, sampling: Mapping[str, Any] | None = None, keys: Sequence[str] = (KEY,)
    ) -> None:
        """Take the address and the model's name there, and the variables that may have its key.

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
            headers=key_header(*keys),
            timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=None),
        )
        self._key = keys[0]
        self.runner, self._failed, self._asking = asyncio.Runner(), asyncio.Event(), 0

    def close(self) -> None:
        """Ask no more."""
        self.runner.run(self.aclose())
        self.runner.close()

    async def aclose(self) -> None:
        """Close all connections, on the event loop that asks."""
        await self._client.aclose()

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

    async def ask(self, request: Request, grow: Grow = quiet) -> Told:
        """Return what the endpoint says to one request; cancelled, its connection is closed.

        Raises:
            UserError: It fails again and again; what still runs is then not tried again either.
        """
        body, patience = self._body(request), Patience(self._place, self._key)
        self._asking += 1
        try:
            while True:
                try:
                    if grow is not quiet:
                        return await self._grown(body, grow)
                    response = await self._client.post(self._place, json=body)
                    return _refused(response) or _told(response.raise_for_status().json())
                except FAILURES as error:
                    await self._pause(patience, error)
        finally:
            self._asking -= 1
            if not self._asking:  # who asks next has patience again
                self._failed.clear()

    async def _grown(self, body: dict[str, Any], grow: Grow) -> Told:
        """Return one streamed reply.

        Raises:
            UserError: It broke off; what has grown is not asked for again.
        """
        text, end = "", None
        async with self._client.stream("POST", self._place, json={**body, "stream": True}) as sent:
            if sent.is_error:
                await sent.aread()
                if refused := _refused(sent):
                    return refused
                sent.raise_for_status()
            try:
                async for _, data in events(sent.aiter_bytes()):
                    if "error" in data and not text and _code(data) in REFUSED:
                        return Told(refused=f"{_code(data)}: {complaint(data)[:200]}")
                    if "error" in data:
                        raise ValueError(complaint(data))
                    for choice in data.get("choices") or ():
                        piece = choice.get("delta", {}).get("content") or ""
                        text += piece
                        grow(piece)
                        end = choice.get("finish_reason") or end
                if end is None:
                    raise ValueError("it never said why it ended")
                choice = {"message": {"content": text}, "finish_reason": end}
                return _told({"choices": [choice]})
            except FAILURES as error:
                raise UserError(
                    f"{self._place}: broke its reply off ({error}); ask again"
                ) from None

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
        question, asked = request.question, request.sampling
        most = asked.get("max_tokens", question.room)
        body: dict[str, Any] = {
            "model": self._model,
            "messages": question.messages,
            "temperature": 0.0,
            **self._sampling,
            **{name: asked[name] for name in ("temperature", "n") if name in asked},
            **({"max_tokens": most} if most else {}),
        }
        if question.prompt:  # a model of our training: the template must render as it did there
            body["chat_template_kwargs"] = TEMPLATE_ARGS
        if question.schema:
            form = {"name": "reply", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


def _code(data: Any) -> Any:
    """Return the status of an error that comes as an event: vLLM's streams may begin with one."""
    return data["error"].get("code") if isinstance(data["error"], dict) else None


def _refused(response: httpx.Response) -> Told | None:
    """Return that this one request is refused, if it is."""
    if response.status_code not in REFUSED:
        return None
    return Told(refused=f"{response.status_code}: {response.text[:200]}")


def _told(reply: Any) -> Told:
    """Read a reply.

    Raises:
        ValueError: It has not the form of chat completions, or was broken off.
    """
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


class PlainAsker:
    """Makes questions for an endpoint whose tokenizer is not ours: nothing is shortened."""

    tokenizer = None

    def __init__(self, task: Task, labels: Labels, max_tokens: int, *, constrained: bool) -> None:
        """Take the longest reply in `max_tokens`; 0: as long as the endpoint lets it be."""
        self.task, self.labels = task, labels
        self._max_tokens, self._constrained = max_tokens, constrained

    def question(self, example: Example) -> Question:
        """Return what to ask for one example."""
        schema = self.task.ask.schema(example, self.labels) if self._constrained else None
        return Question([], schema, self._max_tokens, 0, messages=self.task.ask.prompt(example))
