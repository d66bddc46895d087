"""Hand-made gold files, submissions and run folders."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.plumbing.files import dump

Judgment = tuple[str, list[str], list[str], int]
Write = Callable[[str, Iterable[Mapping[str, Any]]], Path]

# Months of imprisonment of each class that the tests use, 2 (detention) and 14 (nothing) apart.
MONTHS = {5: 180, 8: 48, 10: 24, 11: 12, 13: 6, 14: 0}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes rows to a JSONL file in the test's folder."""

    def to(name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(dump(row) + "\n" for row in rows), "utf-8", newline="\n")
        return path

    return to


def outcome(name: str, charges: list[str], articles: list[str], penalty: int) -> dict[str, Any]:
    judged = {"name": name, "charges": charges, "articles": articles}
    months = {"surveillance": 0, "detention": 0, "imprisonment": MONTHS[penalty]}
    return {**judged, "penalty": {**months, "death_penalty": False, "life_imprisonment": False}}


@pytest.fixture(scope="session")
def case() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a line of a cases file from an id and its judgments."""

    def of(key: int | str, *judgments: Judgment, gold: bool = True) -> dict[str, Any]:
        names = [name for name, *_ in judgments]
        row: dict[str, Any] = {"id": key, "fact": "事实。", "defendants": names}
        if gold:
            row["outcomes"] = [outcome(*judgment) for judgment in judgments]
        return row

    return of


@pytest.fixture(scope="session")
def row() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a line of a submission."""

    def of(key: int | str, *judgments: Judgment) -> dict[str, Any]:
        fields = ("name", "charges", "articles", "penalty")
        return {"id": key, "judgments": [dict(zip(fields, j, strict=True)) for j in judgments]}

    return of
