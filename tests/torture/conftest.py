"""Promises and how often they were put to the test: a table at the end of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from rich.console import Console
from rich.table import Table

TRIED: dict[str, "Promise"] = {}


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


def pytest_terminal_summary() -> None:
    """Print the table."""
    table = Table("promise", "tries", "failures", "figures")
    for name, promise in TRIED.items():
        table.add_row(
            name, f"{promise.tries:,}", str(len(promise.failures)), "; ".join(promise.told)
        )
    if TRIED:
        console = Console(width=140)
        console.print()
        console.print(table)
        for name, promise in TRIED.items():
            for failure in promise.failures[:5]:
                console.print(f"{name}: {failure[:500]}", markup=False, highlight=False)
