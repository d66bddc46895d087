"""Two servers behind nginx, as serve/DEPLOY.md has it, while one is killed."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from panjue.serve.server import free_port
from tests.served import PanjueServe, until

PAGE = Path(__file__).parents[2] / "serve/DEPLOY.md"
NGINX = (
    "error_log stderr; pid {folder}/pid; daemon off; events {{}} http {{ access_log off; {text} }}"
)
FACT = "经审理查明：2022年2月25日，被告人唐某甲、徐某A共同在西坪镇某商铺因口角持木棍殴打他人。"
CASE = {"fact": FACT, "defendants": ["唐某甲", "徐某A"]}
LONGEST_S = 120


@contextmanager
def proxy(servers: list[str], folder: Path) -> Iterator[str]:
    """Start the page's nginx before these servers; yield its address."""
    found = re.search(r"```nginx\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found
    port = free_port("127.0.0.1", 0)
    addresses = cycle(server.removeprefix("http://") for server in servers)
    text = re.sub(r"10\.0\.0\.\d:8000", lambda _: next(addresses), found[1])
    text = re.sub(r"listen 80\b", f"listen {port}", text)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, text=text), "utf-8")
    words = ["nginx", "-p", str(folder), "-c", str(config)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: is_ready(url))
            yield url
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).is_success
    except httpx.HTTPError:
        return False


def ask(url: str) -> tuple[int, Any]:
    reply = httpx.post(f"{url}/v1/judgments", json=CASE, timeout=LONGEST_S)
    return reply.status_code, reply.json()["judgments"] if reply.is_success else reply.text


@pytest.mark.endurance
def test_behind_a_proxy_a_server_may_die(
    panjue_serve: Callable[..., PanjueServe], tmp_path: Path
) -> None:
    if not shutil.which("nginx"):
        pytest.skip("nginx is not installed")
    first = panjue_serve()
    first.ready()  # it may merge the adapter
    second = panjue_serve()
    with proxy([first.url, second.ready()], tmp_path) as url, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, url) for _ in range(40)]
        until(lambda: sum(each.done() for each in asked) >= 10)
        first.process.kill()
        replies = [each.result() for each in asked]
    assert {status for status, _ in replies} == {200}
    assert all(judgments == replies[0][1] for _, judgments in replies)
