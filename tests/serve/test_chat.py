"""The terminal against the running server, a stranger's server, and no server."""

import asyncio
import io
import json
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from rich.console import Console

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.openai import events
from panjue.serve.chat import KEYS, ChatOptions, client, connect, read_fact, read_paste
from panjue.serve.endpoint import Endpoint
from panjue.serve.tables import bar, tables

PANJUE = Path(sys.executable).with_name("panjue")
FACT = "经审理查明：被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。"


Chat = Callable[..., CompletedProcess[str]]


@pytest.fixture
def chat(panjue: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Return `panjue chat` with `text` on its standard input."""

    def ask(
        *words: str, text: str | None = None, key: str = "a-key-of-the-tests"
    ) -> CompletedProcess[str]:
        monkeypatch.setenv("PANJUE_API_KEY", key)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((text or "").encode())))
        return panjue("chat", *words)

    return ask


def test_a_case_from_a_pipe_becomes_a_table_per_defendant(server: Any, chat: Chat) -> None:
    done = chat("--url", server.url, text=FACT)
    assert done.returncode == 0, done.stderr
    for word in ("张某甲", "李某乙", "罪名", "法条", "刑罚", "%", "不是判决"):
        assert word in done.stdout
    assert done.stdout.startswith("演示用的小模型在回答"), "what answers comes first"
    assert "A tiny demo model answers." in done.stdout
    assert "Percentages are the model's own estimate, not the probability" in done.stdout
    assert "模型自估" in done.stdout


def test_without_confidences_and_the_demo_nothing_is_said_of_them() -> None:
    judgment = {"name": "甲", "charges": ["盗窃罪"], "articles": ["264"], "penalty": "拘役"}
    result = {"answer": {"judgments": [judgment]}, "repairs": []}
    console = Console(record=True, file=io.StringIO(), width=100)
    console.print(*tables(result, {}, demo=False))
    said = console.export_text()
    assert "第二百六十四条" in said
    for word in ("演示", "demo", "estimate", "confidence"):
        assert word not in said


def test_a_guess_is_never_certain() -> None:
    assert [bar(share)[-4:] for share in (1.0, 0.996, 0.99, 0.5, 0.0)] == [
        ">99%",
        ">99%",
        " 99%",
        " 50%",
        "  0%",
    ]


def test_json_for_pipes(server: Any, chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "case.txt"
    file.write_text(FACT, "utf-8")
    done = chat("--url", server.url, "--file", str(file), "--json", "--defendant", "李某乙")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["defendants"] == ["李某乙"]
    assert "李某乙" in done.stdout, "Chinese is not escaped"


def test_at_a_terminal_the_reply_grows(server: Any) -> None:
    parent, child = pty.openpty()
    with subprocess.Popen(
        [PANJUE, "chat", "--url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=child,
        env={**os.environ, "PANJUE_API_KEY": server.key},
    ) as running:
        assert running.stdin is not None
        running.stdin.write(FACT.encode())
        running.stdin.close()
        running.wait(120)
        os.close(child)
        seen = b""
        while piece := _read(parent):
            seen += piece
    assert '{"judgments":[{"name":"张某甲"' in seen.decode()


def test_a_long_paste_arrives_whole() -> None:
    parent, child = pty.openpty()
    long = "被告人张某甲盗窃。" * 1000  # one line of 27,000 bytes; a terminal's line keeps 4,095
    typed = long.encode() + "错".encode() + b"\x7f" + b"\x04"
    writer = threading.Thread(target=lambda: _write(parent, child, typed), daemon=True)
    reader = threading.Thread(target=lambda: _drain(parent), daemon=True)
    reader.start()
    writer.start()
    assert read_paste(child) == long
    writer.join()
    os.close(child)
    reader.join()
    os.close(parent)


def _write(descriptor: int, terminal: int, data: bytes) -> None:
    while termios.tcgetattr(terminal)[3] & termios.ICANON:  # it must leave its line mode first
        time.sleep(0.01)
    while data:
        data = data[os.write(descriptor, data[:1000]) :]


def _drain(descriptor: int) -> None:
    while _read(descriptor):
        pass


def test_events_in_whatever_pieces_they_come() -> None:
    raw = 'event: delta\ndata: {"text":"甲\u2028"}\n\ndata:{"x":1}\r\n\ndata: [DONE]\n\n'.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for byte in raw:
            yield bytes([byte])

    async def found() -> list[Any]:
        return [event async for event in events(pieces())]

    assert asyncio.run(found()) == [("delta", {"text": "甲\u2028"}), ("message", {"x": 1})]


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed
        return b""


@pytest.fixture
def stranger(server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a server that takes a schema and has no labels: vLLM alone."""
    router = server.guard.app.router
    kept = [route for route in router.routes if getattr(route, "path", "") != "/v1/labels"]
    monkeypatch.setattr(router, "routes", kept)
    monkeypatch.delenv("PANJUE_API_KEY", raising=False)
    return str(server.plain)


def asked_once(
    asked: ChatOptions, console: Console | None = None, grow: Callable[[str], None] = print
) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with connect(asked, console or Console()) as (ask, law):
            assert law == {}
            return await ask(FACT, grow)

    return asyncio.run(ask())


def test_an_openai_compatible_server_that_is_not_ours(stranger: str, trained: Path) -> None:
    with pytest.raises(UserError, match="say --labels"):
        asked_once(ChatOptions(stranger))
    asked = ChatOptions(stranger, labels=trained / "adapter/labels.json")
    grown: list[str] = []
    told = asked_once(asked, grow=grown.append)
    assert json.loads("".join(grown))
    assert [judgment["name"] for judgment in told["judgments"]] == ["张某甲", "李某乙"]
    assert told["repairs"] == [], "it kept to the schema"
    with pytest.raises(UserError, match="--samples"):
        asked_once(replace(asked, samples=4))
    with pytest.raises(UserError, match=r"404 Not Found .*does not exist"):
        asked_once(replace(asked, model="another"))


def test_a_server_that_refuses_the_schema(
    stranger: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "none"}}}
    whole = Endpoint._body
    seen: list[bool] = []

    def body(self: Endpoint, request: Any) -> dict[str, Any]:
        made = whole(self, request)
        seen.append("response_format" in made)
        return {**made, "response_format": refusing} if seen[-1] else {**made, "max_tokens": 64}

    monkeypatch.setattr(Endpoint, "_body", body)
    said = Console(record=True, file=io.StringIO(), width=1000)
    told = asked_once(ChatOptions(stranger, labels=trained / "adapter/labels.json"), said)
    assert [judgment["name"] for judgment in told["judgments"]] == ["张某甲", "李某乙"]
    assert seen == [True, False]
    assert "refused with a schema (400: " in said.export_text()


