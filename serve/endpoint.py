"""An OpenAI-compatible endpoint that answers over HTTP instead of the engine."""

import asyncio
import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, NamedTuple

from openai import APIStatusError, AsyncOpenAI, OpenAIError, Timeout

from panjue.prompts.example import ENDPOINT_SAID
from panjue.prompts.plumbing.decode import load_json
from panjue.prompts.plumbing.endpoint import (
    CONTENT_FILTER,
    TOO_LONG,
    key_of,
    making_client,
    parse_endpoint,
)
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.serve.ask import Request
from panjue.serve.settings import ENDPOINT_SAMPLING

ENDPOINT_KEY = "PANJUE_ENDPOINT_KEY"  # environment variable with the endpoint's API key
TEMPLATE_FIELD = "chat_template_kwargs"  # of requests to vLLM; OpenAI does not have it
LOGPROBS_FIELD = "logprobs"  # of requests; reasoning models and some gateways refuse it

REFUSED_STATUSES = frozenset({400, 413, 422, 501})
"""HTTP statuses for a request that is at fault, for example because its prompt is too long."""

UNAUTHORIZED = 401
NOT_FOUND = 404
VERSION = re.compile(r"/v\d")  # in an address, as in /v1 or /api/v3
MAX_QUOTED = 200  # characters of what a server said that are shown
ABORTED = frozenset({"abort", "error"})  # finish reasons of a vLLM server that was stopped
MAX_REFUSALS = 8  # after so many refusals and no reply, the run ends
NO_TEXT = "nothing (content: null)"  # e.g. of a reasoning model with too few tokens
MESSAGE = re.compile(r'"(?:message|detail|msg)"\s*:\s*"((?:[^"\\]|\\.)*)')
"""Pattern of the message in the JSON of a server's error, up to the shown length."""

FIELD = re.compile(r"\b(?:[a-z]+(?:_[a-z]+)+|temperature|schema)\b", re.ASCII)
"""Pattern of the name of a request's field in such a message."""

SCHEMA_FIELDS = ("response_format", "json_schema", "structured_outputs", "schema")

MAX_RETRIES = 8  # after 0.5 s, 1 s, 2 s and so on up to 8 s, or after the time that the server says


class EndpointToken(NamedTuple):
    """A token of a reply, with the fields of vLLM's Logprob."""

    logprob: float
    decoded_token: str  # empty if it has only a part of a character


@dataclass(frozen=True)
class EndpointReply:
    """One reply, with the fields of vLLM's CompletionOutput."""

    text: str
    finish_reason: str  # "unknown" if the endpoint does not say it
    token_ids: range  # only its length counts, since the ids are not sent
    logprobs: Sequence[Mapping[int, EndpointToken]] | None = None  # None: they were not sent


@dataclass(frozen=True)
class EndpointOutput:
    """The outcome of a request, with the fields of vLLM's RequestOutput, or why it was refused."""

    outputs: list[EndpointReply] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_tokens: int = 0
    refused: str = ""


