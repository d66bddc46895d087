"""What a run leaves works without panjue: bundles in an empty folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PANJUE = str(Path(sys.executable).with_name("panjue"))

pytestmark = pytest.mark.endurance


@pytest.fixture(scope="module")
def run(answered: Path, workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that an engine of its own answered, with the adapter beside its base."""
    run = tmp_path_factory.mktemp("alone") / "run"
    shutil.copytree(answered, run, ignore=shutil.ignore_patterns("answers"))
    panjue("generate", run, workshop / "demo/test.jsonl", "adapter=lora")
    return run


def panjue(*words: object) -> str:
    done = subprocess.run([PANJUE, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_bundle_answers_by_itself(run: Path, workshop: Path, tmp_path: Path) -> None:
    packed = tmp_path / "bundle.zip"
    panjue("bundle", run, packed)
    said = panjue("bundle", "--verify", packed, "--cases", workshop / "demo/test.jsonl")
    assert "runs by itself and gives the same answers" in said
