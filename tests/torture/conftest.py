"""Promises and how often they were put to the test: a table at the end of the run."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

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
