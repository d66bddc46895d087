"""`panjue chat`: read a case from a file, a pipe or the keyboard, and print its judgments."""

import asyncio
import json
import os
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.decode import load_json
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.openai import error_message, events, key_header, parse_address
from panjue.prompts.task import load_task
from panjue.serve.endpoint import Endpoint, PlainAsker
from panjue.serve.law import read_law
from panjue.serve.names import find_defendants
from panjue.serve.settings import KEY
from panjue.serve.source import OnText, ignore_text, requests
from panjue.serve.tables import tables

KEYS = (KEY, "OPENAI_API_KEY")
"""Environment variables with the server's key; the first one that is set is used."""

TIMEOUT = httpx.Timeout(600, connect=5)
END_OF_INPUT = b"\x04"
"""Ctrl-D."""

Ask = Callable[[str, OnText], Awaitable[dict[str, Any]]]
"""Facts, callback for pieces of the reply -> the result in the form of a panjue server."""


@dataclass
class ChatOptions:
    """Options of the command line.

    Attributes:
        url: URL of a panjue server or of any OpenAI-compatible server.
        task: Name of the task.
        defendants: Names of the defendants; if empty, they are found in the facts.
        samples: Number of samples besides the greedy reply (panjue server only).
        labels: The labels.json with which replies of other servers are decoded.
        model: Name of the model on the server; by default the first one that it lists.
    """

    url: str
    task: str = "judgment"
    defendants: Sequence[str] = ()
    samples: int = 0
    labels: Path | None = None
    model: str | None = None


def main(options: ChatOptions, file: Path | None, law: Path | None, *, as_json: bool) -> None:
    """Send the case in `file`, or the cases from the keyboard or a pipe, and print the answers.

    Raises:
        UserError: The server cannot be reached or returns an error; says what to do.
    """
    asyncio.run(_main(options, file, law, as_json))


async def _main(options: ChatOptions, file: Path | None, law: Path | None, as_json: bool) -> None:
    out, err = Console(soft_wrap=as_json), Console(stderr=True, highlight=False)
    async with connect(options, err) as (ask, labels):
        texts = {**labels.get("law", {}), **(read_law(law) if law else {})}
        is_quiet = as_json or not err.is_terminal
        on_text = ignore_text if is_quiet else partial(err.out, end="")
        is_typed = file is None and sys.stdin.isatty()
        for fact in pasted_cases(err) if is_typed else [read_fact(file)]:
            try:
                result = await ask(fact, on_text)
            except UserError as error:
                if not is_typed:
                    raise
                err.print(f"panjue: {error}")  # the next case may succeed
                continue
            if not is_quiet:
                err.print()
            if as_json:
                print(json.dumps(result, ensure_ascii=False))
            else:
                out.print(*tables(result, texts, demo=labels.get("demo", False)))


def read_fact(file: Path | None) -> str:
    """Return the text of a file or of standard input, without a byte order mark.

    Raises:
        UserError: It cannot be read, is empty, or holds JSON objects.
    """
    try:
        raw = file.read_bytes() if file else sys.stdin.buffer.read()
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file or 'stdin'}: not UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise UserError(f"{file or 'stdin'}: is empty; give the facts of a case")
    if any(isinstance(load_json(part), dict) for part in (text, text.strip().splitlines()[0])):
        raise UserError(
            f"{file or 'stdin'}: is JSON; give the plain text of the facts of one case "
            "(`panjue generate` answers files of cases)"
        )
    return text


def pasted_cases(err: Console) -> Iterator[str]:
    """Yield the cases that are pasted in the terminal."""
    while True:
        err.print("粘贴案件事实，然后按 Ctrl-D；不粘贴直接按 Ctrl-D 则结束。")
        err.print("Paste the facts, then press Ctrl-D. Press Ctrl-D without text to quit.")
        text = read_paste(sys.stdin.fileno())
        err.print()
        if not text.strip():
            return
        yield text


def read_paste(terminal: int) -> str:
    """Return the text that is typed or pasted before Ctrl-D.

    The terminal's line mode is switched off: it cuts lines after 4,095 bytes, and most cases are
    longer.
    """
    saved = termios.tcgetattr(terminal)
    modes = [*saved]
    modes[3] &= ~termios.ICANON
    raw = bytearray()
    try:
        termios.tcsetattr(terminal, termios.TCSADRAIN, modes)
        while (piece := os.read(terminal, 2**16)) and END_OF_INPUT not in piece:
            raw += piece
        raw += piece.partition(END_OF_INPUT)[0]
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, saved)
    text: list[str] = []
    for character in raw.decode("utf-8", errors="replace"):
        if character != "\x7f":
            text.append(character)
        elif text:  # a backspace, which the line mode would have handled
            text.pop()
    return "".join(text)


@asynccontextmanager
async def connect(
    options: ChatOptions, err: Console
) -> AsyncIterator[tuple[Ask, Mapping[str, Any]]]:
    """Connect to a server; yield a function that asks it, and its `/v1/labels`, if it has them.

    Raises:
        UserError: There is no server, or it is not a panjue server and an option is missing.
    """
    async with client(options) as http:
        response = await http.get("labels")
        body = checked(response) if response.status_code in (401, 503) else parsed(response)
        if isinstance(body, dict) and "task" in body:
            task = body["task"]
            if task != options.task:
                raise UserError(f"{options.url}: answers {task!r}; say --task {task}")
            yield partial(ask_panjue, http, options), body
        else:
            server = OtherServer(options, str(http.base_url), await model_name(http, options), err)
            async with aclosing(server.endpoint):
                yield server.ask, {}


