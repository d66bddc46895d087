"""`panjue chat`: a case from a file, a pipe or the keyboard, its judgments in the terminal."""

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
from rich.table import Table
from rich.text import Text

from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.decode import load_json
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.openai import address, complaint, events, key_header
from panjue.prompts.task import load_task
from panjue.serve.endpoint import Endpoint, PlainAsker
from panjue.serve.law import read_law
from panjue.serve.names import find_defendants
from panjue.serve.settings import KEY
from panjue.serve.source import OnText, ignore_text, requests

KEYS = (KEY, "OPENAI_API_KEY")
"""Environment variables with the key to show, the first that is set."""

TIMEOUT = httpx.Timeout(600, connect=5)
END = b"\x04"
"""Ctrl-D."""

FIRST_WORDS = 40
BAR = 10

Ask = Callable[[str, OnText], Awaitable[dict[str, Any]]]
"""Facts, and what is given each piece of the reply -> the result, as a panjue server tells it."""


@dataclass
class ChatOptions:
    """What the command line says.

    Attributes:
        url: Of a panjue server, or of any OpenAI-compatible one.
        defendants: Their names; found in the facts where there are none.
        samples: Replies drawn beside the greedy one (a panjue server only).
        labels: labels.json to read the answers of a server with that is not panjue's.
        model: Name of the model there; the first that it lists by default.
    """

    url: str
    task: str = "judgment"
    defendants: Sequence[str] = ()
    samples: int = 0
    labels: Path | None = None
    model: str | None = None


def main(asked: ChatOptions, file: Path | None, law: Path | None, *, as_json: bool) -> None:
    """Ask about the case in `file`, or about each that is typed or piped in, and show the answer.

    Raises:
        UserError: Nobody answers, or the answer is an error; names the way out.
    """
    asyncio.run(_main(asked, file, law, as_json))


async def _main(asked: ChatOptions, file: Path | None, law: Path | None, as_json: bool) -> None:
    out, err = Console(soft_wrap=as_json), Console(stderr=True, highlight=False)
    async with connect(asked, err) as (ask, theirs):
        texts = {**theirs, **(read_law(law) if law else {})}
        is_quiet = as_json or not err.is_terminal
        on_text = ignore_text if is_quiet else partial(err.out, end="")
        typed = file is None and sys.stdin.isatty()
        for fact in pasted_cases(err) if typed else [read_fact(file)]:
            try:
                result = await ask(fact, on_text)
            except UserError as error:
                if not typed:
                    raise
                err.print(f"panjue: {error}")  # the next case may do better
                continue
            if not is_quiet:
                err.print()
            if as_json:
                print(json.dumps(result, ensure_ascii=False))
            else:
                out.print(*tables(result, texts))


