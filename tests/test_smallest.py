"""examples/smallest.py does what `panjue sft`, `generate` and `score` do."""

import runpy
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from panjue.prompts.plumbing.files import read_json, read_lines
from tests.conftest import ROOT

LOOP = ROOT / "examples/smallest.py"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of vLLM, at its start
def test_it_trains_answers_and_scores_as_the_commands_do(
    workshop: Path, tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    base = workshop / "base/model"
    train = workshop / "demo/train.jsonl"
    test = workshop / "demo/test.jsonl"
    run = tmp_path / "run"
    scores = tmp_path / "scores.json"
    config = ROOT / "finetune/configs/demo.yaml"
    data = (f"model={base}", f"train={train}", f"run={run}")
    for words in (
        ("sft", config, *data, "trainer.logging_steps=1"),
        ("generate", run, test, "answer=model"),
        ("score", test, run, "--json", scores),
    ):
        done = panjue(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    log = [row for _, row in read_lines(run / "log.jsonl") if "loss" in row]
    submission = [row for _, row in read_lines(run / "answers/test/submission.jsonl")]

    losses, metrics = runpy.run_path(str(LOOP))["main"](str(base), train, test, tmp_path)

    assert losses == pytest.approx([row["loss"] for row in log], abs=1e-5)
    assert [row for _, row in read_lines(tmp_path / "submission.jsonl")] == submission
    of_panjue = read_json(scores)
    assert metrics == {name: of_panjue[name] for name in metrics}
