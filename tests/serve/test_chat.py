"""The terminal against the running server, a stranger's server, and no server."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PANJUE = Path(sys.executable).with_name("panjue")
FACT = "经审理查明：被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。"


def chat(
    *words: str, text: str | None = None, key: str = "a key of the tests"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PANJUE, "chat", *words],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PANJUE_API_KEY": key, "COLUMNS": "100"},
    )


def test_a_case_from_a_pipe_becomes_a_table_per_defendant(server: Any) -> None:
    done = chat("--url", server.url, text=FACT)
    assert done.returncode == 0, done.stderr
    for word in ("张某甲", "李某乙", "罪名", "法条", "刑罚", "%", "不是判决"):
        assert word in done.stdout


def test_json_for_pipes(server: Any, tmp_path: Path) -> None:
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


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed
        return b""


def test_an_openai_compatible_server_that_is_not_ours(server: Any, trained: Path) -> None:
    # vLLM itself, behind our gateway's back: it takes a schema.
    engine = server.service.engine.backend
    key = engine._headers["Authorization"].split()[1]
    refused = chat("--url", engine.url, text=FACT, key=key)
    assert refused.returncode == 2
    assert "--labels" in refused.stderr
    labels = ("--labels", str(trained / "adapter/labels.json"))
    done = chat("--url", f"{engine.url}/v1", *labels, "--json", text=FACT, key=key)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [judgment["name"] for judgment in told["judgments"]] == ["张某甲", "李某乙"]
    assert told["repairs"] == [], "it kept to the schema"
    assert "schema" not in done.stderr


def test_a_server_that_refuses_the_schema(server: Any, trained: Path) -> None:
    # Our own gateway takes no schema of a client's; without /v1/labels it is any such server.
    import httpx
    from rich.console import Console

    from panjue.serve.chat import Asked, Stranger

    said = Console(record=True, file=io.StringIO())
    with server.client() as http:
        assert isinstance(http, httpx.Client)
        asked = Asked(server.url, labels=trained / "adapter/labels.json")
        told = Stranger(http, asked, said).ask(FACT, lambda _: None)
    assert [judgment["name"] for judgment in told["judgments"]] == ["张某甲", "李某乙"]
    assert "refuses the schema" in said.export_text()


@pytest.mark.parametrize(
    ("words", "text", "key", "message"),
    [
        (("--url", "http://127.0.0.1:9"), FACT, "", "start one with `make serve`"),
        (("--url", "nowhere"), FACT, "", "write it like http://127.0.0.1:8000"),
        (("--url", "{url}"), FACT, "another", "set PANJUE_API_KEY"),
        (("--url", "{url}"), " ", None, "give the facts of a case"),
        (("--url", "{url}"), "某日天气晴朗。", None, "list them in 'defendants'"),
        (("--url", "{url}", "--task", "cloze"), FACT, None, "say --task judgment"),
        (("--url", "{url}", "--file", "nowhere.txt"), None, None, "nowhere.txt: No such file"),
        (("--url", "{url}", "--law", "nowhere.json"), FACT, None, "nowhere.json"),
    ],
)
def test_what_goes_wrong_ends_in_one_line(
    server: Any, words: tuple[str, ...], text: str | None, key: str | None, message: str
) -> None:
    given = [word.format(url=server.url) for word in words]
    done = chat(*given, text=text, key=server.key if key is None else key)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("panjue: ")
