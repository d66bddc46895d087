"""Hashes of the code that turns a text into a prompt, and an answer into the reply to learn.

Where it changes, cached token rows and classifiers are made again, and a finished training is
another one. Comments, docstrings and scoring do not count.
"""

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from panjue.prompts.model import prompt_sha256
from panjue.prompts.task import Task, load_task, task_folders

SHARED = (
    *("prompts/names.py", "prompts/render.py", "prompts/shorten.py"),
    *("prompts/tasks/classes.py", "prompts/tasks/evidence.py"),
    *("finetune/classifier/opinions.py", "finetune/classifier/label_sets.py"),
)
"""The code that all tasks share."""


@cache
def shared_rules() -> str:
    """Return the hash of the code that all tasks share."""
    folders = {
        "prompts": Path(inspect.getfile(load_task)).parent,
        "finetune": Path(__file__).parent,
    }
    paths = []
    for name in SHARED:
        folder, _, rest = name.partition("/")
        paths.append(folders[folder] / rest)
    return code_sha256(paths)


def task_sha256(task: str) -> str:
    """Return the hash of a task's prompt and of its code that reads cases and asks about them."""
    folder = task_folders()[task]
    start = {folder / "task.py"}
    for function in asking(load_task(task)):
        path = Path(inspect.getfile(function))
        if path.parent == folder:
            start.add(path)
    code = code_sha256(sorted(reached(start, folder)))
    return hashlib.sha256(f"{prompt_sha256(task)} {code}".encode()).hexdigest()


def asking(task: Task) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a task that make its prompts and its token rows."""
    given: list[Any] = [task.data.read, task.data.rows, *vars(task.ask).values()]
    if task.solve:
        given += [task.solve.steps, task.solve.gold_oracle]
    for one in given:
        if not callable(one):
            continue
        yield from unwrapped(one)


def unwrapped(function: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function, without its `partial`s; and those that are given to it there."""
    if isinstance(function, partial):
        yield from unwrapped(function.func)
        for argument in function.args:
            if callable(argument):
                yield from unwrapped(argument)
    else:
        yield function


def reached(start: Iterable[Path], folder: Path) -> set[Path]:
    """Return these files of a task's folder, and those there that they import.

    What `task.py` imports counts only if it asks: it also assembles the scoring.
    """
    found: set[Path] = set()
    waiting = list(start)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if path.name == "task.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = folder / f"{node.module.rpartition('.')[2]}.py"
                is_here = node.module.endswith(f".{folder.name}.{imported.stem}")
                if is_here and imported.exists():
                    waiting.append(imported)
    return found


def code_sha256(paths: Iterable[Path]) -> str:
    """Return the hash of what Python files say to the interpreter: no comments, no docstrings."""
    digest = hashlib.sha256()
    for path in paths:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                # A text that stands alone does nothing, as help under a field does.
                node.body = [one for one in body if not is_text(one)]  # type: ignore[attr-defined]
        digest.update(f"{path.name} {ast.dump(tree)}\n".encode())
    return digest.hexdigest()


def is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
