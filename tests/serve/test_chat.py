"""The terminal against the running server, another server, and no server."""

import io
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import httpx
import pytest
from rich.console import Console

from panjue.prompts.plumbing.errors import UserError
from panjue.serve.chat import bar, checked, connected, read_fact, tables
from tests.serve.conftest import KEY

PANJUE = Path(sys.executable).with_name("panjue")
FACT = "经审理查明：被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。"


Chat = Callable[..., CompletedProcess[str]]


@pytest.fixture
def chat(panjue: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Return `panjue chat` with `text` on its standard input."""

    def ask(*words: str, text: str = "", key: str = KEY) -> CompletedProcess[str]:
        monkeypatch.setenv("PANJUE_API_KEY", key)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return panjue("chat", *words)

    return ask


def test_a_case_from_a_pipe_becomes_a_table_per_defendant(server: Any, chat: Chat) -> None:
    one = chat("--url", server.url, "--defendant", "李某乙", text=FACT).stdout
    assert "李某乙" in one
    assert "张某甲" not in one
    done = chat("--url", server.url, text=FACT)
    assert done.returncode == 0, done.stderr
    for word in ("张某甲", "李某乙", "罪名", "法条", "刑罚", "%", "不是判决", "模型自估"):
        assert word in done.stdout
    assert done.stdout.startswith("演示用的小模型在回答"), "what answers comes first"
    assert "Percentages are the model's own estimate, not the probability" in done.stdout


def test_without_confidences_and_the_demo_nothing_is_said_of_them() -> None:
    judgment = {"name": "甲", "charges": ["盗窃罪"], "articles": ["264"], "penalty": "拘役"}
    console = Console(record=True, file=io.StringIO(), width=100)
    console.print(*tables({"answer": {"judgments": [judgment]}, "repairs": []}, demo=False))
    said = console.export_text()
    assert "第二百六十四条" in said
    assert not any(word in said for word in ("演示", "demo", "estimate", "confidence"))


def test_no_confidence_is_shown_as_certain() -> None:
    shares = (1.0, 0.996, 0.99, 0.5, 0.0)
    assert [bar(share)[-4:] for share in shares] == [">99%", ">99%", " 99%", " 50%", "  0%"]


@pytest.fixture
def terminal() -> Iterator[tuple[int, int, list[bytes]]]:
    """Return both ends of a terminal, and what is printed there."""
    parent, child = pty.openpty()
    seen: list[bytes] = []

    def collect() -> None:
        try:
            while piece := os.read(parent, 65536):
                seen.append(piece)
        except OSError:  # the other side is closed
            return

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    yield parent, child, seen
    os.close(child)
    thread.join(10)
    os.close(parent)


def test_a_long_paste_arrives_whole(terminal: tuple[int, int, list[bytes]]) -> None:
    parent, child, _ = terminal
    script = """if True:
        import sys
        from panjue.serve.chat import read_fact
        fact = read_fact(None)
        sys.stderr.write("|" + fact)"""
    fact = "被告人张某甲盗窃。" * 1000  # one line of 27,000 bytes; a terminal's line keeps 4,095
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=child, stdout=child, stderr=subprocess.PIPE
    ) as reading:
        assert reading.stderr
        while termios.tcgetattr(child)[3] & termios.ICANON:  # it must leave its line mode first
            time.sleep(0.01)
        typed = f"{fact}错".encode() + b"\x7f\n\x04"
        while typed:
            typed = typed[os.write(parent, typed[:1000]) :]
        assert reading.stderr.read().decode().endswith(f"|{fact}")


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        (FACT, "another", "set PANJUE_API_KEY"),
        (" ", KEY, "stdin: give the facts of one case, as plain text"),
        ("某日天气晴朗。", KEY, "list them in 'defendants'"),
    ],
)
def test_an_error_is_one_line(server: Any, chat: Chat, text: str, key: str, message: str) -> None:
    done = chat("--url", server.url, text=text, key=key)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("panjue: ")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("http://127.0.0.1:9", "", r"http://127.0.0.1:9: no server answers there .* `make serve`"),
        ("nowhere", "", "--url nowhere: write it like http://127.0.0.1:8000"),
        ("http://127.0.0.1:port", "", "--url http://127.0.0.1:port: write it like "),
        ("http://xn--a", "", "write it like "),
        ("http://127.0.0.1:9", "密钥", "PANJUE_API_KEY: must be of printable ASCII characters"),
    ],
)
def test_an_error_without_a_server_is_a_user_error(
    url: str, key: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANJUE_API_KEY", key)
    with pytest.raises(UserError, match=message), connected(url) as http:
        http.get("labels")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, '{"detail": "Not Found"}', "is no panjue server"),
        (200, "<html>", "is no panjue server"),
        (503, '{"error": {"message": "the engine starts"}}', "503: the engine starts"),
    ],
)
def test_a_response_that_is_no_answer_is_named(status: int, body: str, message: str) -> None:
    request = httpx.Request("GET", "http://x/v1/labels")
    with pytest.raises(UserError, match=f"^http://x/v1/labels: {message}"):
        checked(httpx.Response(status, text=body, request=request))


@pytest.mark.parametrize("before", ["", "\ufeff"])
def test_a_byte_order_mark_is_no_part_of_the_facts(before: str, tmp_path: Path) -> None:
    file = tmp_path / "case.txt"
    file.write_text(before + FACT, "utf-8")
    assert read_fact(file) == FACT
    file.write_bytes(before.encode() + b"a\xff")
    with pytest.raises(UserError, match=f"not UTF-8 at byte {len(before.encode()) + 1}"):
        read_fact(file)


@pytest.mark.parametrize("text", ['{"id": 1}\n{"id": 2}\n', '\ufeff {"fact": ""}'])
def test_json_rows_are_refused_as_facts(text: str, tmp_path: Path) -> None:
    (tmp_path / "case").write_text(text, "utf-8")
    with pytest.raises(UserError, match=r"case: give the facts of one case, as plain text"):
        read_fact(tmp_path / "case")


@pytest.mark.parametrize("text", ["{", "264", '{"a": 1} 被告人甲盗窃。', '{"a":' * 100_000])
def test_facts_may_contain_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "case").write_text(text, "utf-8")
    assert read_fact(tmp_path / "case") == text
