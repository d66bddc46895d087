"""Promises and how often they were put to the test: a table at the end of the run."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from panjue.eval.decoding import decode_answers
from panjue.finetune.sft import main as sft
from panjue.prompts.plumbing.files import read_lines
from panjue.prompts.tasks.judgment.demo import write_demo
from panjue.serve.generate import main

CONFIG = """
generate:
  answers: test
  engine: {dtype: float32, max_num_seqs: 16, enforce_eager: true}
"""
"""A run of generation that is disturbed, and of the same without a disturbance."""

TRIED: dict[str, "Promise"] = {}

HERE = Path(__file__).parent
LAST = HERE / "LAST.md"
BEGAN = time.time()


@dataclass
class Promise:
    """One promise, over all tests that try it."""

    tries: int = 0
    failures: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count a try; one that fails is noted, and the next ones are made all the same."""
        self.tries += 1
        try:
            yield
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def tell(self, text: str) -> None:
        """Add a figure to the table."""
        self.told.append(text)

    def add(self, other: "Promise") -> None:
        """Add what another process tried."""
        self.tries += other.tries
        self.failures += other.failures
        self.told += other.told

    def cells(self) -> tuple[str, str, str]:
        """Return its row of the table behind its name."""
        return f"{self.tries:,}", str(len(self.failures)), "; ".join(self.told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what takes minutes to `make torture`."""
    if not config.getoption("--torture"):
        left = [item for item in items if item.get_closest_marker("endurance")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture
def promise(request: pytest.FixtureRequest) -> Iterator[Promise]:
    """Return the promise that the test's marker `promise("…")` names; it fails with its tries."""
    [name] = request.node.get_closest_marker("promise").args
    promise = TRIED.setdefault(name, Promise())
    before = len(promise.failures)
    yield promise
    assert promise.failures[before:] == []


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Say whether all tries are wanted, and not the quick form."""
    return bool(request.config.getoption("--torture"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what was tried to the process that prints it: `make torture` has two that try."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tried"] = {name: asdict(p) for name, p in TRIED.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what the processes tried."""
    for name, fields in getattr(node, "workeroutput", {}).get("tried", {}).items():
        TRIED.setdefault(name, Promise()).add(Promise(**fields))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Print the table; keep it in LAST.md where everything was tried and held."""
    table = Table("promise", "tries", "failures", "figures")
    for name, promise in TRIED.items():
        table.add_row(name, *promise.cells())
    if TRIED:
        console = Console(width=140)
        console.print()
        console.print(table)
        for name, promise in TRIED.items():
            for failure in promise.failures[:5]:
                console.print(f"{name}: {failure[:500]}", markup=False, highlight=False)
    if not (config.getoption("--torture") and is_whole(config)):
        return
    if exitstatus or "skipped" in terminalreporter.stats:
        print(f"{LAST.name} stays as it is: something failed or was skipped")
    else:
        LAST.write_text(record(terminalreporter), "utf-8")


def is_whole(config: pytest.Config) -> bool:
    """Say whether the whole folder was run."""
    chosen = config.option.keyword or config.option.markexpr or config.option.deselect
    return not chosen and [Path(word).resolve() for word in config.args] == [HERE]


def record(reporter: pytest.TerminalReporter) -> str:
    """Return what LAST.md says of this run."""
    commit = git("rev-parse", "--short", "HEAD")
    changed = ", ".join(
        git("status", "--porcelain", "--", ":(top,exclude)tests/torture/LAST.md").split("\n")
    ).strip()
    minutes = (time.time() - BEGAN) / 60
    rows = [("promise", "tries", "failures", "figures"), ("---",) * 4]
    rows += [(name, *promise.cells()) for name, promise in sorted(TRIED.items())]
    lines = [
        "# The last green run of `make torture`",
        "",
        f"Written by the run itself. Commit {commit}{changed and f' with {changed}'}, "
        f"{date.today()}, {os.cpu_count()} cores: {len(reporter.stats['passed'])} passed in "
        f"{minutes:.0f} minutes.",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.fixture(scope="session")
def adapter(
    workshop: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory, request: Any
) -> Path:
    """Return a tiny adapter; for all tries one that has learnt something, so that ties are few."""
    if not request.config.getoption("--torture"):
        return trained / "adapter"
    run = tmp_path_factory.mktemp("longer") / "run"
    steps = ["trainer.max_steps=150", "trainer.eval_steps=150", "trainer.save_steps=150"]
    sft(workshop / "sft.yaml", [f"run={run}", *steps])
    return run / "adapter"


@pytest.fixture(scope="session")
def make(adapter: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Any:
    """Return what makes a run folder with the adapter and the file `cases.jsonl` to answer."""
    folder = tmp_path_factory.mktemp("kills")
    cases = 400 if request.config.getoption("--torture") else 40
    write_demo(folder / "demo", {"train": 4000, "test": cases, "base": 1})

    def run(name: str, test: str = "test") -> Path:
        shutil.copytree(adapter, folder / name / "adapter")
        (folder / name / "config.yaml").write_text(CONFIG, "utf-8")
        shutil.copy(folder / f"demo/{test}.jsonl", folder / name / "cases.jsonl")
        return folder / name

    return run


@pytest.fixture(scope="session")
def once(make: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    """Return the folder of a run that nobody disturbed."""
    run = make("once")
    if request.config.getoption("--torture"):
        panjue = str(Path(sys.executable).with_name("panjue"))
        subprocess.run([panjue, "generate", run, run / "cases.jsonl"], check=True, timeout=600)
    else:
        with request.getfixturevalue("answering")():
            decode_answers(main(run, run / "cases.jsonl"))
    return run / "answers/test"


@pytest.fixture(scope="session")
def same() -> Callable[[Path, Path], int]:
    """Return what holds a run that was disturbed to one that was not."""
    return check_same


def check_same(again: Path, once: Path) -> int:
    """Hold a run that was disturbed to one that was not; return how many rows passed a near tie."""
    one, other = (
        {row["id"]: row for _, row in read_lines(run / "completions.jsonl")}
        for run in (once, again)
    )
    assert len(one) == len(other) == (again / "completions.jsonl").read_bytes().count(b"\n"), (
        "none twice, none lost"
    )
    differ = {key for key in one if one[key]["texts"] != other[key]["texts"]}
    ties = {key for key in one if one[key]["near_ties"] or other[key]["near_ties"]}
    assert differ <= ties, f"{differ - ties} differ without a near tie"
    assert len(ties) < len(one) / 5, "so many ties that nothing is shown"
    handed_in = [(run / "submission.jsonl").read_bytes().splitlines() for run in (once, again)]
    pairs = zip(*handed_in, strict=True)
    assert {json.loads(a)["id"] for a, b in pairs if a != b} <= differ
    return len(ties)
