"""Two servers behind nginx, as serve/DEPLOY.md has it, while one is killed."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

PAGE = Path(__file__).parents[2] / "serve/DEPLOY.md"
NGINX = (
    "error_log stderr; pid {folder}/pid; daemon off; events {{}} http {{ access_log off; {text} }}"
)
FACT = "经审理查明：2022年2月25日，被告人唐某甲、徐某A共同在西坪镇某商铺因口角持木棍殴打他人。"
CASE = {"fact": FACT, "defendants": ["唐某甲", "徐某A"]}
LONGEST_S = 120


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def proxy(servers: list[str], folder: Path) -> Iterator[str]:
    """Start the page's nginx before these servers; yield its address."""
    found = re.search(r"```nginx\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found
    port, addresses = free_port(), cycle(server.removeprefix("http://") for server in servers)
    text = re.sub(r"10\.0\.0\.\d:8000", lambda _: next(addresses), found[1])
    text = re.sub(r"listen 80\b", f"listen {port}", text)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, text=text), "utf-8")
    words = ["nginx", "-p", str(folder), "-c", str(config)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            began = time.monotonic()
            while not is_ready(url):
                assert process.poll() is None
                assert time.monotonic() - began < LONGEST_S
                time.sleep(0.1)
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
def test_behind_a_proxy_a_server_may_die(panjue_serve: Callable[..., Any], tmp_path: Path) -> None:
    if not shutil.which("nginx"):
        pytest.skip("nginx is not installed")
    servers, urls = [], []
    for _ in range(2):  # one after the other: the first one may merge the adapter
        servers.append(panjue_serve())
        urls.append(servers[-1].ready())
    with proxy(urls, tmp_path) as url, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, url) for _ in range(40)]
        while sum(each.done() for each in asked) < 10:
            time.sleep(0.05)
        servers[0].process.kill()
        replies = [each.result() for each in asked]
    assert {status for status, _ in replies} == {200}
    assert all(judgments == replies[0][1] for _, judgments in replies)
