"""One name is one thing: no two files of the four folders define the same at their top.

A task is a world of its own: it may call its functions as others do.
"""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = ("prompts/cli.py", "prompts/cli_scores.py")  # their functions have the commands' names


def names_at_top(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        targets: list[ast.AST] = [node]
        if isinstance(node, ast.Assign):
            targets = [*node.targets]
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        names |= {getattr(target, "name", getattr(target, "id", "_")) for target in targets}
    return {name for name in names if not name.startswith("_") and len(name) > 1}


def test_a_name_is_one_thing() -> None:
    places = defaultdict(set)
    for room in ("prompts", "eval", "finetune", "serve"):
        for path in (ROOT / room).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            if place in COMMANDS or place.startswith("prompts/tasks/"):
                continue
            for name in names_at_top(path):
                places[name].add(place)
    several = {name: found for name, found in places.items() if len(found) > 1}
    assert not several, several
