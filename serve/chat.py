"""`panjue chat`: send a case to a running server and print its judgments as tables."""

import readline  # noqa: F401  # with it `input` takes lines of more than 4,095 bytes
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from panjue.prompts.plumbing.decode import load_json
from panjue.prompts.plumbing.endpoint import key_of, parse_address
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.tasks.judgment.articles import article_name
from panjue.serve.settings import KEY

TIMEOUT = httpx.Timeout(600, connect=5)
PROMPT = """\
粘贴案件事实，然后按回车和 Ctrl-D。
Paste the facts, then press Enter and Ctrl-D."""
BAR_WIDTH = 10
DEMO = (
    "演示用的小模型在回答：它只用虚构案件从零训练，回答没有法律意义。\n"
    "A tiny demo model answers. It was trained from scratch on invented cases: its answers have no "
    "legal meaning."
)
CONFIDENCE = (
    "百分比是模型对自己回答的估计，不是答对的概率。\n"
    "Percentages are the model's own estimate, not the probability that it is right."
)
NOTICE = "这是统计推测，不是判决。/ A statistical guess, not a judgment."


def main(url: str, file: Path | None, defendants: Sequence[str], samples: int) -> None:
    """Send the case in `file`, or from a pipe or the keyboard, and print the answer."""
    with connected(url) as http:
        served = checked(http.get("labels"))
        body = {"fact": read_fact(file), "samples": samples, "defendants": defendants or None}
        result = checked(http.post("judgments", json=body))
    Console().print(*tables(result, demo=served["demo"]))


def read_fact(file: Path | None) -> str:
    """Return the text of a file, or of what is typed or piped, without a byte order mark."""
    if file is None and sys.stdin.isatty() and sys.stdout.isatty():
        return read_typed()
    try:
        text = (file.read_bytes() if file else sys.stdin.buffer.read()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file or 'stdin'}: not UTF-8 at byte {error.start}") from None
    text = text.removeprefix("\ufeff")
    if not text.strip() or isinstance(load_json(text.strip().splitlines()[0]), dict):
        raise UserError(f"{file or 'stdin'}: give the facts of one case, as plain text")
    return text


def read_typed() -> str:
    """Return the lines that are typed or pasted before Ctrl-D."""
    print(PROMPT, file=sys.stderr)
    lines: list[str] = []
    with suppress(EOFError):
        while True:
            lines.append(input())
    return "\n".join(lines)


@contextmanager
def connected(url: str) -> Iterator[httpx.Client]:
    """Open a client of the server at `url`; its connection errors become a UserError."""
    if parse_address(url) is None:
        raise UserError(f"--url {url}: write it like http://127.0.0.1:8000")
    headers = {"Authorization": f"Bearer {key}"} if (key := key_of(KEY)) else {}
    base = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT) as http:
            yield http
    except httpx.HTTPError as error:
        hint = "start one with `make serve`, or give --url"
        raise UserError(f"{url}: no server answers there ({error}); {hint}") from None


def checked(response: httpx.Response) -> Any:
    """Return the JSON of a panjue server's response; raise UserError for any other."""
    if response.status_code == 401:
        raise UserError(f"{response.url}: needs a key; set {KEY}")
    try:
        body = response.json()
        message = body["error"]["message"] if response.is_error else ""
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{response.url}: is no panjue server; start one by `make serve`") from None
    if message:
        raise UserError(f"{response.url}: {response.status_code}: {message}")
    return body


def tables(result: Mapping[str, Any], *, demo: bool) -> Iterator[Any]:
    """Yield one table per defendant, then the repairs, what confidences mean, and a disclaimer.

    `demo` says that the demo's tiny model answered, which comes first.
    """
    if demo:
        yield Text(DEMO, style="bold yellow")
    confidences = result.get("confidence")
    judgments = result["answer"]["judgments"]
    for judgment, confidence in zip(judgments, confidences or [{}] * len(judgments), strict=True):
        yield judgment_table(judgment, confidence)
    if result["repairs"]:
        yield Text("repaired: " + "; ".join(result["repairs"]), style="dim")
    if confidences:
        yield Text(CONFIDENCE, style="dim")
    yield Text(NOTICE, style="dim")


def judgment_table(judgment: Mapping[str, Any], confidence: Mapping[str, float]) -> Table:
    """Return the table of one defendant; without `confidence` it has no such column."""
    table = Table(title=Text(judgment["name"], style="bold"), title_justify="left")
    for column in ("", "", "模型自估 confidence") if confidence else ("", ""):
        table.add_column(column, overflow="fold")
    cells = {
        "罪名 charges": "、".join(judgment["charges"]),
        "法条 articles": "\n".join(map(article_name, judgment["articles"])),
        "刑罚 penalty": judgment["penalty"],
    }
    for title, value in cells.items():
        bars = [Text(bar(confidence[title.split()[1]]))] if confidence else []
        table.add_row(title, Text(value), *bars)
    return table


def bar(share: float) -> str:
    """Return a share (0 to 1) as a bar of ten blocks and a percentage; a guess is never certain."""
    full = round(share * BAR_WIDTH)
    percentage = ">99%" if share > 0.99 else f"{share:4.0%}"
    return f"{'█' * full}{'░' * (BAR_WIDTH - full)} {percentage}"
