"""Mutated rows of all tasks through `check`, `score` and `report`: a line or a result, never more.

The suite mutates a few rows of each task; `make torture` 20,000.
"""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer

from panjue.prompts import cli_scores
from panjue.prompts.example import Example
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, sha256, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, load_task, task_folders
from tests.records import believing, write_answers, write_training

TASKS = list(task_folders())
DEEP: Any = json.loads("[" * 200 + "]" * 200)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 15, 1.5, 8.0, 10**30, float("inf"), float("nan")),
    *("", " ", "0", "1", "264", "nan", "\u200b", "\ud800", "\x00", "甲", "盗窃罪", "甲" * 5000),
    *([], {}, [None], [[]], [""], ["甲", "甲"], {"": {}}, {"name": "甲"}, [{}], DEEP),
)


class Mutator:
    """Changes files of JSON; the same seed makes the same changes."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def mutate_file(self, path: Path) -> None:
        """Mutate a value or a line of a file of JSON, or some of its bytes."""
        text = path.read_text("utf-8")
        kind = self.draw.random()
        if kind < 0.05 or not path.suffix.startswith(".json"):
            path.write_bytes(self.mutated_bytes(text.encode()))
        elif path.suffix == ".jsonl":
            path.write_text(self.mutated_lines(text.splitlines(), kind), "utf-8", newline="\n")
        else:
            path.write_text(json.dumps(self.mutated(json.loads(text))), "utf-8")

    def mutated_bytes(self, raw: bytes) -> bytes:
        place = self.draw.randrange(len(raw) + 1)
        other = self.draw.choice([b"", b"\xff", b"\n", b'"', b"[[", b"\xef\xbb\xbf", b"\x00"])
        return raw[:place] + other + raw[place + self.draw.randrange(3) :]

    def mutated_lines(self, lines: list[str], kind: float) -> str:
        place = self.draw.randrange(len(lines)) if lines else 0
        if kind < 0.1 or not lines:
            line = self.draw.choice(["", "[]", "{}", "null", "7", *lines])
            lines.insert(place, line)
        elif kind < 0.15:
            del lines[place]
        else:
            value = json.loads(lines[place])
            for _ in range(self.draw.choice([1, 1, 1, 2, 5])):
                value = self.mutated(value)
            lines[place] = json.dumps(value)
        return "".join(line + "\n" for line in lines)

    def mutated(self, value: Any) -> Any:
        """Return a value with another one in one of its places, often deep in it."""
        if not isinstance(value, dict | list) or not value or self.draw.random() < 0.1:
            return self.other(value)
        changed = value.copy()
        key = self.draw.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))
        kind = self.draw.random()
        if kind < 0.7:
            changed[key] = self.mutated(changed[key])
        elif kind < 0.8:
            del changed[key]
        elif isinstance(changed, dict):
            changed[self.draw.choice(["", "id", "name", "甲", "\u200bid"])] = changed.pop(key)
        else:
            changed.insert(key, self.draw.choice([changed[key], self.draw.choice(ODD)]))
        return changed

    def other(self, value: Any) -> Any:
        """Return an odd value, or this one in another form."""
        forms = [[value], {"value": value}, str(value), self.draw.choice(ODD)]
        return self.draw.choice([*forms, *[self.draw.choice(ODD)] * 4])


@dataclass
class Answered:
    """A run folder with right answers to a few cases, and a copy that is mutated."""

    task: Task
    name: str
    whole: Path
    copy: Path
    first_id: str = ""

    def place(self, *names: str) -> Path:
        return self.copy.joinpath(*names)

    @property
    def gold(self) -> Path:
        [path] = self.copy.glob("gold*")
        return path

    @property
    def answers(self) -> Path:
        return self.copy / "run/answers/a"

    def restore(self) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.whole, self.copy)

    def files(self) -> dict[str, list[Path]]:
        """Return the files whose rows are mutated, by their kind."""
        submission = self.answers / self.task.data.submission.name
        kinds = {
            "gold": self.gold,
            "submission": submission,
            "replies": self.answers / "completions.jsonl",
            "confidence": self.answers / "confidence.jsonl",
        }
        found = {}
        for kind, path in kinds.items():
            paths = sorted(path.rglob("*.json")) if path.is_dir() else [path]
            if files := list(filter(Path.is_file, paths)):
                found[kind] = files
        return found

    def sign(self) -> None:
        """Write into the records that the files are as they are now."""
        write_manifest(self)
        digest = sha256(self.answers / self.task.data.submission.name)
        path = self.answers / "confidence.jsonl"
        decoding = {
            "calls": 1,
            "unreadable": 0,
            "refusals": [],
            "answered_by": "answered by the model",
            "submission_sha256": digest,
            "confidence_sha256": sha256(path) if path.exists() else None,
        }
        write_json(self.answers / "decode.json", decoding)


def write_manifest(run: Answered) -> None:
    adapter = run.copy / "run/adapter"
    trained = {}
    if adapter.exists():
        trained = {"trained": str(adapter), "trained_sha256": model_sha256(adapter)}
    labels = sha256(run.answers / "labels.json")
    write_answers(run.answers, run.gold, task=run.name, labels_sha256=labels, **trained)


def answered(name: str, folder: Path) -> Answered:
    """Answer cases of a task's sample as gold does."""
    task = load_task(name)
    [sample] = task_folders()[name].glob("sample.*")
    run = Answered(task, name, folder / "whole", folder / "copy")
    run.answers.mkdir(parents=True)
    gold = run.copy / f"gold{'' if sample.is_dir() else sample.suffix}"
    (shutil.copytree if sample.is_dir() else shutil.copy)(sample, gold)
    examples = list(Reader(task).read(gold))
    run.first_id = str(examples[0].id)
    labels = task.ask.labels(examples)
    labels.save(run.answers)
    with task.data.submission.writing(run.answers / task.data.submission.name) as write:
        for example in examples:
            write(task.data.write(example, example.answer or {}))
    write_replies(run, examples)
    if task.answer.fields:
        write_classifier(run, labels)
        write_confidences(run, examples)
    run.sign()
    shutil.copytree(run.copy, run.whole)
    return run


