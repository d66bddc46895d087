"""Name what a file is that has no cases of a task: other trainers' data, a table, an archive."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.files import BOM
from panjue.prompts.plumbing.rows import case_rows
from panjue.prompts.task import Task, load_task, task_folders

DATA_PAGE = "prompts/DATA.md"

BEGINNINGS = {
    b"\x1f\x8b": "gzip (gunzip it)",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"PK\x03\x04": "a ZIP file or an Excel workbook",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x80\x04": "a Python pickle",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself (git lfs pull)",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
}
"""The first bytes of a file -> what it is."""

FORMAT_KEYS = {
    "Alpaca (instruction, output)": {"instruction", "output"},
    "ShareGPT (conversations)": {"conversations", "from", "value"},
    "OpenAI's messages": {"messages", "role", "content"},
    "preferences (chosen, rejected)": {"chosen", "rejected"},
    "prompts with completions": {"prompt", "completion"},
    "queries with responses": {"query", "response"},
    "CAIL2018": {"meta", "accusation", "term_of_imprisonment"},
    "MultiLJP": {"criminals_info", "accusations"},
    "LeCaRD": {"ajjbqk", "pjjg"},
    "a submission, which comes after the cases": {"judgments", "penalty"},
}
"""A format -> keys that its rows have, and no row of a task has all."""

HEAD = 2**16
"""Bytes that are looked at: a few rows."""

KEY = re.compile(r'(?<!\\)"(\w+)"\s*:')

FORMS = {
    re.compile(r"\[?\s*\{\s*'\w+'\s*:"): "Python's repr (single quotes), not JSON",
    re.compile(r"[\w\"]+(?:[,;\t]\s*[\w.\"]+)+\s*\n"): "a table (CSV), not JSON",
}
"""How a text begins -> what it is."""

FORMS_OF_OBJECTS = {
    re.compile(
        r'\{\s*"\w+"\s*:\s*\{\s*"0"\s*:'
    ): "pandas' JSON by column; write it with orient='records', lines=True",
    re.compile(r'\{\s*"\w+"\s*:\s*\[\s*\{'): "one JSON object in which a list has the rows",
}
"""The same of a file that is one object, where the files of the task are not."""


def other_format(path: Path, task: Task) -> str:
    """Return the name of the format that a file seems to have; empty if it is no known one."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        head = file.read(HEAD).removeprefix(BOM)
    return next(_formats(head, one_object=task.data.rows is not case_rows), "")


def _formats(head: bytes, *, one_object: bool) -> Iterator[str]:
    for beginning, name in BEGINNINGS.items():
        if head.startswith(beginning):
            yield name
    text = head.decode("utf-8", errors="replace").lstrip()
    keys = set(KEY.findall(text))
    for name, wanted in FORMAT_KEYS.items():
        if wanted <= keys:
            yield name
    forms = FORMS if one_object else FORMS | FORMS_OF_OBJECTS
    for form, name in forms.items():
        if form.match(text):
            yield name


def example_of(task: Task) -> Iterator[str]:
    """Yield what a file of the task looks like: a short line, or the path of an example."""
    for name, folder in task_folders().items():
        if load_task(name).data is not task.data:
            continue
        lines = folder / "sample.jsonl"
        if lines.exists():
            first = json.loads(lines.read_text("utf-8").splitlines()[0])
            yield f"a line looks like {json.dumps(_short(first), ensure_ascii=False)}"
        else:
            yield from (f"an example is {sample}" for sample in folder.glob("sample.*"))


def _short(value: Any) -> Any:
    """Return a value with long texts as `…`, and of each list the first item."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value[:1]]
    if isinstance(value, str) and len(value) > 20:
        return "…"
    return value