class Endpoint:
    """Sends chat completions to `URL#MODEL`, with the schema as the response format."""

    longest = 0  # unknown

    def __init__(self, name: str) -> None:
        self._url, self._model = parse_endpoint(name)
        self._failure = ""  # why the run ends; every later request ends with the same error
        self._replies = 0
        self._refusals = 0
        # Optional fields of requests, see `_optional_fields`:
        self._accepted: set[str] = set()  # a request with the field was answered
        self._rejected: set[str] = set()  # the field is no longer sent, since it was refused
        self.runner = asyncio.Runner()
        key = key_of(ENDPOINT_KEY) or "none"  # the client needs one
        timeout = Timeout(600, connect=10)
        with making_client():
            self._client = AsyncOpenAI(
                base_url=self._url, api_key=key, max_retries=MAX_RETRIES, timeout=timeout
            )

    def close(self) -> None:
        self.runner.run(self._client.close())
        self.runner.close()

    async def ask(self, request: Request) -> EndpointOutput:
        """Return the outcome of one request. If cancelled, close its connection.

        If a server returns fewer choices than `n`, ask again for the others.
        """
        wanted = request.sampling.get("n", 1)
        replies: list[EndpointReply] = []
        cached = prompt = 0
        while len(replies) < wanted:
            if self._failure:
                raise UserError(self._failure)
            more = await self._ask(request, wanted - len(replies))
            if not more.outputs:
                if replies:
                    break  # keep the replies that came
                self._count_refusal(more.refused)
                return replace(more, refused=ENDPOINT_SAID + more.refused)
            self._replies += len(more.outputs)
            replies += more.outputs
            cached += more.num_cached_tokens
            prompt += more.prompt_tokens
        return EndpointOutput(replies[:wanted], cached, prompt)

    def _count_refusal(self, why: str) -> None:
        """End the run if the endpoint has refused `MAX_REFUSALS` requests and answered none.

        A case that is refused for its content does not count, because others may be answered.
        """
        self._refusals += not CONTENT_FILTER.search(why)
        if self._refusals >= MAX_REFUSALS and not self._replies:
            self._failure = f"{self._url}: refuses all requests ({why}); {way_out(why)}"
            raise UserError(self._failure)

    async def _ask(self, request: Request, number: int) -> EndpointOutput:
        """Send one request for `number` replies. Another error than a refusal ends the run.

        If the endpoint seems to refuse an optional field, the request is sent again without it.
        """
        optional = self._optional_fields(request)
        arguments = self._arguments(request, number, optional)
        failure = ""  # an error that is not about this request, so that it ends the run
        try:
            answer = await self._client.chat.completions.with_raw_response.create(**arguments)
            output = read_completion(answer.text)
            reason = output.refused
        except APIStatusError as error:
            text = readable(error.response.text)
            reason = f"{error.status_code} {text}"
            output = EndpointOutput(refused=f"{error.status_code}: {text[:MAX_QUOTED]}")
            if error.status_code not in REFUSED_STATUSES:
                failure = reason[:MAX_QUOTED] + self._hint(error.status_code)
        except (OpenAIError, ValueError) as error:
            failure = ": ".join(str(each) for each in (error, error.__cause__) if each)
            reason = failure
            output = EndpointOutput()
            if isinstance(error, OpenAIError):  # nothing answered, so no field was the reason
                optional = []
        if output.outputs:
            self._accepted.update(optional)
            return output
        for name in optional:
            # Log-probabilities are refused in many words, so any refusal may be of them until some
            # request with them was answered.
            may_be_meant = name == LOGPROBS_FIELD and name not in self._accepted
            if name in reason.lower() or may_be_meant:
                self._rejected.add(name)  # so the same request, and later ones, lack the field
                again = await self._ask(request, number)
                if not again.outputs:
                    self._rejected.discard(name)  # the field was not the reason
                return again
        if failure:
            end = "finished rows are kept, run the same command to resume"
            self._failure = f"{self._url}: {failure.splitlines()[0].rstrip('.')}; {end}"
            raise UserError(self._failure)
        return output

    def _hint(self, status: int) -> str:
        """Return what may be wrong after an HTTP status; empty if it can be anything."""
        if status == UNAUTHORIZED:
            if key_of(ENDPOINT_KEY):
                return f"; it does not take the key in {ENDPOINT_KEY}"
            return f"; set {ENDPOINT_KEY}"
        if status == NOT_FOUND and not VERSION.search(self._url):
            return f"; if its address ends in /v1, say endpoint={self._url}/v1#{self._model}"
        return ""

    def _optional_fields(self, request: Request) -> list[str]:
        """Return the fields to send that only some endpoints know, without those it has refused.

        A question has a `template` if panjue's tokenizer made its prompt: the arguments of the chat
        template, such as `enable_thinking`, with which our model was trained.
        """
        wanted = []
        if request.question.template:
            wanted.append(TEMPLATE_FIELD)
        if request.with_logprobs:
            wanted.append(LOGPROBS_FIELD)
        return [name for name in wanted if name not in self._rejected]

    def _arguments(
        self, request: Request, number: int, optional: Collection[str]
    ) -> dict[str, Any]:
        """Return the arguments of openai's `chat.completions.create` for `number` replies.

        TEMPLATE_FIELD and LOGPROBS_FIELD are sent only if they are in `optional`.
        """
        question = request.question
        arguments: dict[str, Any] = {
            "model": self._model,
            "messages": question.messages,
            "stream": False,  # some gateways stream where nothing is said
            "temperature": 0.0,
            **request.sampling,
        }
        further = dict(arguments.pop("extra_body", {}))
        arguments.pop("n", None)  # of all replies; `number` is what is still wanted
        if number > 1:
            arguments["n"] = number
        if question.room:  # the tokens left for the reply
            arguments.setdefault("max_tokens", question.room)
        if LOGPROBS_FIELD in optional:
            arguments[LOGPROBS_FIELD] = True
        if TEMPLATE_FIELD in optional:
            further[TEMPLATE_FIELD] = {**question.template, **further.get(TEMPLATE_FIELD, {})}
        if question.schema:
            json_schema = {"name": "reply", "strict": True, "schema": question.schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        sent = {name: value for name, value in arguments.items() if value is not None}
        return {**sent, "extra_body": further} if further else sent


def readable(text: str) -> str:
    """Return a server's message with unescaped Chinese, on one line if it is JSON."""
    value = load_json(text)
    unescaped = text if value is None else dump(value)
    return unescaped.encode(errors="replace").decode()  # half a surrogate pair becomes `?`


def way_out(refusal: str) -> str:
    """Return what to change after a refusal, by the first field that its message names.

    For example `it takes no schema: set constrained=false and another answers=NAME`.
    """
    message = MESSAGE.search(refusal)
    field = FIELD.search(message[1]) if message else None
    name = field[0] if field else ""
    if TOO_LONG.search(refusal):
        change = "ask a model with a longer context,"
    elif not name:
        change = "if it takes no schema, set constrained=false"
    elif name in SCHEMA_FIELDS:
        change = "it takes no schema: set constrained=false"
    elif name in ENDPOINT_SAMPLING:
        change = f"set sampling.{name}, or leave it out with sampling.{name}=null,"
    else:
        change = f"set this field with sampling.extra_body.{name}=VALUE"
    return f"{change} and another answers=NAME"


def read_completion(body: str) -> EndpointOutput:
    """Return the replies in the body of a response with status 200.

    Some gateways send an error in it. If the error is about this case (its content, its length),
    return the case as refused. ValueError: any other body, with what the server said.
    """
    value = load_json(body)
    completion = value if isinstance(value, dict) else {}
    if not completion.get("choices"):
        error = completion.get("error")
        said = " ".join((dump(error) if error else readable(body)).split())[:MAX_QUOTED]
        if completion and (CONTENT_FILTER.search(said) or TOO_LONG.search(said)):
            return EndpointOutput(refused=said)
        raise ValueError(f"its reply is not in OpenAI's format{kind_of(body)}: {said or 'nothing'}")
    replies = []
    refused = NO_TEXT  # if no choice has a text
    try:
        usage = completion.get("usage") or {}  # some servers leave out parts of the usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        # The server counts the tokens of all replies together. Each gets an equal share.
        tokens = (usage.get("completion_tokens") or 0) // len(completion["choices"])
        for choice in completion["choices"]:
            message = choice["message"]
            text = message_text(message.get("content"))
            reason = choice.get("finish_reason")
            if text is not None:
                logprobs = token_logprobs(choice.get("logprobs"))
                finish = str(reason or "unknown")
                token_ids = range(tokens)  # only their number is known
                replies.append(EndpointReply(text, finish, token_ids, logprobs))
            elif refusal := message_text(message.get("refusal")):
                refused = f"the model refuses: {refusal[:MAX_QUOTED]}"
            elif reason:
                refused = f"{NO_TEXT}, finish_reason: {reason}"
    except (AttributeError, LookupError, TypeError):
        said = readable(body)[:MAX_QUOTED]
        raise ValueError(f"its reply is not in OpenAI's format: {said}") from None
    if any(reply.finish_reason in ABORTED for reply in replies):
        raise ValueError("it aborted its reply")
    prompt = usage.get("prompt_tokens") or 0
    return EndpointOutput(replies, cached, prompt, "" if replies else refused)


def token_logprobs(logprobs: Any) -> list[dict[int, EndpointToken]] | None:
    """Return the tokens of a choice with their log-probabilities; None without any.

    The form is vLLM's: for each position, token id -> token. Only one token is known, and its
    position stands for its id. If a character has several tokens, the last one gets its text.
    Servers whose form differs give none.
    """
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    tokens = []
    try:
        for number, token in enumerate(content or ()):
            spelled = token.get("bytes")
            is_spelled = isinstance(spelled, list)
            written = bytes(spelled) if is_spelled else token["token"].encode(errors="replace")
            logprob = float(token["logprob"])
            if not isfinite(logprob):
                return None
            tokens.append({number: EndpointToken(logprob, decoder.decode(written))})
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    return tokens or None


def message_text(content: Any) -> str | None:
    """Return the text of a message, which may come in parts; None if it has none.

    TypeError: it has another form. A lone surrogate, which JSON can have, becomes `?`.
    """
    if content is None:
        return None
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    if not isinstance(content, str):
        raise TypeError
    return content.encode(errors="replace").decode()


def kind_of(body: str) -> str:
    """Return the end of an error message about a body that is not in OpenAI's format.

    It says what the body is instead, with a hint at the reason; it is empty if that is not known.
    """
    start = body.lstrip()[:9].lower()
    if start.startswith(("<!doctype", "<html")):
        return ", but a web page (is the address right, is a login needed?)"
    if start.startswith("data:"):
        return ", but a stream, for which nobody asked (is there a proxy that streams?)"
    return ""
