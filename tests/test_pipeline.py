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
    task, run, config = load_task(name), tmp_path / "run", tmp_path / "config.yaml"
    config.write_text(f"sft: {{task: {name}, run: {run}}}\n", "utf-8")
    data = [f"model={workshop}/base/model", f"train={sample}", "trainer.eval_strategy=no"]
    if sample.suffix == ".json":  # it has one text, which would be held out
        other = tmp_path / "other.json"
        other.write_text(sample.read_text("utf-8").replace("。", "！"), "utf-8")
        data = [data[0], f"train={other}", f"dev={sample}"]
    small = ("max_tokens=2048", "lora={r: 8, target_modules: all-linear}", "trainer.max_steps=2")
    assert "refused      0" in said("sft", config, *data, *small)
    samples = "samples=2" if task.ranking else "samples=0"
    printed = said("generate", run, sample, samples, "answer=model")
    assert running_engine == [run / "merged"]
    assert (run / "merged/model.safetensors").is_file()
    examples, answers = list(Reader(task).read(sample)), run / "answers/sample"
    assert re.search(rf"^{len(examples)} examples(?: in \d+ calls)?: ", printed, re.MULTILINE)
    assert f"written: {answers / task.data.submission.name}" in printed
    assert said("check", run, "--cases", sample).endswith(": clean\n")
    said("score", sample, run, "--json", answers / "scores.json")
    scores = json.loads((answers / "scores.json").read_text("utf-8"))
    assert set(task.score.names) <= scores.keys()
    assert scores["missing"] == 0
    assert scores["baselines"][task.score.fallback] is not None
    said("report", run)
    assert "得分" in (answers / "report.html").read_text("utf-8")
