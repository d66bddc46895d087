"""What is disturbed and what is not; a table of the tries, which a whole green run keeps."""

import json
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from panjue.prompts.cli import app
from panjue.prompts.plumbing.files import read_lines
from panjue.prompts.tasks.judgment.demo import write_demo

HERE = Path(__file__).parent
LAST = HERE / "LAST.md"
BEGAN = time.time()

ENGINE = ("engine.dtype=float32", "engine.max_num_seqs=16", "engine.enforce_eager=true")
"""Exact and small: settings of every generation that is disturbed, and of the one that is not."""

Row = tuple[str, str, str]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what takes minutes to `make torture`."""
    if not config.getoption("--torture"):
        left = [item for item in items if item.get_closest_marker("endurance")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Say whether all tries are wanted, and not the quick form."""
    return bool(request.config.getoption("--torture"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Print the table; keep it in LAST.md where everything was tried and passed."""
    if not config.getoption("--torture"):
        return
    rows = tried(terminalreporter.stats.get("passed", []))
    table = Table("test", "tries", "figures")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    if not is_whole(config):
        return
    if exitstatus or "skipped" in terminalreporter.stats:
        print(f"{LAST.name} stays as it is: something failed or was skipped")
    else:
        LAST.write_text(record(terminalreporter, rows), "utf-8")


def tried(passed: list[pytest.TestReport]) -> list[Row]:
    """Return a row for each test: its tries (one a call, or its property) and its figures."""
    tries: dict[str, int] = defaultdict(int)
    figures: dict[str, list[str]] = defaultdict(list)
    for report in passed:
        name = report.nodeid.rpartition("/")[2].partition("[")[0].replace("::", " ")
        properties = report.user_properties
        tries[name] += sum(int(str(value)) for key, value in properties if key == "tries") or 1
        figures[name] += [str(value) for key, value in properties if key == "figure"]
    return [(name, f"{tries[name]:,}", "; ".join(figures[name])) for name in sorted(tries)]


def is_whole(config: pytest.Config) -> bool:
    """Say whether the whole folder was run."""
    chosen = config.option.keyword or config.option.markexpr or config.option.deselect
    return not chosen and [Path(word).resolve() for word in config.args] == [HERE]


def record(reporter: pytest.TerminalReporter, rows: list[Row]) -> str:
    """Return what LAST.md says of this run."""
    changed = ", ".join(git("status", "--porcelain", "--", f":(top,exclude){LAST}").split("\n"))
    head = [("test", "tries", "figures"), ("---",) * 3]
    lines = [
        "# The last green run of `make torture`",
        "",
        f"Written by the run itself. Commit {git('rev-parse', '--short', 'HEAD')}"
        f"{changed and f' with {changed}'}, {date.today()}, {os.cpu_count()} cores: "
        f"{len(reporter.stats['passed'])} passed in {(time.time() - BEGAN) / 60:.0f} minutes.",
        "",
        *("| " + " | ".join(row) + " |" for row in [*head, *rows]),
    ]
    return "\n".join(lines) + "\n"


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.fixture(scope="session")
def run(
    workshop: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory, request: Any
) -> Path:
    """Return a run folder; for all tries it has learnt something, so that near ties are few."""
    place = tmp_path_factory.mktemp("tortured") / "run"
    if not request.config.getoption("--torture"):
        return Path(shutil.copytree(trained, place))
    steps = [f"trainer.{name}=150" for name in ("max_steps", "eval_steps", "save_steps")]
    panjue("sft", workshop / "sft.yaml", f"run={place}", *steps)
    return place


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    """Return a folder of invented cases: test.jsonl, and train.jsonl, which takes much longer."""
    folder = tmp_path_factory.mktemp("cases")
    few = 400 if request.config.getoption("--torture") else 40
    write_demo(folder, {"train": 4000, "test": few, "base": 1})
    return folder


@pytest.fixture(scope="session")
def once(run: Path, cases: Path, request: pytest.FixtureRequest) -> Path:
    """Return the folder of answers that nobody disturbed."""
    words = ("generate", run, cases / "test.jsonl", "answers=once", *ENGINE)
    if request.config.getoption("--torture"):
        panjue(*words)
    else:
        with request.getfixturevalue("answering")():
            panjue(*words)
    return run / "answers/once"


def panjue(*words: object) -> None:
    """Run a command in this process."""
    app([str(word) for word in words], standalone_mode=False)


@pytest.fixture(scope="session")
def same() -> Callable[[Path, Path], int]:
    """Return what compares answers that were disturbed with those that were not."""
    return check_same


def check_same(again: Path, once: Path) -> int:
    """Compare answers with those that nobody disturbed; return how many rows passed a near tie."""
    one, other = (
        {row["id"]: row for _, row in read_lines(answers / "completions.jsonl")}
        for answers in (once, again)
    )
    lines = (again / "completions.jsonl").read_bytes().count(b"\n")
    assert len(one) == len(other) == lines, "none twice, none lost"
    differ = {key for key in one if one[key]["texts"] != other[key]["texts"]}
    ties = {key for key in one if one[key]["near_ties"] or other[key]["near_ties"]}
    assert differ <= ties, f"{differ - ties} differ without a near tie"
    assert len(ties) < len(one) / 5, "so many ties that nothing is shown"
    handed_in = [(each / "submission.jsonl").read_bytes().splitlines() for each in (once, again)]
    pairs = zip(*handed_in, strict=True)
    assert {json.loads(a)["id"] for a, b in pairs if a != b} <= differ
    return len(ties)
