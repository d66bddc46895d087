"""Who may import whom: floors in the order in which data flow, and the command line above them."""

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
    "finetune": {"prompts"},
    "serve": {"prompts", "finetune"},
    "eval": {"prompts", "finetune", "serve"},
}
HEAVY = {"torch", "transformers", "trl", "peft", "vllm", "lightgbm", "sklearn", "scipy.optimize"}
LIGHT = (
    "panjue",
    "panjue.prompts.task",
    "panjue.prompts.cli",
    "panjue.eval.score",
    "panjue.eval.check",
    "panjue.eval.explain",
    "panjue.finetune.settings",
    "panjue.finetune.classifier.fit",
    "panjue.serve.decoding",
    "panjue.serve.settings",
)
"""What a user waits for before a wrong word is named, and whenever something is scored."""


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def is_roof(path: Path) -> bool:
    """Say whether a file is of the command line, which composes what all floors have."""
    return path.parent == ROOT / "prompts" and path.name.startswith("cli")


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every module that the code imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert sources(room)
    for path in sources(room):
        if is_roof(path):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        ours = [name for name in imports(tree) if name.startswith("panjue.")]
        assert {name.split(".")[1] for name in ours} <= MAY_IMPORT[room] | {room}, path
        if path.parent.name == "plumbing":
            assert all(name.startswith("panjue.prompts.plumbing.") for name in ours), path


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_the_reading_order_of_a_folder_names_all_its_files(room: str) -> None:
    order = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text("utf-8"))) or ""
    named = set(re.findall(r"\b\w+\.py\b", order))
    files = {path.name for path in (ROOT / room).glob("*.py")} - {"__init__.py"}
    assert files <= named, files - named


def test_contract_scoring_and_settings_stay_light() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not HEAVY.intersection(loaded)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_model_may_run_its_own_code(room: str) -> None:
    on = re.compile(r"--trust-remote-code|trust_remote_code[\"']?\s*[:=]\s*(?!false|False)\w")
    assert on.search("f(trust_remote_code=True)")
    assert on.search("trust_remote_code: yes")
    assert not on.search("f(trust_remote_code=False)")
    for path in (ROOT / room).rglob("*"):
        if path.suffix in {".py", ".yaml", ".json", ".sh"}:
            assert not on.search(path.read_text("utf-8")), path
