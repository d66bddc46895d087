"""Hashes of the code that turns a text into a prompt, and an answer into the reply to learn.

If this code changes, cached token rows and classifiers are made again, and a finished training
counts as another training. Changes of comments, docstrings and scoring do not count.
"""

import hashlib
import inspect
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from panjue.finetune.source_code import code, code_sha256, imported_names
from panjue.prompts.task import load_task, task_folders

SHARED = (
    *("prompts/plain.py", "prompts/names.py", "prompts/render.py", "prompts/shorten.py"),
    *("prompts/tasks/classes.py", "prompts/tasks/evidence.py"),
    *("finetune/classifier/opinions.py", "finetune/classifier/label_sets.py"),
)
"""Files of code that all tasks share."""

ONLY_SCORES = ("metric.py", "submission.*", "demo.*", "sample.*", "README*")
"""Files of a task's folder that do not count: metric, submission, demo, sample and pages."""


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
    """Return the hash of a task's folder, without files that only score."""
    folder = task_folders()[task]
    digest = hashlib.sha256()
    for path in asking_files(folder):
        is_code = path.suffix == ".py"
        content = code(path) if is_code else path.read_bytes().replace(b"\r\n", b"\n")
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def asking_files(folder: Path) -> list[Path]:
    """Return the files of a task's folder that affect what the model is asked.

    A file in `ONLY_SCORES` counts if a file other than `task.py` imports it. `task.py` may import
    it for scoring alone.
    """
    found: list[Path] = []
    scoring: list[Path] = []
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        if not path.is_file() or any(name.startswith((".", "__pycache__")) for name in names):
            continue
        only_scores = any(fnmatch(names[0], pattern) for pattern in ONLY_SCORES)
        (scoring if only_scores else found).append(path)
    to_follow = [path for path in found if path.suffix == ".py" and path.name != "task.py"]
    while to_follow:
        imported = imported_names(to_follow.pop())
        for path in [one for one in scoring if one.suffix == ".py" and one.stem in imported]:
            scoring.remove(path)
            found.append(path)
            to_follow.append(path)
    return sorted(found)
