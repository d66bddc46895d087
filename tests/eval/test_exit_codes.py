"""Each command that reads answers, on those of each task: right ones, cut ones, other cases'."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from tests.records import Row, Write, write_answers

Panjue = Callable[..., CompletedProcess[str]]

CODES = {
    "score": (0, 2, 2),
    "check": (0, 1, 1),  # 2 where the answers are one JSON, of which no row can be read
    "report": (0, 2, 2),
    "fairness": (0, 2, 2),
    "compare": (0, 2, 2),
}
"""Command -> its exit codes on right answers, on a file that is cut, on answers to other cases."""


def sample_of(name: str) -> Path:
    [sample] = task_folders()[name].glob("sample.*")
    return sample


def answered_run(name: str, folder: Path, kind: str) -> Path:
    """Return a run of a task that answers its sample as gold does; then `kind` happens to it."""
    task, sample = load_task(name), sample_of(name)
    examples = list(Reader(task).read(sample))
    task.ask.labels(examples).save(folder)
    write_answers(folder, sample, task=name)
    (folder / "completions.jsonl").touch()
    submission = folder / task.data.submission.name
    with task.data.submission.writing(submission) as write:
        for example in examples:
            assert example.answer is not None
            row: dict[str, Any] = json.loads(dump(task.data.write(example, example.answer)))
            if kind == "foreign":
                row["id"] = type(row["id"])(f"9{row['id']}")
            write(row)
    if kind == "damaged":
        files = [path for path in (submission, *submission.rglob("*")) if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-4])
    return folder


@pytest.mark.parametrize("kind", ["gold", "damaged", "foreign"])
@pytest.mark.parametrize("name", sorted(task_folders()))
@pytest.mark.parametrize("command", CODES)
def test_every_command_on_answers_of_every_task(
    command: str, name: str, kind: str, panjue: Panjue, tmp_path: Path
) -> None:
    sample = sample_of(name)
    run = answered_run(name, tmp_path / kind, kind)
    groups = tmp_path / "groups.jsonl"
    examples = Reader(load_task(name)).read(sample)
    groups.write_text("".join(dump({"id": e.id, "g": "a"}) + "\n" for e in examples), "utf-8")
    words: dict[str, list[object]] = {
        "score": [sample, run],
        "check": [run, "--cases", sample],
        "report": [run],
        "fairness": [sample, run, "--by", "g", "--groups", groups],
        "compare": [answered_run(name, tmp_path / "right", "gold"), run],
    }
    done = panjue(command, *words[command])
    line = (done.stdout + done.stderr).splitlines()[0]
    expected = CODES[command][["gold", "damaged", "foreign"].index(kind)]
    is_one_json = load_task(name).data.submission.name.endswith(".json")
    if (command, kind) == ("check", "damaged") and is_one_json:
        expected = 2
    assert done.returncode == expected, line
    if expected == 2:
        assert line.startswith(f"panjue: {tmp_path}/{kind}"), "the answers at fault"
    elif expected == 1:
        assert line.startswith(f"{tmp_path}/{kind}/submission")


HOSTILE = "\x1b[2J\x9b31m\u202e"
"""An id that clears the screen, colours what follows and turns it around."""


@pytest.mark.parametrize(
    "words",
    [
        "decode RUN",
        "check RUN --cases GOLD",
        "check RUN --cases OTHER",
        "score GOLD RUN",
        "fairness GOLD RUN --by court --groups GROUPS",
        "check BAD --cases GOLD",
        "compare RUN RIGHT",
    ],
)
def test_an_id_that_a_terminal_would_act_on_is_shown(
    words: str, case: Row, write: Write, tmp_path: Path, panjue: Panjue
) -> None:
    person = ("甲", ["盗窃罪"], ["264"], 8)
    hostile = case(HOSTILE, person)
    places = {
        "GOLD": write("gold.jsonl", [hostile]),
        "OTHER": write("other.jsonl", [hostile, {**hostile, "id": f"{HOSTILE}2"}]),
        "GROUPS": write("groups.jsonl", [{"id": HOSTILE, "court": HOSTILE}]),
        "BAD": write("bad.jsonl", [{"id": HOSTILE, "judgments": [{"name": HOSTILE}]}]),
        "RUN": write("run/completions.jsonl", [{"id": HOSTILE, "refused": "too long"}]).parent,
    }
    right = {"id": HOSTILE, "judgments": [{"name": "甲", "charges": ["盗窃罪"], "penalty": 8}]}
    places["RIGHT"] = write("right/submission.jsonl", [right]).parent
    for run in (places["RUN"], places["RIGHT"]):
        write_answers(run, places["GOLD"])
        Labels().save(run)
    assert panjue("decode", places["RUN"]).returncode == 0
    done = panjue(*(places.get(word, word) for word in words.split()))
    said = done.stdout + done.stderr
    assert r"\x1b[2J" in said
    assert not {"\x1b", "\x9b", "\u202e"} & set(said)