@asynccontextmanager
async def client(options: ChatOptions) -> AsyncIterator[httpx.AsyncClient]:
    """Open an HTTP client; its connection errors become a UserError."""
    headers = key_header(*KEYS)
    base = parse_address(options.url)
    if base is None:
        raise UserError(f"--url {options.url}: write it like http://127.0.0.1:8000")
    if base.path in ("", "/"):
        base = base.copy_with(path="/v1")
    try:
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT) as http:
            yield http
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise UserError(
            f"{options.url}: no server answers there; start one with `make serve`, or give --url"
        ) from None
    except httpx.HTTPError as error:
        raise UserError(f"{options.url}: the connection failed: {error}") from None


async def ask_panjue(
    http: httpx.AsyncClient, options: ChatOptions, fact: str, on_text: OnText
) -> Any:
    """Return the result from a panjue server."""
    body: dict[str, Any] = {"fact": fact, "samples": options.samples, "stream": True}
    if options.defendants:
        body["defendants"] = list(options.defendants)
    async with http.stream("POST", "judgments", json=body) as response:
        if response.is_error:
            await response.aread()
            checked(response)
        async for event, data in events(response.aiter_bytes()):
            if event == "delta":
                on_text(data["text"])
            elif event == "error":
                raise UserError(f"{options.url}: {error_message(data)}")
            elif event == "result":
                return data
    raise UserError(f"{options.url}: the reply broke off; is the server still running?")


class OtherServer:
    """An OpenAI-compatible server without panjue: prompt, schema and decoding happen here."""

    def __init__(self, options: ChatOptions, url: str, model: str, err: Console) -> None:
        """Prepare to ask the model at `url`.

        Raises:
            UserError: There is no --labels, or an option needs a panjue server.
        """
        if options.labels is None:
            raise UserError(
                f"{options.url}: is no panjue server; say --labels RUN/adapter/labels.json "
                "to decode its replies"
            )
        if options.samples:
            raise UserError("--samples: works only with a panjue server")
        self._task, self._labels = load_task(options.task), load_labels(options.labels)
        if self._task.data.by_hand is None:
            raise UserError(f"--task {options.task}: cannot be used in chat")
        self._options, self._err, self._takes_schema = options, err, True
        self.endpoint = Endpoint(f"{url.rstrip('/')}#{model}", keys=KEYS)

    async def ask(self, fact: str, on_text: OnText) -> dict[str, Any]:
        """Return the result in the form of a panjue server, without confidences."""
        names = list(self._options.defendants) or find_defendants(fact)
        if not names:
            raise UserError("the facts name no defendant after 被告人; say --defendant NAME")
        assert self._task.data.by_hand is not None
        example = self._task.data.by_hand(fact, names)
        asker = PlainAsker(self._task, self._labels, 0, constrained=self._takes_schema)
        [request] = requests(example.id, asker.question(example), [{}])
        reply = await self.endpoint.ask(request, on_text)
        if reply.refused and self._takes_schema:
            self._takes_schema = False
            reason = f"refused with a schema ({reply.refused})"
            self._err.print(f"{reason}: asking again without a schema", markup=False)
            return await self.ask(fact, on_text)
        if reply.refused:
            raise UserError(f"{self._options.url}: {reply.refused}")
        if not reply.outputs[0].text:
            raise UserError(f"{self._options.url}: the reply is empty; is it a chat model?")
        decoded = self._task.ask.decode(reply.outputs[0].text, example, self._labels)
        submission = self._task.data.write(example, decoded.answer)
        del submission["id"]
        return {
            "defendants": names,
            **submission,
            "answer": decoded.answer,
            "repairs": list(decoded.repairs),
        }


async def model_name(http: httpx.AsyncClient, options: ChatOptions) -> str:
    """Return the name of the model to ask; by default the first one that the server lists.

    Raises:
        UserError: The server lists no model.
    """
    if options.model:
        return options.model
    try:
        return str(checked(await http.get("models"))["data"][0]["id"])
    except (LookupError, TypeError):
        raise UserError(f"{http.base_url}: lists no model; name one with --model") from None


def checked(response: httpx.Response) -> Any:
    """Return the JSON of a response.

    Raises:
        UserError: It is an error; includes the server's message.
    """
    place = f"{response.request.url}: {response.status_code}"
    body = parsed(response)
    if response.status_code == 401:
        raise UserError(f"{place}: needs a key; set {KEY}")
    if response.status_code >= 400:
        raise UserError(f"{place}: {error_message(body)}")
    if body is None:
        raise UserError(f"{place}: no JSON; is this an OpenAI-compatible server?")
    return body


def parsed(response: httpx.Response) -> Any:
    """Return the JSON of a response; None if it is not JSON."""
    try:
        return response.json()
    except ValueError:
        return None
