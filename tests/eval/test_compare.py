"""Two runs side by side: a difference that is known is found, and nothing where there is none."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from panjue.eval.compare import compare_runs
from panjue.prompts.errors import UserError
from panjue.prompts.files import dump, sha256, write_json
from panjue.prompts.labels import Labels
from panjue.prompts.task import load_task

TASK = load_task("judgment")
PANJUE = Path(sys.executable).with_name("panjue")
DAMAGED = 30


@pytest.fixture(scope="module")
def runs(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a run that answers the real dev cases as gold, and its copy, damaged at 30 cases."""
    folder, gold = tmp_path_factory.mktemp("runs"), shared / "drdz/dev.jsonl"
    for name in ("good", "damaged"):
        Labels().save(folder / name)
        made = {"task": "judgment", "test": str(gold), "test_sha256": sha256(gold)}
        write_json(folder / name / "manifest.json", {"generate": made})
        with (folder / name / "submission.jsonl").open("w", encoding="utf-8") as out:
            for number, example in enumerate(TASK.read(gold)):
                row = dict(TASK.gold(example))
                if name == "damaged" and number < DAMAGED:
                    row["judgments"] = [damaged(one) for one in row["judgments"]]
                out.write(dump(row) + "\n")
    return folder / "good", folder / "damaged"


def damaged(judgment: dict[str, Any]) -> dict[str, Any]:
    """Return a judgment without a right charge or article, its penalty right."""
    return {**judgment, "charges": ["不存在罪"], "articles": ["9999"]}


def test_a_known_difference_is_found(runs: tuple[Path, Path], shared: Path) -> None:
    gold = shared / "drdz/dev.jsonl"
    found = compare_runs(TASK, gold, *runs)
    examples = list(TASK.read(gold))
    weights = [TASK.weight(example) for example in examples]
    lost = -0.6 * sum(weights[:DAMAGED]) / sum(weights)
    difference = found.differences["final"]
    # Where gold itself has no label the official F1 is 0 in both runs, and less is lost.
    assert difference.mean == pytest.approx(lost, abs=0.002)
    assert difference.low < lost < difference.high < 0
    assert found.differences["penalty_accuracy"].mean == 0
    assert found.first["final"] + difference.mean == pytest.approx(found.second["final"])
    assert (found.all.won, found.all.lost, found.all.examples) == (0, DAMAGED, 285)
    assert found.is_worse
    for attribute in ("defendants", "class", "penalty"):
        parts = found.where[attribute]
        assert sum(part.lost for part in parts.values()) >= DAMAGED
        changes = [abs(part.mean) * part.examples for part in parts.values()]
        assert changes == sorted(changes, reverse=True)
    back = compare_runs(TASK, gold, *runs[::-1])
    assert back.differences["final"].mean == pytest.approx(-difference.mean)
    assert not back.is_worse


def test_a_run_against_itself_gives_zero(runs: tuple[Path, Path], shared: Path) -> None:
    found = compare_runs(TASK, shared / "drdz/dev.jsonl", runs[1], runs[1])
    assert all((d.mean, d.low, d.high) == (0, 0, 0) for d in found.differences.values())
    assert (found.all.won, found.all.lost) == (0, 0)
    assert not found.is_worse


def test_the_command_gates(runs: tuple[Path, Path], tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"

    def compare(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(PANJUE), "compare", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = compare(*runs, "--json", numbers)
    assert done.returncode == 0, done.stderr
    assert "final: 0 examples won, 30 lost, 255 alike" in done.stdout
    assert "final by class" in done.stdout
    assert json.loads(numbers.read_text("utf-8"))["all"]["lost"] == DAMAGED
    assert compare(*runs, "--fail-if-worse").returncode == 1
    assert compare(runs[1], runs[0], "--fail-if-worse").returncode == 0
    assert compare(runs[0], tmp_path).returncode == 2


def test_runs_of_other_cases_are_no_peers(
    runs: tuple[Path, Path], tmp_path: Path, shared: Path
) -> None:
    lines = (runs[0] / "submission.jsonl").read_text("utf-8").splitlines()
    part = tmp_path / "part.jsonl"
    part.write_text("\n".join(lines[:100]) + "\n", "utf-8")
    for pair in ((runs[0], part), (part, runs[0])):
        with pytest.raises(UserError, match=r"part.jsonl: has no row for id .* no fair peer"):
            compare_runs(TASK, shared / "drdz/dev.jsonl", *pair)
