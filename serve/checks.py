"""Checks of a request to the server: its key, size and form, and what vLLM may see of it."""

import asyncio
import hmac
import json
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from panjue.prompts.plumbing.files import BOM
from panjue.prompts.render import neutralize_tokens
from panjue.serve.settings import LOOPBACK

PROMPT_FIELDS = (
    "messages",
    "input",
    "instructions",
    "previous_input_messages",
    "documents",
    "tools",
    "tool_choice",
    "response_format",
    "text",
    "chat_template_kwargs",
)
"""Fields of a request body that a chat template may put into the prompt. Control tokens in their
texts are escaped. The `prompt` of completions is passed on unchanged."""

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Fields that vLLM servers send each other. Their `prompt_token_ids` would replace the prompt."""

LARGEST_BODY = 2**18  # bytes of a request body that are read, some 80,000 characters
LARGEST_DISCARD = 2**26
BODY_TIMEOUT_S = 30.0


class Problem(Exception):
    """An error response to a request."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the response, in the form of OpenAI's errors."""
        kind = "invalid_request_error" if self.status < 500 else "service_unavailable"
        error = {"message": str(self), "type": kind, "param": None, "code": self.status}
        return {"error": error}


def check_key(request: Request, key: str | None) -> None:
    """Refuse a client without the key. If there is no key, refuse a foreign host name.

    Without a key, only this machine reaches the server: `server_key` refuses any other address.
    """
    if key is None:
        # Against DNS rebinding: a foreign page must not reach us under its own host name.
        if request.url.hostname in LOOPBACK:
            return
        raise Problem(400, "without a key, use the host name localhost or 127.0.0.1")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # As bytes, because compare_digest refuses non-ASCII text.
    same = hmac.compare_digest(given.strip().encode(), key.encode())
    if scheme.lower() != "bearer" or not same:
        message = "the key is missing or wrong; send 'Authorization: Bearer KEY'"
        raise Problem(401, message, **{"WWW-Authenticate": "Bearer"})


async def read_body(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request's body; refuse a body that is too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Otherwise a foreign page could send requests (not read replies): only for JSON, browsers
        # ask for permission first.
        raise Problem(415, "send JSON, with 'Content-Type: application/json'")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _limited_body(request)
            value = from_json(body.removeprefix(BOM))
    except TimeoutError:
        raise Problem(408, "the body came too slowly", Connection="close") from None
    except ValueError as error:
        raise Problem(400, f"the body is no JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object")
    return value


async def _limited_body(request: Request) -> bytes:
    """Return the body of a request; refuse one above `LARGEST_BODY` bytes.

    Clients read a response only when they have sent their body. So the rest of a body that is too
    large is discarded, up to `LARGEST_DISCARD` bytes.
    """
    body = bytearray()
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= LARGEST_BODY:
            body += piece
        elif size > LARGEST_DISCARD:
            break
    if size > LARGEST_BODY:
        raise Problem(413, f"the body is larger than {LARGEST_BODY} bytes", Connection="close")
    return bytes(body)


def for_vllm(body: dict[str, Any], tokenizer: Any, *, seeds: bool) -> bytes:
    """Return the body for a request that vLLM answers itself, without forged control tokens.

    `seeds` says whether the engine survives seeds of requests.
    """
    for name in TRANSFER_FIELDS:
        if body.get(name):
            raise Problem(400, f"{name}: is not allowed")
    greedy = body.get("temperature") == 0  # the default is 1
    if not seeds and body.get("seed") is not None and not greedy:
        raise Problem(400, "seed: it kills vLLM on a CPU; leave it out or set temperature 0")
    if body.get("tools") == []:  # vLLM refuses it, and some clients always send it
        body = {name: value for name, value in body.items() if name != "tools"}
    texts = {name: neutralized(tokenizer, body[name]) for name in PROMPT_FIELDS if name in body}
    return json.dumps({**body, **texts}, ensure_ascii=False).encode()


def reply_count(body: dict[str, Any]) -> int:
    """Return how many replies a request asks for: `n` for each prompt."""
    prompt = body.get("prompt")
    prompts = 1
    if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
        prompts = len(prompt)  # else these are the token ids of one prompt
    try:  # vLLM also accepts numbers as texts, and refuses texts that are no numbers
        return max(1, int(body.get("n") or 1)) * prompts
    except (ValueError, TypeError, OverflowError):
        return prompts


def neutralized(tokenizer: Any, value: Any) -> Any:
    """Return a JSON value with the control tokens in its texts escaped."""
    if isinstance(value, str):
        return neutralize_tokens(tokenizer, value)
    if isinstance(value, list):
        return [neutralized(tokenizer, item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {neutralized(tokenizer, k): neutralized(tokenizer, v) for k, v in value.items()}
    if isinstance(value.get("arguments"), str):  # vLLM parses this JSON: `\u003c` is a `<`
        try:  # the same parser, since others refuse half a surrogate pair
            result["arguments"] = json.dumps(neutralized(tokenizer, json.loads(value["arguments"])))
        except RecursionError:
            raise Problem(400, "arguments: are nested too deeply") from None
        except ValueError:  # no JSON
            pass
    return result
