"""The meaning of a Python file for the interpreter, equal in every version of Python.

This file imports nothing of panjue, because a test runs it with Pythons that have no libraries.
"""

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NOT_CODE = ("ctx", "kind", "type_comment")
"""Fields of syntax trees that follow from other fields, or have no effect."""


def code_sha256(paths: Iterable[Path]) -> str:
    """Return the hash of the code of Python files, see `code`."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b" " + code(path) + b"\n")
    return digest.hexdigest()


def code(path: Path) -> bytes:
    """Return the code of a Python file without comments and docstrings.

    `ast.dump` and `tokenize` are not used, because they differ between versions of Python.
    """
    source = path.read_text("utf-8-sig")
    return json.dumps(plain(ast.parse(source), source)).encode()


def plain(node: Any, source: str) -> Any:
    """Return a syntax tree as lists of texts, without parts of only some versions of Python."""
    if isinstance(node, ast.JoinedStr):  # its parts differ between versions: take its text
        return ["f-string", ast.get_source_segment(source, node)]
    if isinstance(node, ast.AST):
        fields = []
        for name, value in sorted(ast.iter_fields(node)):
            if value is not None and value != [] and name not in NOT_CODE:
                fields.append([name, plain(value, source)])
        return [type(node).__name__, *fields]
    if isinstance(node, list):
        return [plain(one, source) for one in node if not is_docstring(one)]
    return ascii(node)  # `repr` depends on the table of characters of a version


def is_docstring(node: Any) -> bool:
    """Say whether a statement is only a text: a docstring, or help under a field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def imported_names(path: Path) -> set[str]:
    """Return the last part of each name that a file imports: `from a.b import c` -> `b`, `c`.

    `rules.asking_files` finds the imported files of a task by them: `c.py` has the stem `c`.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8-sig"))):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.name.rpartition(".")[2] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.rpartition(".")[2])
    return names