def write_classifier(run: Answered, labels: Labels) -> None:
    """Write a training with a text classifier, on the same cases in another file."""
    answer = run.task.answer
    logits = {}
    for field in answer.fields:
        logits[field] = dict.fromkeys(answer.counts(field, labels.counts), 0.0)
    train = run.copy / f"train{run.gold.suffix}"
    train.write_bytes(run.gold.read_bytes() + b"\n")
    record = {"task": run.name, "train": str(train), "train_sha256": sha256(train)}
    adapter = run.copy / "run/adapter"
    write_training(adapter, believing(run.task, logits), **record)
    labels.save(adapter)


def write_confidences(run: Answered, examples: list[Example]) -> None:
    answer = run.task.answer
    with (run.answers / "confidence.jsonl").open("w", encoding="utf-8") as out:
        for example in examples:
            items = answer.items_of(example.answer or {})
            confidence = [dict.fromkeys(answer.fields, 0.5) for _ in items]
            out.write(dump({"id": example.id, "confidence": confidence}) + "\n")


def write_replies(run: Answered, examples: list[Example]) -> None:
    rest = {"finish": ["stop"], "dropped_sentences": 0}
    with (run.answers / "completions.jsonl").open("w", encoding="utf-8") as out:
        for example in examples:
            calls = list(run.task.training_examples(example))
            for number, question in enumerate(calls):
                call = {"call": number, "question": str(question.id)} if run.task.solve else {}
                row = {"id": example.id, **call, "texts": [run.task.ask.target(question)], **rest}
                out.write(dump(row) + "\n")


def in_one_line(function: Callable[..., None], *words: Any, **more: Any) -> str:
    """Call a command; return the line with which it ends, empty if it succeeds."""
    message = ""
    with redirect_stdout(StringIO()), suppress(typer.Exit):
        try:
            function(*words, **more)
        except UserError as error:
            message = str(error)
    assert "\n" not in message
    return message


def try_commands(run: Answered) -> list[str]:
    scores = run.copy / "s.json"
    return [
        in_one_line(cli_scores.check, run.answers, cases=run.gold, task=None),
        in_one_line(cli_scores.score, run.gold, run.answers, json=scores),
        in_one_line(cli_scores.report, run.answers, gold=None),
        in_one_line(cli_scores.explain, run.answers, run.first_id, person=None),
    ]


def try_mutated(run: Answered, seed: int) -> list[str]:
    mutator = Mutator(seed)
    run.restore()
    run.sign()
    kinds = run.files()
    kind = mutator.draw.choice(["submission", "submission", *kinds])
    mutator.mutate_file(mutator.draw.choice(kinds[kind]))
    if mutator.draw.random() < 0.7:
        run.sign()  # as if the answers had been made so
    return try_commands(run)


def tries(name: str, tmp_path: Path, seeds: range) -> None:
    run = answered(name, tmp_path)
    assert not any(try_commands(run)), "what is whole is clean"
    refused = 0
    for seed in seeds:
        try:
            refused += any(try_mutated(run, seed))
        except Exception as error:
            raise AssertionError(f"{name}: seed {seed}: {type(error).__name__}: {error}") from error
    assert 0 < refused < len(seeds)


@pytest.mark.parametrize("name", TASKS)
def test_a_mutated_row_is_scored_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    tries(name, tmp_path, range(15))


@pytest.mark.endurance
@pytest.mark.parametrize("name", TASKS)
def test_many_mutated_rows_are_scored_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    tries(name, tmp_path, range(20_000 // len(TASKS)))
