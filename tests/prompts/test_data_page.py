"""The page on data of other forms, and the message that names the form of a file."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.convert import FORMS_OF_TASK, LAST_FORMS, OWN, convert
from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from panjue.prompts.tasks.judgment.penalties import PENALTIES, sentence

ROOT = Path(__file__).parents[2]
TASK = load_task("judgment")
FACT = "被告人陈某1、周某1抢劫。"
PEOPLE = [("陈某1", 40), ("周某1", 15)]
OUTCOMES = [
    {"name": n, "penalty": sentence(imprisonment=m), "charges": ["抢劫罪"], "articles": ["263"]}
    for n, m in PEOPLE
]
NAMES = [name for name, _ in PEOPLE]
CASE = {"id": 0, "fact": FACT, "defendants": NAMES, "outcomes": OUTCOMES}
JUDGED = [{"name": n, "charges": ["抢劫罪"], "articles": ["263"], "months": m} for n, m in PEOPLE]
REPLY = json.dumps({"judgments": JUDGED}, ensure_ascii=False)
SAID = {"system": "你是法官。", "user": FACT, "assistant": REPLY}
MADE = {"charges": ["抢劫罪"], "articles": ["263"]}
ANSWER = {
    "judgments": [
        {"name": name, **MADE, "penalty": PENALTIES[number]}
        for name, number in zip(NAMES, (8, 10), strict=True)
    ]
}

TERM = {"imprisonment": 40, "death_penalty": False, "life_imprisonment": False}
META = {"criminals": ["陈某1"], "accusation": ["抢劫"], "relevant_articles": [263]}
WORDS = {"陈某1": "有期徒刑三年四个月", "周某1": "有期徒刑一年三个月，并处罚金"}
CRIMINALS = {
    name: {"accusations": ["抢劫罪"], "laws": [263], "states": [3], "term": term}
    for name, term in WORDS.items()
}
VERDICT = "".join(f"被告人{name}犯抢劫罪，判处{term}。" for name, term in WORDS.items())


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def table(names: str, *rows: list[str]) -> bytes:
    return "\n".join([names, *(",".join(row) for row in rows)]).encode()


def parquet() -> bytes:
    pandas = pytest.importorskip("pandas")  # datasets brings it
    return bytes(pandas.DataFrame([CASE]).to_parquet())


def quoted(value: object) -> str:
    return f'"{value}"'


FILES: dict[str, tuple[str, bytes, str]] = {
    "Alpaca": (
        "alpaca.json",
        dumped([{"instruction": "判断罪名", "input": FACT, "output": REPLY}]),
        "Alpaca",
    ),
    "ShareGPT": (
        "sharegpt.json",
        dumped([{"conversations": [{"from": who, "value": text} for who, text in SAID.items()]}]),
        "ShareGPT",
    ),
    "OpenAI messages": (
        "messages.jsonl",
        dumped({"messages": [{"role": who, "content": text} for who, text in SAID.items()]}),
        "OpenAI's messages",
    ),
    "CAIL2018": (
        "data_train.json",
        dumped({"fact": FACT, "meta": {**META, "term_of_imprisonment": TERM}}),
        "CAIL2018",
    ),
    "CSV": (
        "cases.csv",
        table(
            "id,fact,name,charges,articles,months",
            *(["0", FACT, name, "抢劫罪", "263", str(months)] for name, months in PEOPLE),
        ),
        "a table (CSV)",
    ),
    "Parquet": ("cases.parquet", parquet(), "Parquet"),
    "gzip": ("cases.jsonl.gz", gzip.compress(dumped(CASE) + b"\n"), "gzip"),
    "Python repr": ("cases.txt", repr(CASE).encode(), "Python's repr"),
    "Wrapped JSON": (
        "cases.json",
        dumped({"data": [CASE]}),
        "one JSON object in which a list has the rows",
    ),
    "MultiLJP": (
        "data_train.json",
        dumped({"fact": FACT, "criminals_info": CRIMINALS}),
        "MultiLJP",
    ),
    "MultiJustice": (
        "train_data3.csv",
        table(
            "index,defendant,defendant_accusation,defendant_judgement,relevant_article,fact",
            *(
                ["0", name, "['抢劫']", quoted(term), "[263.0]", FACT]
                for name, term in WORDS.items()
            ),
        ),
        "a table (CSV)",
    ),
    "LeCaRD": (
        "candidates/1/2.json",
        dumped(
            {
                "ajjbqk": FACT,
                "pjjg": VERDICT,
                "qw": "依照《中华人民共和国刑法》第二百六十三条之规定，判决如下",
            }
        ),
        "LeCaRD",
    ),
}
"""Heading of the page -> the file that its lines read, its content, and what it is called."""


def page(name: str) -> str:
    return (ROOT / "prompts" / name).read_text("utf-8")


@pytest.mark.parametrize("name", ["DATA.md", "DATA.zh.md"])
def test_the_page_has_every_form(name: str) -> None:
    rows = re.findall(r"^\| (`.*?) \| ", page(name), re.MULTILINE)
    told = {form for row in rows for form in re.findall(r"`([a-z0-9-]+)`", row)}
    known = {form for forms in (*FORMS_OF_TASK.values(), *LAST_FORMS.values()) for form in forms}
    assert told >= {OWN, *known}


def test_the_pages_have_the_same_commands_and_names() -> None:
    code = [re.findall(r"```.*?```|`[^`\n]+`", page(name), re.DOTALL) for name in PAGES]
    assert set(code[0]) - {"pyarrow"} == set(code[1]) - {"pyarrow"}


PAGES = ("DATA.md", "DATA.zh.md")


@pytest.mark.parametrize("kind", FILES)
def test_what_is_named_can_be_converted(kind: str, tmp_path: Path) -> None:
    name, content, _ = FILES[kind]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "train.jsonl"
    convert(tmp_path / name, out)
    [made] = Reader(TASK).read(out)
    assert (made.text, made.notes) == (FACT, ())
    if kind == "CAIL2018":  # one defendant a case
        [first, _] = ANSWER["judgments"]
        assert made.answer == {"judgments": [first]}
    else:
        assert made.answer == ANSWER


OTHERS = {
    "DPO": (dumped({"prompt": "甲", "chosen": "乙", "rejected": "丙"}), "preferences"),
    "pandas": (dumped({"id": {"0": 0}, "fact": {"0": "甲"}}), "pandas' JSON by column"),
    "web page": (b"<!DOCTYPE html><html></html>", "a web page"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
    "pretty": (json.dumps(CASE, ensure_ascii=False, indent=2).encode(), "one object over many"),
    "joined": (2 * dumped(CASE), "several objects on a line, as of joined files"),
    "JSONP": (b"var data = " + dumped([CASE]), "JavaScript around JSON (JSONP)"),
    "Label Studio": (
        dumped([{"id": 1, "data": {"text": FACT}, "annotations": []}]),
        "Label Studio",
    ),
    "xlsx": (b"PK\x03\x04\x14\x00", "a ZIP file or an Excel workbook"),
}


@pytest.mark.parametrize("kind", [*FILES, *OTHERS])
@pytest.mark.parametrize("on_bad_row", ["stop", "skip"])
def test_what_a_file_looks_like_is_named(kind: str, on_bad_row: Any, tmp_path: Path) -> None:
    content, name = OTHERS[kind] if kind in OTHERS else FILES[kind][1:]
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(Unreadable) as error:
        list(Reader(TASK, on_bad_row=on_bad_row).read(path))
    said = str(error.value)
    assert said.startswith(f"{path}: is no file of cases: it looks like {name}")
    assert "; panjue convert FILE OUT makes cases of many forms (prompts/DATA.md); a line" in said
    assert 'a line looks like {"id": 0, "fact": "…", "defendants": [' in said
    assert "\n" not in said


@pytest.mark.parametrize("name", sorted(task_folders()))
def test_every_task_shows_what_its_files_look_like(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(FILES["Alpaca"][1])
    if name == "dialogue":  # its cases are folders
        return
    with pytest.raises(Unreadable, match=r"it looks like Alpaca.*; (a line|an example)"):
        list(Reader(load_task(name)).read(path))


def test_a_bad_first_row_of_a_file_of_cases_keeps_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(dumped({**CASE, "id": None, "messages": "role content"}))
    with pytest.raises(UserError, match=r"jsonl:1: 'id' must be"):
        list(Reader(TASK).read(path))


def test_a_column_that_others_have_too_makes_no_other_format(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"instruction": "判断罪名", "input": "", "output": "", **CASE, "defendants": []}
    path.write_bytes(dumped(row))
    with pytest.raises(UserError, match=r"jsonl:1: 'defendants' must list"):
        list(Reader(TASK).read(path))
