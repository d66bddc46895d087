"""The table of promises in tests/README.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "tests/README.md").read_text("utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)


def functions(file: str) -> set[str]:
    """Return the names of a test file's functions."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test_that_exists() -> None:
    assert len(TESTS) > 60
    known = {file: functions(file) for file in {file for file, _ in TESTS}}
    assert [f"{file}::{name}" for file, name in TESTS if name not in known[file]] == []


def test_every_row_of_the_table_names_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")]
    promised = [row for row in rows if not row.startswith(("| promise", "| ---"))]
    assert [row for row in promised if "::" not in row] == []