@pytest.mark.parametrize(
    ("words", "text", "key", "message"),
    [
        (("--url", "http://127.0.0.1:9"), FACT, "", "start one with `make serve`"),
        (("--url", "nowhere"), FACT, "", "write it like http://127.0.0.1:8000"),
        (("--url", "{url}"), FACT, "another", "set PANJUE_API_KEY"),
        (("--url", "{url}"), " ", None, "give the facts of a case"),
        (("--url", "{url}"), "某日天气晴朗。", None, "list them in 'defendants'"),
        (("--url", "{url}", "--task", "reading"), FACT, None, "say --task judgment"),
        (("--url", "{url}", "--file", "nowhere.txt"), None, None, "nowhere.txt: No such file"),
        (("--url", "{url}", "--law", "nowhere.json"), FACT, None, "nowhere.json"),
    ],
)
def test_what_goes_wrong_ends_in_one_line(
    server: Any,
    chat: Chat,
    words: tuple[str, ...],
    text: str | None,
    key: str | None,
    message: str,
) -> None:
    given = [word.format(url=server.url) for word in words]
    done = chat(*given, text=text, key=server.key if key is None else key)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("panjue: ")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:port", "nowhere", "http://xn--a", f"http://{'a' * 70}.b", "http://"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"^--url \S*: write it like \S+$"):
        asyncio.run(shown_by(ChatOptions(url)))


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (("--url", "http://127.0.0.1:port"), "", "--url http://127.0.0.1:port: write it like "),
        ((), "密钥", "PANJUE_API_KEY: must be of printable ASCII characters"),
    ],
)
def test_what_goes_wrong_without_a_server_ends_in_one_line(
    words: tuple[str, ...], key: str, message: str, chat: Chat
) -> None:
    done = chat(*words, text=FACT, key=key)
    assert done.returncode == 2
    assert done.stderr.startswith(f"panjue: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("before", ["", "\ufeff"])
def test_a_byte_order_mark_is_no_part_of_the_facts(before: str, tmp_path: Path) -> None:
    file = tmp_path / "case.txt"
    file.write_text(before + FACT, "utf-8")
    assert read_fact(file) == FACT
    file.write_bytes(before.encode() + b"a\xff")
    with pytest.raises(UserError, match=f"not UTF-8 at byte {len(before.encode()) + 1}"):
        read_fact(file)


@pytest.mark.parametrize(
    "row",
    ['{"id": 1, "fact": "某日。"}\n', '{"id": 1}\n{"id": 2}\n', '\ufeff {\r\n"fact": ""}', "{}"],
)
def test_a_row_of_a_file_of_cases_is_no_text_of_facts(row: str, tmp_path: Path) -> None:
    file = tmp_path / "case.jsonl"
    file.write_text(row, "utf-8")
    with pytest.raises(UserError, match=rf"^{file}: is JSON; give the plain text of the"):
        read_fact(file)


@pytest.mark.parametrize(
    "fact",
    ["{", '"被告人甲盗窃。"', '{"a": 1} 被告人甲盗窃。', "264", '{"a":' * 100_000],
    ids=["a brace", "a string", "an object before", "a number", "too deep"],
)
def test_facts_may_have_anything_of_json_in_them(fact: str, tmp_path: Path) -> None:
    file = tmp_path / "case.txt"
    file.write_text(fact, "utf-8")
    assert read_fact(file) == fact


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ((" ours\n", "another"), "Bearer ours"),  # a file's end of line is in many a variable
        (("ours", "密钥"), "Bearer ours"),  # which nobody needs then
        ((" ", "another"), "Bearer another"),
        (("", ""), None),
    ],
)
def test_the_first_key_that_is_set_is_shown(
    keys: tuple[str, str], shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, key in zip(KEYS, keys, strict=True):
        monkeypatch.setenv(name, key)
    assert asyncio.run(shown_by(ChatOptions("http://127.0.0.1:9"))) == shown


async def shown_by(asked: ChatOptions) -> str | None:
    async with client(asked) as http:
        return str(http.headers["Authorization"]) if "Authorization" in http.headers else None
