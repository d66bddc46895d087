"""A file that is not of ours is one line, with what it is and the way out, in every command."""

import os
import re
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
    "several a line": (f"{ROW}{ROW}\n".encode(), "Extra data|several objects on a line"),
    "torn": (ROW[:-9].encode(), r"is the file cut off\?"),
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
            assert re.search(told, done.stderr), words


TABLE = "案号,事实,被告人,罪名,法条,刑期（月）\n1,张某盗窃。,张某,盗窃罪,264,9\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16"])
def test_a_table_is_named_in_every_encoding_that_excel_writes(
    encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "案件.csv"
    path.write_bytes(TABLE.encode(encoding))
    with pytest.raises(UserError, match=r"looks like a table \(CSV\), not JSON; panjue convert"):
        list(Reader(load_task("judgment")).read(path))


def test_a_skipped_row_is_listed_whatever_the_name_of_its_file(tmp_path: Path) -> None:
    skipped = Skipped({(Path(os.fsdecode(b"\xff.jsonl")), 3): "not JSON"})
    skipped.write(tmp_path / "skipped.jsonl")
    row = '{"file":"?.jsonl","place":3,"reason":"not JSON"}\n'
    assert (tmp_path / "skipped.jsonl").read_text("utf-8") == row


BAD_BYTES = ROW.encode().replace(b'"id": 0', b"").replace("甲".encode(), b"\xff", 1)
TWICE = ROW.replace('"fact"', '"fact":"","fact"')
DEEP_TWICE = ROW.replace('["甲"]', '[{"a":1,"a":2}]')


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (TWICE.encode(), "not JSON: the key 'fact' is given twice"),
        (DEEP_TWICE.encode(), "not JSON: the key 'a' is given twice"),
        (BAD_BYTES, "not UTF-8; save the file as UTF-8"),
        (ROW.replace("盗窃", "\\ud800").encode(), "a lone \\ud800-\\udfff escape is only half"),
        (b"3", "expected a JSON object, found int"),
    ],
)
def test_a_bad_row_of_a_list_is_skipped_as_one_of_lines_is(
    demo: Path, bad: bytes, reason: str
) -> None:
    path = demo.with_name("cases.json")
    path.write_bytes(b"[\n" + bad + b",\n" + ROW.replace("0", "1", 1).encode() + b"\n]\n")
    with pytest.raises(UserError, match=f"cases.json:row 1: {re.escape(reason)}"):
        list(Reader(load_task("judgment")).read(path))
    reader = Reader(load_task("judgment"), on_bad_row="skip")
    assert [example.id for example in reader.read(path)] == [1]
    [(place, told)] = [(place, told) for (_, place), told in reader.skipped.rows.items()]
    assert (place, told.startswith(reason)) == ("row 1", True)


def test_a_list_that_is_no_json_cannot_be_skipped_in(demo: Path) -> None:
    path = demo.with_name("cases.json")
    path.write_text(f"[{ROW}\n{ROW}]", "utf-8")
    with pytest.raises(UserError, match="a list is read whole, so no row of it can be skipped"):
        list(Reader(load_task("judgment"), on_bad_row="skip").read(path))


@pytest.mark.parametrize("remarks", ["// one\n", "\ufeff// one\n\n  // two\n"])
def test_remarks_may_stand_before_a_list(demo: Path, remarks: str) -> None:
    path = demo.with_name("cases.json")
    path.write_text(f"{remarks}[{ROW},\n// another\n{ROW.replace('0', '1', 1)}]\n", "utf-8")
    assert [example.id for example in Reader(load_task("judgment")).read(path)] == [0, 1]
    path.write_text(f"{remarks}[{ROW},\n7,]", "utf-8")
    line = remarks.count("\n") + 2
    with pytest.raises(UserError, match=f"line {line} column"):
        list(Reader(load_task("judgment")).read(path))


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
