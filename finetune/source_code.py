"""What a Python file says to the interpreter, the same with each version of Python.

It imports nothing of panjue: a test runs it with other versions, which have no libraries.
"""

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NOT_CODE = ("ctx", "kind", "type_comment")
"""Fields of syntax trees that follow from others, or do nothing."""


def code_sha256(paths: Iterable[Path]) -> str:
    """Return the hash of what Python files say to the interpreter."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b" " + code(path) + b"\n")
    return digest.hexdigest()


def code(path: Path) -> bytes:
    """Return what a Python file says to the interpreter: no comments, no docstrings.

    Versions of Python differ in `ast.dump` and in `tokenize`.
    """
    source = path.read_text("utf-8-sig")
    return json.dumps(plain(ast.parse(source), source)).encode()


def plain(node: Any, source: str) -> Any:
    """Return a syntax tree as lists of texts, without what only some versions of Python have."""
    if isinstance(node, ast.JoinedStr):  # whose parts differ: as it is written
        return ["f-string", ast.get_source_segment(source, node)]
    if isinstance(node, ast.AST):
        fields = []
        for name, value in sorted(ast.iter_fields(node)):
            if value is not None and value != [] and name not in NOT_CODE:
                fields.append([name, plain(value, source)])
        return [type(node).__name__, *fields]
    if isinstance(node, list):
        # A text that stands alone does nothing, as help under a field does.
        return [plain(one, source) for one in node if not is_text(one)]
    return ascii(node)  # `repr` depends on the version's table of characters


def is_text(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def imported_names(path: Path) -> set[str]:
    """Return what a Python file imports: the last part of each module, and names from there."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8-sig"))):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.name.rpartition(".")[2] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.rpartition(".")[2])
    return names
