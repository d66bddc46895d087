"""What a run leaves works without panjue: bundles in an empty folder, the cards' snippets."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from panjue.eval.card import write_card

PANJUE = str(Path(sys.executable).with_name("panjue"))

pytestmark = pytest.mark.endurance


@pytest.fixture(scope="module")
def run(answered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that an engine of its own answered, with the adapter beside its base."""
    run = tmp_path_factory.mktemp("alone") / "run"
    shutil.copytree(answered, run, ignore=shutil.ignore_patterns("completions.jsonl"))
    words = [f"run={run}", f"trained={run}/adapter", "adapter=lora"]
    command = [PANJUE, "generate", str(answered / "generate.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.promise("a bundle answers by itself")
@pytest.mark.parametrize("weights", ["none", "base", "merged"])
def test_bundles(weights: str, run: Path, workshop: Path, tmp_path: Path, promise: Any) -> None:
    packed = tmp_path / "bundle.zip"
    verify = ["--verify", str(packed), "--cases", str(workshop / "demo/test.jsonl")]
    if weights == "none":
        verify += ["--base", str(workshop / "base/model")]
    with promise.attempt():
        for words in ([str(run), str(packed), "--weights", weights], verify):
            command = [PANJUE, "bundle", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        assert "runs by itself and gives the same answers" in done.stdout


@pytest.mark.promise("the card's snippet for vLLM runs")
@pytest.mark.parametrize("is_merged", [False, True], ids=["adapter", "merged"])
def test_the_snippet(
    is_merged: bool, trained: Path, merged: Path, tmp_path: Path, promise: Any
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(merged if is_merged else trained / "adapter", folder)
    write_card(folder)
    text = (folder / "README.md").read_text("utf-8")
    [snippet] = re.findall(r"^```python\n# plain vLLM\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "snippet.py").write_text(snippet, "utf-8")
    few = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    with promise.attempt():
        done = subprocess.run(
            [sys.executable, tmp_path / "snippet.py"],
            cwd=folder,
            env={**os.environ, **few},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "{" in done.stdout