def read_fact(file: Path | None) -> str:
    """Return the case of a file, or of a pipe, without a byte order mark.

    Raises:
        UserError: It cannot be read, is empty, or is a row of a file of cases.
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
    if isinstance(load_json(text), dict):
        raise UserError(f"{file or 'stdin'}: is a JSON object; give the plain text of the facts")
    return text


def pasted_cases(err: Console) -> Iterator[str]:
    """Yield every case that is pasted at the terminal."""
    while True:
        err.print("粘贴案件事实，然后按 Ctrl-D；没有粘贴就按则结束。")
        err.print("Paste the facts, then press Ctrl-D; with nothing pasted, that ends.")
        text = read_paste(sys.stdin.fileno())
        err.print()
        if not text.strip():
            return
        yield text


def read_paste(terminal: int) -> str:
    """Return what is typed or pasted up to Ctrl-D.

    Not line by line: of a longer line than 4,095 bytes, which most cases are, a terminal keeps no
    more.
    """
    before = termios.tcgetattr(terminal)
    ours = [*before]
    ours[3] &= ~termios.ICANON
    typed = bytearray()
    try:
        termios.tcsetattr(terminal, termios.TCSADRAIN, ours)
        while (piece := os.read(terminal, 2**16)) and END not in piece:
            typed += piece
        typed += piece.partition(END)[0]
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
    text: list[str] = []
    for character in typed.decode("utf-8", errors="replace"):
        if character != "\x7f":
            text.append(character)
        elif text:  # a backspace, which is ours to heed now
            text.pop()
    return "".join(text)


@asynccontextmanager
async def connect(asked: ChatOptions, err: Console) -> AsyncIterator[tuple[Ask, Mapping[str, str]]]:
    """Connect to a server, and yield how to ask it and the texts of articles that it has.

    Raises:
        UserError: There is none, or it is not ours and something is missing to read its answers.
    """
    async with client(asked) as http:
        found = await http.get("labels")
        told = checked(found) if found.status_code in (401, 503) else parsed(found)
        if isinstance(told, dict) and "task" in told:
            if told["task"] != asked.task:
                raise UserError(f"{asked.url}: answers {told['task']!r}; say --task {told['task']}")
            yield partial(ask_panjue, http, asked), told["law"]
        else:
            stranger = OtherServer(asked, str(http.base_url), await model_name(http, asked), err)
            async with aclosing(stranger.endpoint):
                yield stranger.ask, {}


@asynccontextmanager
async def client(asked: ChatOptions) -> AsyncIterator[httpx.AsyncClient]:
    """Open a connection; what goes wrong on it ends in one line."""
    headers = key_header(*KEYS)
    base = address(asked.url)
    if base is None:
        raise UserError(f"--url {asked.url}: write it like http://127.0.0.1:8000")
    if base.path in ("", "/"):
        base = base.copy_with(path="/v1")
    try:
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT) as http:
            yield http
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise UserError(
            f"{asked.url}: no server answers there; start one with `make serve`, or give --url"
        ) from None
    except httpx.HTTPError as error:
        raise UserError(f"{asked.url}: the connection failed: {error}") from None


async def ask_panjue(
    http: httpx.AsyncClient, asked: ChatOptions, fact: str, on_text: OnText
) -> Any:
    """Return the result of a panjue server."""
    body: dict[str, Any] = {"fact": fact, "samples": asked.samples, "stream": True}
    if asked.defendants:
        body["defendants"] = list(asked.defendants)
    async with http.stream("POST", "judgments", json=body) as response:
        if response.is_error:
            await response.aread()
            checked(response)
        async for event, data in events(response.aiter_bytes()):
            if event == "delta":
                on_text(data["text"])
            elif event == "error":
                raise UserError(f"{asked.url}: {complaint(data)}")
            elif event == "result":
                return data
    raise UserError(f"{asked.url}: the answer broke off; is the server still running?")


class OtherServer:
    """An OpenAI-compatible server that is not ours: prompt, schema and answer are made here."""

    def __init__(self, asked: ChatOptions, url: str, model: str, err: Console) -> None:
        """Prepare to ask the model at `url`.

        Raises:
            UserError: There are no labels to read its answers with, or what is asked for needs a
                server of ours.
        """
        if asked.labels is None:
            raise UserError(
                f"{asked.url}: is no panjue server; say --labels RUN/adapter/labels.json "
                "to read its answers with"
            )
        if asked.samples:
            raise UserError("--samples: only a panjue server decides from samples")
        self._task, self._labels = load_task(asked.task), load_labels(asked.labels)
        if self._task.data.by_hand is None:
            raise UserError(f"--task {asked.task}: cannot be asked by hand")
        self._asked, self._err, self._takes_schema = asked, err, True
        self.endpoint = Endpoint(f"{url.rstrip('/')}#{model}", keys=KEYS)

    async def ask(self, fact: str, on_text: OnText) -> dict[str, Any]:
        """Return the result in the form of a panjue server, without confidence."""
        names = list(self._asked.defendants) or find_defendants(fact)
        if not names:
            raise UserError("no defendant is found behind 被告人; name them with --defendant")
        assert self._task.data.by_hand is not None
        example = self._task.data.by_hand(fact, names)
        asker = PlainAsker(self._task, self._labels, 0, constrained=self._takes_schema)
        [request] = requests(example.id, asker.question(example), [{}])
        told = await self.endpoint.ask(request, on_text)
        if told.refused and self._takes_schema:
            self._takes_schema = False
            why = f"refused with a schema ({told.refused})"
            self._err.print(f"{why}: asking for a free reply, to be repaired", markup=False)
            return await self.ask(fact, on_text)
        if told.refused:
            raise UserError(f"{self._asked.url}: {told.refused}")
        if not told.outputs[0].text:
            raise UserError(f"{self._asked.url}: answered with nothing; is it a chat model?")
        decoded = self._task.ask.decode(told.outputs[0].text, example, self._labels)
        submission = self._task.data.write(example, decoded.answer)
        del submission["id"]
        return {
            "defendants": names,
            **submission,
            "answer": decoded.answer,
            "repairs": list(decoded.repairs),
        }


async def model_name(http: httpx.AsyncClient, asked: ChatOptions) -> str:
    """Return what the model is called that is asked: by default the first that a server lists.

    Raises:
        UserError: It lists none.
    """
    if asked.model:
        return asked.model
    try:
        return str(checked(await http.get("models"))["data"][0]["id"])
    except (LookupError, TypeError):
        raise UserError(f"{http.base_url}: lists no model; name one with --model") from None


def checked(response: httpx.Response) -> Any:
    """Return the JSON of a response.

    Raises:
        UserError: It is an error, with what the server says.
    """
    place = f"{response.request.url}: {response.status_code}"
    body = parsed(response)
    if response.status_code == 401:
        raise UserError(f"{place}: wants a key; set {KEY}")
    if response.status_code >= 400:
        raise UserError(f"{place}: {complaint(body)}")
    if body is None:
        raise UserError(f"{place}: no JSON; is this an OpenAI-compatible server?")
    return body


def parsed(response: httpx.Response) -> Any:
    """Return the JSON of a response, None where it has none."""
    try:
        return response.json()
    except ValueError:
        return None


def tables(result: Mapping[str, Any], law: Mapping[str, str]) -> Iterator[Any]:
    """Yield one table per defendant, then what was mended and the reminder of what this is."""
    sure = result.get("confidence") or [{}] * len(result["answer"]["judgments"])
    for judgment, confidence in zip(result["answer"]["judgments"], sure, strict=True):
        table = Table(title=Text(judgment["name"], style="bold"), title_justify="left")
        for column in ("", "", "confidence") if confidence else ("", ""):
            table.add_column(column, overflow="fold")
        rows = {
            "罪名 charges": "、".join(judgment["charges"]),
            "法条 articles": "\n".join(article(number, law) for number in judgment["articles"]),
            "刑罚 penalty": judgment["penalty"],
        }
        for (title, value), name in zip(
            rows.items(), ("charges", "articles", "penalty"), strict=True
        ):
            bars = [Text(bar(confidence[name]))] if confidence else []
            table.add_row(title, Text(value), *bars)
        yield table
    if result["repairs"]:
        yield Text("repaired: " + "; ".join(result["repairs"]), style="dim")
    yield Text("这是统计推测，不是判决。/ A statistical guess, not a judgment.", style="dim")


def article(number: str, law: Mapping[str, str]) -> str:
    """Return an article with the first words of its text."""
    text = law.get(number, "")
    return f"第{number}条 {text[:FIRST_WORDS]}{'……' if len(text) > FIRST_WORDS else ''}".strip()


def bar(share: float) -> str:
    """Return a share of 1 as ten blocks and a percentage."""
    full = round(share * BAR)
    return f"{'█' * full}{'░' * (BAR - full)} {share:4.0%}"
