"""What makes another training of one: the code that makes prompts and rows, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from panjue.finetune import source_code
from panjue.finetune.rules import shared_rules, task_sha256
from panjue.finetune.source_code import code_sha256
from panjue.prompts import tasks
from panjue.prompts.task import load_task, task_folders


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


PYTHONS = ("python3.11", "python3.12", "python3.13")

F_STRINGS = r"""
def f(x, width):
    '''Words.'''
    a = f"{x!r:>{width}} {x = } {{brace}} {x:%Y-%m-%d}" "and" f'{x["key"]}\n'
    b = rf"\d{x}\n" + f"{'nested' + f'{x:{width}.{width}}'}" + f'''
    {
        x
    } 判决'''
    match x:
        case {"a": [1, *rest], **others} if not rest:
            return lambda *, y=-1.5e300: (a, b, u"\ud800", b"\xff", ..., others, y)
    return "\U0001fae8", 0x10, 1_000, 2j, "🫨"  # a character of Unicode 15


class A: ...
"""
"""What syntax trees, tokens and `repr` of different versions have otherwise."""


def other_python(name: str) -> str:
    """Return the program of a version of Python; skip the test where there is none."""
    if name == f"python{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    of_pyenv = root.glob(f"versions/{name.removeprefix('python')}.*/bin/{name}")
    for program in (shutil.which(name), *map(str, of_pyenv)):
        if program is None:
            continue
        done = subprocess.run([program, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:  # a shim of pyenv may lead nowhere
            return program
    pytest.skip(f"there is no {name}")


@pytest.mark.parametrize("name", PYTHONS)
def test_code_has_the_same_hash_with_each_version_of_python(tmp_path: Path, name: str) -> None:
    program = other_python(name)
    file = tmp_path / "a.py"
    file.write_text(F_STRINGS, "utf-8")
    panjue = Path(source_code.__file__).parents[1]
    paths = [file, *sorted(panjue.glob("prompts/tasks/**/*.py"))]
    code = "import sys, pathlib as p, source_code as s\n"
    code += "print(s.code_sha256(map(p.Path, sys.argv[1:])))"
    environment = {**os.environ, "PYTHONPATH": str(panjue / "finetune")}
    words = [program, "-B", "-c", code, *map(str, paths)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == code_sha256(paths)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('f"{x}"', 'f"{y}"'),
        ('f"{x}"', 'f"{x!r}"'),
        ('f"{x:>3}"', 'f"{x:>4}"'),
        ("None", "0"),
        ("1", "True"),
        ("1", "1.0"),
        ("'a'", "b'a'"),
        ("[]", "()"),
        ("x.a", "x.b"),
        ("lambda: x", "lambda x: x"),
    ],
)
def test_other_code_has_another_hash(tmp_path: Path, one: str, other: str) -> None:
    file = tmp_path / "a.py"
    hashes = set()
    for code in (one, other):
        file.write_text(f"a = {code}\n", "utf-8")
        hashes.add(code_sha256([file]))
    assert len(hashes) == 2


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
        ("sample.jsonl", True),
        ("submission.schema.json", True),
        ("README.md", True),
        ("words.py", False),
        ("words.txt", False),
        ("lists/words.txt", False),
        (".words.py.swp", True),
        ("__pycache__/words.pyc", True),
    ],
)
def test_of_a_task_all_files_count_but_what_only_scores(
    own: Path, name: str, is_same: bool
) -> None:
    path = own / name
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("A = 1\n")
    before = task_sha256("mine")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n\nFURTHER = 1\n")
    assert (task_sha256("mine") == before) == is_same


@pytest.mark.parametrize("line", ["from .metric import F1", "from . import metric"])
def test_a_metric_that_the_code_that_asks_imports_counts(own: Path, line: str) -> None:
    with (own / "read.py").open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    before = task_sha256("mine")
    with (own / "metric.py").open("a", encoding="utf-8") as file:
        file.write("\nFURTHER = 1\n")
    assert task_sha256("mine") != before


@pytest.mark.parametrize(
    "line",
    [
        "read = __import__('functools').cache(read)",
        "read = type('Reads', (), {'__call__': lambda self, row, of=read: of(row)})()",
    ],
)
def test_what_reads_cases_may_be_cached_or_an_object(own: Path, line: str) -> None:
    with (own / "read.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{line}\n")
    assert callable(load_task("mine").data.read)
    assert task_sha256("mine") == task_sha256("mine")


def test_the_line_ends_of_a_task_do_not_count(own: Path) -> None:
    before = task_sha256("mine")
    for path in filter(Path.is_file, own.iterdir()):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert task_sha256("mine") == before


def test_the_shared_rules_are_the_same_in_every_call() -> None:
    assert shared_rules() == shared_rules()
    assert len(shared_rules()) == 64
