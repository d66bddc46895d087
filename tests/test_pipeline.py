"""Every task beside judgment goes the whole way: train, answer, hand in, check, score, report."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders

ALIKE = {"judgment", "severity", "scotus", "fscs"}
"""The first is tried at length elsewhere, the others are `ecthr` with one class each."""


@pytest.mark.parametrize("name", [name for name in task_folders() if name not in ALIKE])
def test_the_whole_way(
    name: str,
    workshop: Path,
    tmp_path: Path,
    panjue: Callable[..., CompletedProcess[str]],
    running_engine: list[Path],
) -> None:
    def said(*words: object) -> str:
        done = panjue(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    [sample] = task_folders()[name].glob("sample.*")
    task, run = load_task(name), tmp_path / "run"
    (tmp_path / "empty.yaml").write_text(f"task: {name}\nrun: {run}\n", "utf-8")
    config = tmp_path / "empty.yaml"
    data = (f"train={sample}", f"dev={sample}")
    trained = said(
        "sft", config, f"model={workshop}/base/model", *data,
        "max_tokens=1024", "lora={r: 8, target_modules: all-linear}", "trainer={max_steps: 2}",
    )  # fmt: skip
    assert "refused      0" in trained
    samples = "samples=2" if task.answer.uses_samples else "samples=0"
    told = said("generate", config, f"test={sample}", samples)
    assert running_engine == [run / "merged"]
    assert (run / "merged/model.safetensors").is_file()
    examples = list(Reader(task).read(sample))
    assert re.search(rf"^{len(examples)} examples(?: in \d+ calls)?: ", told, re.MULTILINE), told
    answers = run / "answers/sample"
    assert f"written: {answers / task.data.submission.name}" in told
    assert said("check", run, "--cases", sample, "--task", name).endswith(": clean\n")
    said("score", sample, run, "--task", name, "--json", answers / "scores.json")
    scores = json.loads((answers / "scores.json").read_text("utf-8"))
    assert set(task.score.names) <= scores.keys()
    assert scores["missing"] == 0
    assert scores["baselines"][task.score.fallback] is not None
    said("report", run)
    assert "得分" in (answers / "report.html").read_text("utf-8")
