"""Name the form of a file without cases of a task: other trainers' data, a table, an archive."""

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from panjue.prompts.forms.values import JSONP
from panjue.prompts.plumbing.files import BOM
from panjue.prompts.plumbing.rows import case_rows
from panjue.prompts.task import Task, folders_with

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
"""First bytes of a file -> what the file is."""

SUBMISSION = "a submission, which comes after the cases"

FORMAT_KEYS = {
    "Alpaca (instruction, output)": {"instruction", "output"},
    "ShareGPT (conversations)": {"conversations", "from", "value"},
    "OpenAI's messages": {"messages", "role", "content"},
    "preferences (chosen, rejected)": {"chosen", "rejected"},
    "prompts with completions": {"prompt", "completion"},
    "queries with responses": {"query", "response"},
    "CAIL2018": {"meta", "accusation", "term_of_imprisonment"},
    "MultiLJP": {"criminals_info", "accusations"},
    "Label Studio": {"data", "annotations"},
    "CMRC2018": {"context_text", "query_text"},
    "LeCaRD": {"ajjbqk", "pjjg"},
    SUBMISSION: {"judgments", "penalty"},
}
"""Form -> keys that its rows have; no row of a task has all of them."""

OWN_KEYS = 2
"""With this many keys of the task's own rows, besides the id, a file is of the task. CAIL2018 has
one such key."""

HEAD = 2**16
"""Number of first bytes that are looked at; they contain a few rows."""

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

KEY = re.compile(r'(?<!\\)"(\w+)"\s*:')

FORMS = {
    re.compile(r"\[?\s*\{\s*'\w+'\s*:"): "Python's repr (single quotes), not JSON",
    re.compile(r"[\w\"]+(?:[,;\t]\s*[\w.\"()（） ]+)+\s*\n"): "a table (CSV), not JSON",
}
"""Beginning of a text -> what the file is."""

SEVERAL_SPANS = re.compile(r'"answers"\s*:\s*\[\s*\[')

FORMS_OF_OBJECTS = {
    re.compile(
        r'\{\s*"\w+"\s*:\s*\{\s*"0"\s*:'
    ): "pandas' JSON by column; write it with orient='records', lines=True",
    re.compile(r'\{\s*"\w+"\s*:\s*\[\s*\{'): "one JSON object in which a list has the rows",
    re.compile(r"\{\s*\n"): "one object over many lines",
    re.compile(r"\{[^\n]*\}[ \t]*\{[^\n]*\}"): "several objects on a line, as of joined files",
}
"""The same, for a task whose files have an object a line."""


def other_format(path: Path, task: Task) -> str:
    """Return the name of the form that a file seems to have; empty if no form is known.

    A column such as `instruction` alone shows no other form: a file of the task may have it, too.
    """
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        head = file.read(HEAD).removeprefix(BOM)
    return next(_formats(head, task), "")


def _formats(head: bytes, task: Task) -> Iterator[str]:
    """Yield the names of the forms that a file with these first bytes may have."""
    for beginning, name in BEGINNINGS.items():
        if head.startswith(beginning):
            yield name
    text = _decoded(head).lstrip()
    keys = set(KEY.findall(text))
    of_task = [field for row in _sample_rows(task) for field in row if field != "id"]
    # One key of the task's own rows may occur in another form by chance, two or more do not.
    is_of_task = len(keys.intersection(of_task)) >= OWN_KEYS
    for name, wanted in FORMAT_KEYS.items():
        if wanted <= keys and not is_of_task:
            yield name
    # Files that `case_rows` reads have an object a line. Files of other tasks may be one object.
    has_object_a_line = task.data.rows is case_rows
    forms = FORMS | FORMS_OF_OBJECTS if has_object_a_line else FORMS
    for form, name in forms.items():
        if form.match(text):
            yield name
    if SEVERAL_SPANS.search(text):
        yield "answers of several spans (CAIL2021)"
    if JSONP.match(text):
        yield "JavaScript around JSON (JSONP)"
    if {"context", "question", "answers"} <= keys and "paragraphs" not in keys:
        yield "flat rows of SQuAD"


def _decoded(head: bytes) -> str:
    """Return the first bytes of a file as text. Excel writes tables in GB18030 and UTF-16."""
    for encoding in ("utf-8", "utf-16" if head.startswith(UTF_16) else "gb18030"):
        with suppress(UnicodeDecodeError):
            # `bytes.decode` would refuse a character that the end of `head` cuts.
            return codecs.getincrementaldecoder(encoding)().decode(head)
    return head.decode("utf-8", errors="replace")


def example_of(task: Task) -> Iterator[str]:
    """Yield how a file of the task looks: a short line, or the path of an example."""
    for first in _sample_rows(task):
        yield f"a line looks like {json.dumps(_short(first), ensure_ascii=False)}"
    for folder in folders_with(task.data):
        if not (folder / "sample.jsonl").exists():
            yield from (f"an example is {sample}" for sample in folder.glob("sample.*"))


def _sample_rows(task: Task) -> Iterator[dict[str, Any]]:
    """Yield the first row of the task's sample, if the sample has lines."""
    for folder in folders_with(task.data):
        if (folder / "sample.jsonl").exists():
            yield json.loads((folder / "sample.jsonl").read_text("utf-8").splitlines()[0])


def _short(value: Any) -> Any:
    """Return a value with `…` for long texts, and with only the first item of each list."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value[:1]]
    if isinstance(value, str) and len(value) > 20:
        return "…"
    return value
