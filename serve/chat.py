"""`panjue chat`: a case from a file, a pipe or the keyboard, its judgments in the terminal."""

import json
import os
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from panjue.prompts.decode import load_json
from panjue.prompts.errors import UserError
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.law import read_law
from panjue.prompts.names import find_defendants
from panjue.prompts.openai import BROKEN_OFF, address, key_header
from panjue.prompts.task import Example, load_task
from panjue.serve.settings import KEY

KEYS = (KEY, "OPENAI_API_KEY")
"""Environment variables with the key to show, the first that is set."""

TIMEOUT = httpx.Timeout(600, connect=5)
END = b"\x04"
"""Ctrl-D."""

FIRST_WORDS = 40
BAR = 10

Grow = Callable[[str], None]
"""Is given each piece of the reply as it comes."""


@dataclass
class Asked:
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


def main(asked: Asked, file: Path | None, law: Path | None, *, as_json: bool) -> None:
    """Ask about the case in `file`, or about each that is typed or piped in, and show the answer.

    Raises:
        UserError: Nobody answers, or the answer is an error; names the way out.
    """
    out, err = Console(soft_wrap=as_json), Console(stderr=True, highlight=False)
    with client(asked) as http:
        ask, texts = speaker(http, asked, err)
        texts = {**texts, **(read_law(law) if law else {})}
        quiet = as_json or not err.is_terminal
        grow: Grow = (lambda _: None) if quiet else partial(err.out, end="")
        typed = file is None and sys.stdin.isatty()
        for fact in pastes(err) if typed else [read_fact(file)]:
            try:
                result = ask(fact, grow)
            except UserError as error:
                if not typed:
                    raise
                err.print(f"panjue: {error}")  # the next case may do better
                continue
            if not quiet:
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


def pastes(err: Console) -> Iterator[str]:
    """Yield every case that is pasted at the terminal."""
    while True:
        err.print("粘贴案件事实，然后按 Ctrl-D；没有粘贴就按则结束。")
        err.print("Paste the facts, then press Ctrl-D; with nothing pasted, that ends.")
        text = pasted(sys.stdin.fileno())
        err.print()
        if not text.strip():
            return
        yield text


def pasted(terminal: int) -> str:
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


@contextmanager
def client(asked: Asked) -> Iterator[httpx.Client]:
    """Open a connection; what goes wrong on it ends in one line."""
    headers = key_header(*KEYS)
    base = address(asked.url)
    if base is None:
        raise UserError(f"--url {asked.url}: write it like http://127.0.0.1:8000")
    if base.path in ("", "/"):
        base = base.copy_with(path="/v1")
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT) as http:
            yield http
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise UserError(
            f"{asked.url}: no server answers there; start one with `make serve`, or give --url"
        ) from None
    except httpx.HTTPError as error:
        raise UserError(f"{asked.url}: the connection failed: {error}") from None


def speaker(
    http: httpx.Client, asked: Asked, err: Console
) -> tuple[Callable[[str, Grow], dict[str, Any]], Mapping[str, str]]:
    """Return how to ask this server about a case, and the texts of articles that it has."""
    found = http.get("labels")
    told = checked(found) if found.status_code == 401 else parsed(found)
    if not isinstance(told, dict) or "task" not in told:
        stranger = Stranger(http, asked, err)
        return stranger.ask, {}
    if told["task"] != asked.task:
        raise UserError(f"{asked.url}: answers {told['task']!r}; say --task {told['task']}")
    return (lambda fact, grow: ask_panjue(http, asked, fact, grow)), told["law"]


def ask_panjue(http: httpx.Client, asked: Asked, fact: str, grow: Grow) -> dict[str, Any]:
    """Return the result of a panjue server."""
    body: dict[str, Any] = {"fact": fact, "samples": asked.samples, "stream": True}
    if asked.defendants:
        body["defendants"] = list(asked.defendants)
    with http.stream("POST", "judgments", json=body) as response:
        checked_stream(response)
        for event, data in events(response):
            if event == "delta":
                grow(data["text"])
            elif event == "error":
                raise UserError(f"{asked.url}: {data['error']['message']}")
            elif event == "result":
                return data
    raise UserError(f"{asked.url}: the answer broke off; is the server still running?")


