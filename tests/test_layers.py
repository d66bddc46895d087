"""Who may import whom. The rooms meet in files on disk, so few imports are needed at all."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "prompts": set(),
    "eval": {"prompts"},
    "finetune": {"prompts", "eval"},
    "serve": {"prompts", "eval"},
}
HEAVY = {"torch", "transformers", "trl", "peft", "vllm"}
LIGHT = (
    "panjue",
    "panjue.prompts.task",
    "panjue.prompts.cli",
    "panjue.eval.score",
    "panjue.eval.check",
    "panjue.finetune.settings",
    "panjue.serve.settings",
)
"""What a user waits for before a wrong word is named, and whenever something is scored."""


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every module that the code imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def rooms(names: Iterator[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("panjue.")}


def at_top(path: Path) -> ast.Module:
    """Return the module without its functions and classes: what runs when it is imported."""
    tree = ast.parse(path.read_text("utf-8"))
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return ast.Module([node for node in tree.body if not isinstance(node, inner)], [])


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert sources(room)
    for path in sources(room):
        # The one exception: each command of the command line loads its room when it is called.
        is_command = path.name.startswith("cli")
        tree = at_top(path) if is_command else ast.parse(path.read_text("utf-8"))
        assert not [node for node in ast.walk(tree) if getattr(node, "level", 0)], "relative"
        assert rooms(imports(tree)) <= MAY_IMPORT[room] | {room}, path


def test_plumbing_imports_nothing_above_itself() -> None:
    for path in sources("prompts/plumbing"):
        ours = {n for n in imports(ast.parse(path.read_text("utf-8"))) if n.startswith("panjue.")}
        assert all(name.startswith("panjue.prompts.plumbing.") for name in ours), path


def test_what_the_command_line_loads_by_name_is_there() -> None:
    tree = ast.parse((ROOT / "prompts/cli.py").read_text("utf-8"))
    calls = [
        [ast.literal_eval(word) for word in node.args]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_load"
    ]
    assert calls
    for module, name in calls:
        path = ROOT / f"{module.replace('.', '/')}.py"
        top = ast.parse(path.read_text("utf-8")).body
        assert name in {node.name for node in top if isinstance(node, ast.FunctionDef)}, path


def test_contract_scoring_and_settings_stay_light() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert loaded >= set(LIGHT)
    assert not HEAVY & loaded


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_model_may_run_its_own_code(room: str) -> None:
    on = re.compile(r"--trust-remote-code|trust_remote_code[\"']?\s*[:=]\s*(?!false|False)\w")
    assert on.search("f(trust_remote_code=True)")
    assert on.search("trust_remote_code: yes")
    assert on.search('{"trust_remote_code": flag}')
    assert not on.search("f(trust_remote_code=False)")
    for path in (ROOT / room).rglob("*"):
        if path.suffix in {".py", ".yaml", ".json", ".sh"}:
            assert not on.search(path.read_text("utf-8")), path


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_file_is_read_in_one_sitting(room: str) -> None:
    for path in sources(room):
        assert len(path.read_text("utf-8").splitlines()) <= 350, path
    assert len(list((ROOT / "prompts").glob("*.py"))) <= 12
