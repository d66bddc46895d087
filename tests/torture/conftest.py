"""What is disturbed and what is not."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from tempfile import gettempdir
from typing import Any

import pytest
from filelock import FileLock

from panjue.prompts.cli import app
from panjue.prompts.plumbing.files import read_lines
from panjue.prompts.tasks.judgment.demo import write_demo

ENGINE = ("engine.dtype=float32", "engine.max_num_seqs=16", "engine.enforce_eager=true")
"""Exact and small: settings of every generation that is disturbed, and of the one that is not."""

MODEL = "answer=model"
"""The classifier is better than a tiny model, and asks no engine."""

LONGEST_S = 900

RAY = FileLock(Path(gettempdir()) / "panjue-tests-ray.lock")
"""Held by the tests of Ray: `ray=auto` finds any cluster of the machine, `ray stop` ends all."""


class Job:
    """`panjue generate` into answers of its own, which can be disturbed."""

    def __init__(self, run: Path, test: Path, name: str) -> None:
        self.words = ["generate", str(run), str(test), f"answers={name}", MODEL, *ENGINE]
        self.answers = run / "answers" / name
        self.completions = self.answers / "completions.jsonl"
        self._log = run / f"{name}.log"  # a pipe would fill up

    @property
    def rows(self) -> int:
        path = self.completions
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def reasons(self) -> set[str]:
        """Return why the replies that are there ended."""
        return {why for _, row in read_lines(self.completions) for why in row["finish"]}

    @property
    def said(self) -> str:
        """Return what the process that was started last has printed."""
        return self._log.read_text("utf-8")

    def start(self, *words: str, **env: str) -> None:
        command = [str(Path(sys.executable).with_name("panjue")), *self.words, *words]
        with self._log.open("wb") as out:
            self.process = Popen(
                command, stdout=out, stderr=out, env={**os.environ, **env}, start_new_session=True
            )

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for something that comes before the end."""
        began = time.monotonic()
        while not until():
            assert self.process.poll() is None, self.said
            assert time.monotonic() - began < LONGEST_S, self.said
            time.sleep(0.01)

    def end(self) -> None:
        """Wait for the end, which is no error."""
        assert self.process.wait(LONGEST_S) == 0, self.said

    def finish(self, *words: str) -> None:
        self.start(*words)
        self.end()


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Say whether all tries are wanted, and not the quick form."""
    return bool(request.config.getoption("--torture"))


@pytest.fixture(scope="session")
def run(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder whose model has learnt something: seldom are two tokens alike."""
    place = tmp_path_factory.mktemp("tortured") / "run"
    steps = [f"trainer.{name}=150" for name in ("max_steps", "eval_steps", "save_steps")]
    panjue("sft", workshop / "sft.yaml", f"run={place}", *steps)
    return place


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of invented cases."""
    folder = tmp_path_factory.mktemp("cases")
    write_demo(folder, {"test": 400})
    return folder / "test.jsonl"


@pytest.fixture(scope="session")
def once(run: Path, cases: Path) -> Path:
    """Return the folder of answers that nobody disturbed."""
    panjue("generate", run, cases, "answers=once", MODEL, *ENGINE)
    return run / "answers/once"


@pytest.fixture
def job(run: Path, cases: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Return a generation that is killed, if it still runs, when the test ends."""
    prepared = Job(run, cases, request.node.name)
    yield prepared
    prepared.process.kill()


def panjue(*words: object) -> None:
    """Run a command in this process."""
    app([str(word) for word in words], standalone_mode=False)


def rows_of(answers: Path) -> dict[Any, dict[str, Any]]:
    """Return the rows of a folder of answers by id; none is there twice."""
    rows = [row for _, row in read_lines(answers / "completions.jsonl")]
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


def check_same(again: Path, once: Path) -> None:
    """Compare answers with those that nobody disturbed.

    Where two tokens are equally likely, the reply depends on what else is in the batch.
    """
    one = rows_of(once)
    other = rows_of(again)
    assert one.keys() == other.keys()
    differ = {key for key in one if one[key]["texts"] != other[key]["texts"]}
    assert len(differ) <= len(one) / 50 + 1
    handed_in = [(each / "submission.jsonl").read_bytes().splitlines() for each in (once, again)]
    for wanted, made in zip(*handed_in, strict=True):
        assert made == wanted or json.loads(wanted)["id"] in differ