class Stranger:
    """An OpenAI-compatible server that is not ours: prompt, schema and answer are made here."""

    def __init__(self, http: httpx.Client, asked: Asked, err: Console) -> None:
        """Find out what the model is called there.

        Raises:
            UserError: There are no labels to read its answers with, it lists no model, or what is
                asked for needs a server of ours.
        """
        if asked.labels is None:
            raise UserError(
                f"{asked.url}: is no panjue server; say --labels RUN/adapter/labels.json "
                "to read its answers with"
            )
        if asked.samples:
            raise UserError("--samples: only a panjue server decides from samples")
        self._labels: Labels = load_labels(asked.labels)
        self._http, self._asked, self._err = http, asked, err
        self._task = load_task(asked.task)
        if self._task.by_hand is None:
            raise UserError(f"--task {asked.task}: cannot be asked by hand")
        self._model = asked.model or first_model(http)
        self._takes_schema = True

    def ask(self, fact: str, grow: Grow) -> dict[str, Any]:
        """Return the result in the form of a panjue server, without confidence."""
        names = list(self._asked.defendants) or find_defendants(fact)
        if not names:
            raise UserError("no defendant is found behind 被告人; name them with --defendant")
        assert self._task.by_hand is not None
        example = self._task.by_hand(fact, names)
        reply = self._reply(example, grow)
        decoded = self._task.decode(reply, example, self._labels)
        submission = self._task.submission(example, decoded.answer)
        del submission["id"]
        return {
            "defendants": names,
            **submission,
            "answer": decoded.answer,
            "repairs": list(decoded.repairs),
        }

    def _reply(self, example: Example, grow: Grow) -> str:
        body = {
            "model": self._model,
            "messages": self._task.prompt(example),
            "temperature": 0,
            "stream": True,
        }
        if self._takes_schema:
            schema = self._task.schema(example, self._labels)
            wanted = {"name": self._asked.task, "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        text = ""
        with self._http.stream("POST", "chat/completions", json=body) as response:
            if response.status_code in (400, 422, 501) and self._takes_schema:
                response.read()
                why = message(parsed(response))
            else:
                checked_stream(response)
                for _, data in events(response):
                    if "error" in data:
                        raise UserError(f"{self._asked.url}: {message(data)}")
                    for choice in data.get("choices", ()):
                        if choice.get("finish_reason") in BROKEN_OFF:
                            raise UserError(f"{self._asked.url}: broke its reply off; ask again")
                        piece = choice.get("delta", {}).get("content") or ""
                        text += piece
                        grow(piece)
                if not text:
                    raise UserError(
                        f"{self._asked.url}: answered with nothing; is it a chat model?"
                    )
                return text
        self._takes_schema = False
        self._err.print(f"refused with a schema ({why}): asking for a free reply, to be repaired")
        return self._reply(example, grow)


def first_model(http: httpx.Client) -> str:
    """Return the name of the first model that a server lists.

    Raises:
        UserError: It lists none.
    """
    try:
        return str(checked(http.get("models"))["data"][0]["id"])
    except (LookupError, TypeError):
        raise UserError(f"{http.base_url}: lists no model; name one with --model") from None


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the server-sent events of a response; those without a name are called `message`."""
    event, rest = "message", b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")  # not at the other ends of lines in Unicode
        for line in lines:
            name, _, value = line.decode("utf-8").rstrip("\r").partition(":")
            if name == "event":
                event = value.strip()
            elif name == "data" and value.strip() != "[DONE]":
                yield event, json.loads(value)
                event = "message"


def checked_stream(response: httpx.Response) -> None:
    """Raise a UserError with what the server says is wrong."""
    if response.status_code >= 400:
        response.read()
        checked(response)


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
        raise UserError(f"{place}: {message(body)}")
    if body is None:
        raise UserError(f"{place}: no JSON; is this an OpenAI-compatible server?")
    return body


def parsed(response: httpx.Response) -> Any:
    """Return the JSON of a response, None where it has none."""
    try:
        return response.json()
    except ValueError:
        return None


def message(body: Any) -> str:
    """Return what an error says, in whatever form."""
    told = body.get("error", body) if isinstance(body, dict) else body
    return str(told.get("message", told) if isinstance(told, dict) else told)


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
