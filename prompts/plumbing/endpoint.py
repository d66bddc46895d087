"""OpenAI-compatible endpoints: their names, their keys, and requests that wait for a reply."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

from panjue.prompts.plumbing.errors import UserError, first_line

if TYPE_CHECKING:
    from openai import OpenAI

TIMEOUT_S = 120
RETRIES = 5
"""Retries of a request, after 0.5 s and then up to 8 s each, or what the server asks for."""


def parse_endpoint(name: str) -> tuple[str, str] | None:
    """Return the address and the model of `URL#MODEL`; None if `name` has another form."""
    url, _, model = name.partition("#")
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # raises UnicodeError now instead of on connecting
    except (httpx.InvalidURL, UnicodeError):
        return None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        return None
    if parsed.userinfo:
        raise UserError(f"{parsed.host}: no password in an address; set its key variable instead")
    return (url.rstrip("/"), model) if model else None


def key_of(*variables: str) -> str:
    """Return the key in the first environment variable that is set; empty if none is."""
    for variable in variables:
        key = os.environ.get(variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{variable}: must be of printable ASCII characters")
        if key:
            return key
    return ""


PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that clients are made with; those of proxies may be in lower case."""

NOT_BY_PROXY = "localhost,127.0.0.1,::1"


@contextmanager
def making_client() -> Iterator[None]:
    """Name the variables of proxies and certificates if no client can be made with them.

    The block makes a client. It asks this machine's own addresses directly: no proxy reaches them.
    """
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if NOT_BY_PROXY not in direct:
        os.environ["no_proxy"] = f"{direct},{NOT_BY_PROXY}"
    try:
        yield
    except Exception as error:  # the libraries have no class for it
        kind = CERTIFICATES if isinstance(error, OSError) else PROXIES
        names = [name for name in os.environ if name.upper() in kind]
        if not names:
            raise
        raise UserError(f"{' or '.join(names)}: {first_line(error)}") from None


@contextmanager
def asking(url: str, variable: str) -> Iterator["OpenAI"]:
    """Return a client of an endpoint; its errors become one line with the address."""
    from openai import APIStatusError, OpenAI, OpenAIError  # noqa: PLC0415  # it takes a second

    key = key_of(variable) or "none"  # the client insists on one
    with making_client():
        client = OpenAI(base_url=url, api_key=key, timeout=TIMEOUT_S, max_retries=RETRIES)
    try:
        with client:
            yield client
    except APIStatusError as error:
        hint = f"; is {variable} right?" if error.status_code in {401, 403} else ""
        raise UserError(f"{url}: {first_line(error)[:300]}{hint}") from None
    except OpenAIError as error:
        raise UserError(f"{url}: {first_line(error)}") from None
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UserError(f"{url}: its reply is not in OpenAI's format") from None
