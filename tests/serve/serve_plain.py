"""`panjue serve`; a request with the header `X-Plain` reaches vLLM's app without the middleware."""

import sys
from pathlib import Path
from typing import Any

from panjue.prompts import cli  # noqa: F401  # first, as in every process of the command
from panjue.serve import server
from panjue.serve.settings import serve_settings


class Plain:
    """Stands around panjue's middleware."""

    def __init__(self, app: Any) -> None:
        self.panjue = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_plain = any(name == b"x-plain" for name, _ in scope.get("headers", ()))
        await (self.panjue.app if is_plain else self.panjue)(scope, receive, send)


def arguments(*given: Any) -> Any:
    """Return the arguments of vLLM's server, with this middleware too."""
    args = original(*given)
    args.middleware.append("serve_plain.Plain")
    return args


original = server.arguments

if __name__ == "__main__":
    server.arguments = arguments  # type: ignore[assignment]
    server.serve(*serve_settings(Path(sys.argv[1]), sys.argv[2:]))
