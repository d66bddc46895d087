"""`panjue chat`: a case from a file, a pipe or the keyboard, its judgments in the terminal."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from panjue.prompts.errors import UserError
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.law import read_law
from panjue.prompts.names import find_defendants
from panjue.prompts.task import Example, load_task

KEYS = ("PANJUE_API_KEY", "OPENAI_API_KEY")
"""Environment variables with the key to show, the first that is set."""

TIMEOUT = httpx.Timeout(600, connect=5)
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
        law: Article -> text.
    """

    url: str
    task: str = "judgment"
    defendants: Sequence[str] = ()
    samples: int = 0
    labels: Path | None = None
    model: str | None = None
    law: Mapping[str, str] = field(default_factory=dict)


def main(asked: Asked, file: Path | None, law: Path | None, *, as_json: bool) -> None:
    """Ask about the case in `file`, or about each that is typed or piped in, and show the answer.

    Raises:
        UserError: Nobody answers, or the answer is an error; names the way out.
    """
    out, err = Console(soft_wrap=as_json), Console(stderr=True, highlight=False)
    with client(asked) as http:
        ask, texts = speaker(http, asked, err)
        asked.law = {**texts, **(read_law(law) if law else {})}
        for fact in facts(file, err):
            quiet = as_json or not err.is_terminal
            result = ask(fact, (lambda _: None) if quiet else lambda piece: err.out(piece, end=""))
            if not quiet:
                err.print()
            if as_json:
                print(json.dumps(result, ensure_ascii=False))
            else:
                out.print(*tables(result, asked.law))


def facts(file: Path | None, err: Console) -> Iterator[str]:
    """Yield the case of a file or a pipe; at a terminal, every one that is pasted."""
    if file is not None or not sys.stdin.isatty():
        try:
            raw = file.read_bytes() if file else sys.stdin.buffer.read()
            text = raw.decode("utf-8")
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file or 'stdin'}: not UTF-8 at byte {error.start}") from None
        if not text.strip():
            raise UserError(f"{file or 'stdin'}: is empty; give the facts of a case")
        yield text
        return
    while True:
        err.print(
            "粘贴案件事实，换行后按 Ctrl-D / paste the facts, then Enter and Ctrl-D (twice ends)"
        )
        text = sys.stdin.read()
        if not text.strip():
            return
        yield text


@contextmanager
def client(asked: Asked) -> Iterator[httpx.Client]:
    """Open a connection; what goes wrong on it ends in one line."""
    key = next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base = asked.url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT) as http:
            yield http
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise UserError(
            f"{base}: no server answers there; start one with `make serve`, or give --url"
        ) from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise UserError(f"--url {asked.url}: write it like http://127.0.0.1:8000") from None
    except httpx.HTTPError as error:
        raise UserError(f"{base}: the connection failed: {error}") from None


def speaker(
    http: httpx.Client, asked: Asked, err: Console
) -> tuple[Callable[[str, Grow], dict[str, Any]], Mapping[str, str]]:
    """Return how to ask this server about a case, and the texts of articles that it has."""
    found = http.get("/v1/labels")
    if found.status_code == 404:
        stranger = Stranger(http, asked, err)
        return stranger.ask, {}
    told = checked(found)
    if told["task"] != asked.task:
        raise UserError(f"{asked.url}: answers {told['task']!r}; say --task {told['task']}")
    return (lambda fact, grow: ask_panjue(http, asked, fact, grow)), told["law"]


def ask_panjue(http: httpx.Client, asked: Asked, fact: str, grow: Grow) -> dict[str, Any]:
    """Return the result of a panjue server."""
    body: dict[str, Any] = {"fact": fact, "samples": asked.samples, "stream": True}
    if asked.defendants:
        body["defendants"] = list(asked.defendants)
    with http.stream("POST", "/v1/judgments", json=body) as response:
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
            UserError: There are no labels to read its answers with, or it lists no model.
        """
        if asked.labels is None:
            raise UserError(
                f"{asked.url}: is no panjue server; say --labels RUN/adapter/labels.json "
                "to read its answers with"
            )
        self._labels: Labels = load_labels(asked.labels)
        self._http, self._asked, self._err = http, asked, err
        self._task = load_task(asked.task)
        self._model = asked.model or checked(http.get("/v1/models"))["data"][0]["id"]
        self._takes_schema = True

    def ask(self, fact: str, grow: Grow) -> dict[str, Any]:
        """Return the result in the form of a panjue server, without confidence."""
        names = list(self._asked.defendants) or find_defendants(fact)
        if not names:
            raise UserError("no defendant is found behind 被告人; name them with --defendant")
        assert self._task.from_row is not None
        example = self._task.from_row({"id": 0, "fact": fact, "defendants": names})
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
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code in (400, 404, 422, 501) and self._takes_schema:
                self._takes_schema = False
            else:
                checked_stream(response)
                for _, data in events(response):
                    for choice in data.get("choices", ()):
                        piece = choice["delta"].get("content") or ""
                        text += piece
                        grow(piece)
                return text
        self._err.print(
            "this server refuses the schema: the reply is free, and repaired if need be"
        )
        return self._reply(example, grow)


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the server-sent events of a response; those without a name are called `message`."""
    event = "message"
    for line in response.iter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield event, json.loads(line.removeprefix("data: "))
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
    try:
        body = response.json()
    except ValueError:
        raise UserError(f"{place}: no JSON; is this an OpenAI-compatible server?") from None
    if response.status_code == 401:
        raise UserError(f"{place}: wants a key; set {KEYS[0]}")
    if response.status_code >= 400:
        told = body.get("error", body) if isinstance(body, dict) else body
        raise UserError(f"{place}: {told.get('message', told) if isinstance(told, dict) else told}")
    return body


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
