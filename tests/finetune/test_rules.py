"""What makes another training of one: the code that makes prompts and rows, and nothing else."""

import shutil
import sys
from pathlib import Path

import pytest

from panjue.finetune.rules import code_sha256, shared_rules, task_sha256
from panjue.prompts import tasks
from panjue.prompts.task import task_folders


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ("def f(x):\n    return x + 1\n", True),
        ("# a remark\ndef f(x):\n    '''Other words.'''\n    return (x  +  1)\n", True),
        ("def f(x):\n    return x + 2\n", False),
        ("def f(x):\n    return x + 1\n\n\nLIMIT = 3\n", False),
    ],
)
def test_code_counts_and_words_about_it_do_not(tmp_path: Path, changed: str, is_same: bool) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f(x):\n    '''Words.'''\n    return x + 1\n", "utf-8")
    before = code_sha256([file])
    file.write_text(changed, "utf-8")
    assert (code_sha256([file]) == before) == is_same


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a task that is a copy of `judgment`."""
    folder = tmp_path / "mine"
    shutil.copytree(task_folders()["judgment"], folder)
    for path in folder.glob("*.py"):
        text = path.read_text("utf-8")
        path.write_text(text.replace("panjue.prompts.tasks.judgment", "panjue.prompts.tasks.mine"))
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    for module in [name for name in sys.modules if name.startswith("panjue.prompts.tasks.mine")]:
        monkeypatch.delitem(sys.modules, module)  # that of another test
    return folder


@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        ("metric.py", True),
        ("demo.py", True),
        ("read.py", False),
        ("articles.py", False),
        ("penalties.py", False),
        ("task.py", False),
        ("prompt.md", False),
    ],
)
def test_of_a_task_what_scores_does_not_count(own: Path, name: str, is_same: bool) -> None:
    before = task_sha256("mine")
    path = own / name
    path.write_text(path.read_text("utf-8") + "\n\nFURTHER = 1\n", "utf-8")
    assert (task_sha256("mine") == before) == is_same


def test_the_shared_rules_are_the_same_in_every_call() -> None:
    assert shared_rules() == shared_rules()
    assert len(shared_rules()) == 64
