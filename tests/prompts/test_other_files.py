"""A file that is not of ours is one line, with what it is and the way out, in every command."""

import os
from pathlib import Path

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader, Skipped
from panjue.prompts.task import load_task, task_folders
from panjue.prompts.tasks.judgment.demo import write_demo
from tests.prompts.test_cli import Panjue

ROW = dump({"id": 0, "fact": "甲盗窃。", "defendants": ["甲"]})

FILES = {
    "CSV": (b"id,fact,defendants\n0,x,y\n", "not JSON"),
    "GBK": (f"{ROW}\n".encode("gbk"), "not UTF-8 at byte"),
    "several a line": (f"{ROW}{ROW}\n".encode(), "Extra data"),
    "torn": (ROW[:-9].encode(), "is the file cut off?"),
    "deep": (b'{"id":' + b"[" * 970 + b"]" * 970 + b"}\n", ""),
    "a list, then cases": (f"[1,2]\n{ROW}\n".encode(), ""),
    "nothing": (b"", ""),
    "no id": (b'{"x": 1}\n', ""),
}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    write_demo(tmp_path, {"test": 2})
    return tmp_path / "test.jsonl"


@pytest.mark.parametrize("kind", FILES)
def test_every_command_names_what_it_cannot_read(kind: str, demo: Path, panjue: Panjue) -> None:
    content, told = FILES[kind]
    path = demo.with_name("other.data")
    path.write_bytes(content)
    commands: list[tuple[object, ...]] = [
        ("check", path, "--cases", demo),
        ("score", path, demo),
        ("score", demo, path),
        ("fairness", demo, demo, "--by", "x", "--groups", path),
    ]
    for task in task_folders():
        if task != "dialogue":  # its cases are folders
            commands.append(("check", demo, "--cases", path, "--task", task))
    for words in commands:
        done = panjue(*words)
        assert done.returncode in {1, 2} or not told, words
        assert done.stderr.count("\n") == (done.returncode == 2), (words, done.stderr)
        is_lines = "cloze" not in words and "reading" not in words
        if is_lines and str(path) in done.stderr:
            assert told in done.stderr, words


def test_a_skipped_row_is_listed_whatever_the_name_of_its_file(tmp_path: Path) -> None:
    skipped = Skipped({(Path(os.fsdecode(b"\xff.jsonl")), 3): "not JSON"})
    skipped.write(tmp_path / "skipped.jsonl")
    row = '{"file":"?.jsonl","place":3,"reason":"not JSON"}\n'
    assert (tmp_path / "skipped.jsonl").read_text("utf-8") == row


def test_a_list_as_the_first_row_is_a_bad_row(demo: Path) -> None:
    path = demo.with_name("cases.jsonl")
    reader = Reader(load_task("judgment"))
    for first, told in (("[1,2]", "list"), ("3", "int")):
        path.write_text(f"{first}\n{ROW}\n", "utf-8")
        with pytest.raises(UserError, match=f"cases.jsonl:1: expected a JSON object, found {told}"):
            list(reader.read(path))
    for whole in (f"[{ROW}]", f"[\n{ROW}\n]\n", f"[{ROW},\n{ROW.replace('0', '1', 1)}]\n\n"):
        path.write_text(whole, "utf-8")
        assert list(reader.read(path)), whole
