"""`make gpu` works: each of its stages, here on the processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOUR = Path(__file__).with_name("hour.py")


@pytest.mark.endurance
@pytest.mark.parametrize("stage", ["training", "step", "parity", "speed", "kills"])
def test_a_stage_passes_and_its_figures_are_in_the_table(
    stage: str, workshop: Path, tmp_path: Path
) -> None:
    options = {
        "--stage": stage,
        "--folder": tmp_path,
        "--cases": workshop / "demo",
        "--tiny": workshop / "base/model",
    }
    words = [str(word) for option in options.items() for word in option]
    environment = {**os.environ, "PYTHONPATH": str(HOUR.parents[2])}
    command = [sys.executable, str(HOUR), "--quick", *words]
    done = subprocess.run(command, check=False, env=environment)
    table = (tmp_path / "RESULT.md").read_text("utf-8")
    assert done.returncode == 0, table
    assert f"| {stage} | yes |" in table
