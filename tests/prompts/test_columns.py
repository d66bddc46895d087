"""Own names of columns: a file with them is the same file, for every task."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.prompts.columns import answer_column, check_columns, known_columns
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from tests.records import write_answers

Panjue = Callable[..., CompletedProcess[str]]

OUTER = ("data", "paragraphs", "qas")
"""Keys of the files of `reading` that hold its rows, and are no columns."""


def sample_of(name: str) -> Path:
    [sample] = task_folders()[name].glob("sample.*")
    return sample


def with_names(value: Any, columns: Mapping[str, str], prefix: str = "") -> Any:
    """Return a row, or what has rows, with a user's names."""
    if isinstance(value, list):
        return [with_names(one, columns, prefix) for one in value]
    if not isinstance(value, dict):
        return value
    renamed = {}
    for key, inner in value.items():
        below = f"{prefix}{key}/" if isinstance(inner, list) and key not in OUTER else prefix
        is_list = isinstance(inner, list)
        name = columns.get(f"{prefix}{key}", key)
        renamed[name] = with_names(inner, columns, below) if is_list else inner
    return renamed


def renamed_sample(name: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """Return the sample of a task in which all columns have other names, and these."""
    sample = sample_of(name)
    copy = folder / sample.name
    known = [column for column in known_columns(load_task(name).data) if column != "groups"]
    if name == "dialogue":  # a row is two files: its columns are those of the sentences
        known = [column for column in known if column.startswith("chat/")]
    columns = {column: f"列 {number}" for number, column in enumerate(known)}
    if sample.is_dir():
        shutil.copytree(sample, copy)
        in_chat = {column.removeprefix("chat/"): given for column, given in columns.items()}
        for file in (copy / "chat").iterdir():
            rows = with_names(json.loads(file.read_text("utf-8")), in_chat)
            file.write_text(dump(rows), "utf-8")
    elif sample.suffix == ".json":
        copy.write_text(dump(with_names(json.loads(sample.read_text("utf-8")), columns)), "utf-8")
    else:
        rows = map(json.loads, sample.read_text("utf-8").splitlines())
        copy.write_text("".join(dump(with_names(row, columns)) + "\n" for row in rows), "utf-8")
    return copy, columns


@pytest.mark.parametrize("name", task_folders())
def test_a_file_with_own_names_gives_the_same_examples(name: str, tmp_path: Path) -> None:
    task = load_task(name)
    file, columns = renamed_sample(name, tmp_path)
    check_columns(task.data, columns)
    plain = list(Reader(task).read(sample_of(name)))
    renamed = list(Reader(task, columns=columns).read(file))
    assert renamed == plain
    assert columns, "every task has columns that can be named"
    with pytest.raises(UserError, match="columns"):
        list(Reader(task, columns=columns).read(sample_of(name)))


@pytest.mark.parametrize("command", ["score", "check"])
@pytest.mark.parametrize("name", task_folders())
def test_score_and_check_read_own_names(
    command: str, name: str, panjue: Panjue, tmp_path: Path
) -> None:
    task = load_task(name)
    file, columns = renamed_sample(name, tmp_path / "own" if name != "dialogue" else tmp_path)
    examples = list(Reader(task).read(sample_of(name)))
    submission = tmp_path / "alone" / task.data.submission.name
    submission.parent.mkdir()
    with task.data.submission.writing(submission) as write:
        for example in examples:
            assert example.answer is not None
            write(json.loads(dump(task.data.write(example, example.answer))))
    words = [word for name, given in columns.items() for word in ("--columns", f"{name}={given}")]

    def of(cases: Path, *further: str) -> tuple[int, str]:
        order = [cases, submission] if command == "score" else [submission, "--cases", cases]
        done = panjue(command, *order, "--task", name, *further)
        return done.returncode, done.stdout + done.stderr

    plain = of(sample_of(name))
    assert plain[0] == 0
    assert of(file, *words) == plain
    assert of(file)[0] == 2
    folder = tmp_path / "run"  # and from the record of answers
    shutil.copytree(submission.parent, folder)
    task.ask.labels(examples).save(folder)
    write_answers(folder, file, task=name, columns=columns)
    order = [file, folder] if command == "score" else [folder, "--cases", file]
    done = panjue(command, *order)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()


ROW = {"uid": 7, "content": "被告人赵某窃走电动车。", "标签": 1}
COLUMNS = {"id": "uid", "fact": "content", "label": "标签"}


def read(row: Mapping[str, Any], folder: Path, columns: Mapping[str, str], task: str) -> Any:
    path = folder / "cases.jsonl"
    path.write_text(dump(row), "utf-8")
    return next(Reader(load_task(task), columns=columns).read(path))


def test_a_row_without_answer_needs_no_column_for_it(tmp_path: Path) -> None:
    row = {"uid": 7, "content": "某案"}
    example = read(row, tmp_path, COLUMNS, "severity")
    assert (example.id, example.text, example.answer) == (7, "某案", None)
    number = read({"content": "某案"}, tmp_path, {"fact": "content"}, "severity")
    assert number.id == 1, "FairLex's rows have no ids"


@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        (ROW, {}, "'fact' must be a text that is not empty; the row has uid, content, 标签; "),
        (ROW, {"fact": "body"}, "has no column 'body' (columns.fact), but uid, content, 标签"),
        (
            {**ROW, "fact": "某案"},
            {"fact": "body"},
            "has no column 'body' (columns.fact), but uid, content, 标签, fact",
        ),
        (
            ROW,
            {**COLUMNS, "gender": "性别"},
            "has no column '性别' (columns.gender), but uid, content, 标签",
        ),
        (
            {**ROW, "fact": "某案"},
            COLUMNS,
            "has the columns 'content' (columns.fact) and 'fact'; leave out one of them",
        ),
    ],
)
def test_a_column_that_is_not_there_names_those_that_are(
    row: dict[str, Any], columns: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        read(row, tmp_path, columns, "severity")
    assert str(error.value).startswith(f"{tmp_path}/cases.jsonl:1: {said}")


def test_the_way_out_is_the_setting(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"say columns\.fact=COLUMN \(score and check: --columns fact=COLUMN\)$"
    ):
        read(ROW, tmp_path, {}, "severity")
    with pytest.raises(UserError, match=r"columns\.id=COLUMN"):
        read({"uid": 1, "fact": "某案"}, tmp_path, {}, "judgment")


def test_the_way_out_of_a_list_of_objects_is_the_setting_too(tmp_path: Path) -> None:
    penalty = {"surveillance": 0, "detention": 0, "imprisonment": 9}
    penalty |= {"death_penalty": False, "life_imprisonment": False}
    outcome = {"姓名": "张某", "罪名": ["盗窃罪"], "法条": ["264"], "刑期": penalty}
    row = {"id": 1, "fact": "张某盗窃。", "defendants": ["张某"], "outcomes": [outcome]}
    columns: dict[str, str] = {}
    for name, given in zip(("name", "charges", "articles", "penalty"), outcome, strict=True):
        with pytest.raises(UserError) as error:
            read(row, tmp_path, columns, "judgment")
        ours = f"columns.outcomes/{name}=COLUMN"
        assert "; an object in 'outcomes' has " in str(error.value)
        assert given in str(error.value)
        assert f"; say {ours} (score and check: " in str(error.value)
        columns[f"outcomes/{name}"] = given
    assert read(row, tmp_path, columns, "judgment").answer is not None


def test_names_can_be_swapped_and_null_is_no_column(tmp_path: Path) -> None:
    row = {"id": 3, "label": "某案", "text": 1}
    swapped = read(row, tmp_path, {"text": "label", "label": "text"}, "fscs")
    assert (swapped.text, swapped.answer) == ("某案", {"label": "approval"})
    null = read({"id": 3, "text": None, "content": "某案"}, tmp_path, {"text": "content"}, "fscs")
    assert null.text == "某案"


def test_a_bad_row_is_skipped_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{dump(ROW)}\n{dump({'uid': 8, 'body': '某案', '标签': 0})}\n", "utf-8")
    reader = Reader(load_task("severity"), columns=COLUMNS, on_bad_row="skip")
    assert [example.id for example in reader.read(path)] == [7]
    assert list(reader.skipped.rows.values()) == [
        "has no column 'content' (columns.fact), but uid, body, 标签"
    ]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"facts": "content"}, "columns.facts: the task has no such column; did you mean 'fact'?"),
        ({"outcomes/charge": "罪名"}, "did you mean 'outcomes/charges'?"),
        ({"id": "a", "fact": "a"}, "columns: 'a' is named 2 times; one column has one meaning"),
    ],
)
def test_a_name_that_no_column_has_is_refused(columns: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as error:
        check_columns(load_task("judgment").data, columns)
    assert said in str(error.value)


def test_a_task_without_a_sample_takes_any_name() -> None:
    data = replace(load_task("judgment").data)
    unknown = replace(data, write=lambda _example, _answer: {})
    check_columns(unknown, {"facts": "content"})


def test_a_column_may_have_our_name_which_takes_another_back(tmp_path: Path) -> None:
    row = {"id": 1, "content": "他案", "fact": "某案"}
    assert read(row, tmp_path, {"fact": "fact"}, "severity").text == "某案"


def test_the_column_of_the_answer_is_known() -> None:
    found = {name: answer_column(load_task(name).data) for name in task_folders()}
    assert found == {
        **dict.fromkeys(("fscs", "scotus", "severity"), "label"),
        **{"judgment": "outcomes", "ecthr": "labels", "cloze": "answer", "reading": "answers"},
        "dialogue": "",
    }


@pytest.mark.parametrize("words", [["fact"], ["=content"], ["fact="]])
def test_words_of_columns_have_a_name_and_a_column(
    words: list[str], panjue: Panjue, tmp_path: Path
) -> None:
    sample = sample_of("judgment")
    (tmp_path / "submission.jsonl").touch()
    done = panjue("score", sample, tmp_path / "submission.jsonl", "--columns", *words)
    assert (done.returncode, "say NAME=COLUMN" in done.stderr) == (2, True)
