"""OpenAI-compatible endpoints: their names and keys, how to make clients, what they refuse."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from panjue.prompts.plumbing.errors import UserError, first_line


def parse_endpoint(name: str) -> tuple[str, str]:
    """Return the address and the model of `URL#MODEL`; UserError if `name` has another form."""
    url, _, model = name.partition("#")
    other = UserError(f"endpoint: {name!r} is not URL#MODEL, e.g. http://127.0.0.1:8000/v1#x")
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # raises UnicodeError now and not later when connecting
    except (httpx.InvalidURL, UnicodeError):
        raise other from None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise other
    if parsed.userinfo:
        raise UserError(f"{parsed.host}: no password in an address; set its key variable instead")
    start, is_call, _ = url.partition("/chat/completions")
    if is_call:
        raise UserError(f"{url}: give the address without its end: {start}#{model or 'MODEL'}")
    if not model:
        raise other
    return url.rstrip("/"), model


def key_of(variable: str) -> str:
    """Return the key in an environment variable; empty if it is not set."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{variable}: must be of printable ASCII characters")
    return key


CONTENT_FILTER = re.compile(
    r"content[ _]?(filter|policy)|data_?inspection|inappropriate|敏感", re.I
)
"""Pattern of providers' messages if they refuse a text for its content."""

TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|too (long|many tokens|large)|token limit|[超过]长|长度",
    re.I,
)
"""Pattern of servers' messages if they refuse a text for its length."""

PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that clients read; those of proxies may be in lower case."""

NOT_BY_PROXY = "localhost,127.0.0.1,::1"


@contextmanager
def making_client() -> Iterator[None]:
    """Raise UserError if the block cannot make a client because of the user's environment.

    The error names the variables of proxies, or those of certificates, that are set. The client
    asks addresses of this machine directly, since no proxy reaches them. For this, `no_proxy` is
    changed for the rest of the process.
    """
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if NOT_BY_PROXY not in direct:
        os.environ["no_proxy"] = f"{direct},{NOT_BY_PROXY}"
    try:
        yield
    except Exception as error:  # the libraries have no common class for it
        # OSError: certificates cannot be read. Any other: the address of a proxy cannot be used.
        kind = CERTIFICATES if isinstance(error, OSError) else PROXIES
        names = sorted(name for name in os.environ if name.upper() in kind)
        if not names:
            raise
        raise UserError(f"{' or '.join(names)}: {first_line(error)}") from None
