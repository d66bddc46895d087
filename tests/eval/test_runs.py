"""`panjue runs`: every run folder is in the table, or named below it with the reason."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.eval.runs import list_runs
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, sha256, write_json
from panjue.prompts.plumbing.records import TrainingSummary
from tests.records import ANSWERED, TRAINED

Panjue = Callable[..., CompletedProcess[str]]


def make_run(folder: Path, **summary: Any) -> None:
    """Write a finished training, as far as the table reads it."""
    Labels({"charges": {"盗窃罪": 2}}).save(folder / "adapter")
    digest = sha256(folder / "adapter/labels.json")
    record = {**TRAINED, "base": "Qwen/Qwen3-8B"}
    write_json(folder / "manifest.json", record)
    finished = {**record, "examples": 1234, "labels_sha256": digest}
    write_json(folder / "adapter/manifest.json", finished)
    (folder / "adapter/adapter_model.safetensors").touch()
    write_json(folder / "training.json", TrainingSummary(**summary).model_dump())
    if "steps" in summary:
        entry = {"step": summary["steps"], "eval_loss": summary["held_out_loss"]}
        (folder / "log.jsonl").write_text(dump(entry), "utf-8")


def add_answers(folder: Path, name: str, final: float | None, **more: Any) -> None:
    """Write the record of answers to a test file and their scores, as far as the table reads."""
    answers = folder / "answers" / name
    Labels().save(answers)
    trained = {"trained": "adapter", "trained_sha256": model_sha256(folder / "adapter")}
    files = {"test": f"/data/{name}.jsonl", "test_sha256": ""}
    write_json(answers / "manifest.json", {**ANSWERED, **trained, **files, **more})
    if final is not None:
        interval = {"final": [final - 0.01, final + 0.01]}
        submission = answers / "submission.jsonl"
        submission.write_text("{}\n", "utf-8")
        of_it = {"submission_sha256": sha256(submission), "examples": 9}
        write_json(answers / "scores.json", {"final": final, **of_it, "interval": interval})


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Return a folder with seven runs, one that is unfinished, and two that are broken."""
    runs = tmp_path / "runs"
    for number in range(7):
        make_run(
            runs / f"run{number}",
            steps=100 + number,
            kept_step=100 + number,
            held_out_loss=0.5 + number / 100,
            finished=f"2026-11-0{number + 1}",
        )
    add_answers(runs / "run0", "dev", 0.548)
    add_answers(runs / "run0", "held-out", None, held_out=True)
    add_answers(runs / "run0", "test", None)
    make_run(runs / "unfinished")
    shutil.rmtree(runs / "unfinished/adapter")
    (runs / "unfinished/log.jsonl").write_text('{"step": 60, "seconds": 5, "loss": 1}\n', "utf-8")
    make_run(runs / "broken")
    (runs / "broken/adapter/adapter_model.safetensors").unlink()
    make_run(runs / "torn")
    (runs / "torn/adapter/manifest.json").write_text('{"task":', "utf-8")
    (runs / "notes").mkdir()
    (runs / "notes/log.txt").write_text("somebody's", "utf-8")
    return runs


def test_ten_runs_two_of_them_broken(ten: Path, panjue: Panjue) -> None:
    done = panjue("runs", ten)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    table = [line.split() for line in lines]
    assert table[0][:4] == ["run", "base", "method", "examples"]
    first, dev, test, second = table[1:5]
    assert first == ["run0", "Qwen3-8B", "lora", "1234", "100", "0.5000", "2026-11-01"]
    assert dev == ["dev", "0.548", "(0.538-0.558)"]
    assert test == ["test", "not", "scored"]
    assert second[0] == "run1"
    assert [line[0] for line in table[4:10]] == [f"run{number}" for number in range(1, 7)]
    assert lines[10:] == [
        "broken: broken: adapter/ has no weights",
        f"torn: broken: {ten}/torn/adapter/manifest.json: not JSON: "
        "Expecting value: column 9 (char 8)",
        "unfinished: unfinished, at step 60; the command that began it resumes",
    ]
    one = panjue("runs", ten / "run0").stdout.splitlines()
    assert one[1:] == lines[1:4]


def score_of(run: Path, name: str) -> str:
    [listed] = list_runs(run).runs
    return dict(listed.scores)[name]


def test_scores_of_another_submission_or_of_some_cases_do_not_count(ten: Path) -> None:
    """Somebody edits a submission after it was scored; three of nine cases were scored."""
    answers = ten / "run0/answers/dev"
    write_json(answers / "decode.json", {"examples": 9})
    assert score_of(ten / "run0", "dev") == "0.548 (0.538-0.558)"
    write_json(answers / "decode.json", {"examples": 200})
    assert score_of(ten / "run0", "dev") == "not scored"
    write_json(answers / "decode.json", {"examples": 9})
    (answers / "submission.jsonl").write_text("{ }\n", "utf-8")
    assert score_of(ten / "run0", "dev") == "not scored"


@pytest.mark.parametrize("of_one", [{"examples": 1}, {"examples": 9, "counted": 1}])
def test_a_score_of_one_case_has_no_interval(ten: Path, of_one: dict[str, int]) -> None:
    """Versions before 0.5 wrote one."""
    path = ten / "run0/answers/dev/scores.json"
    write_json(path, {**read_json(path), **of_one})
    assert score_of(ten / "run0", "dev") == "0.548"


def test_a_score_of_another_step_than_the_chosen_one_says_so(ten: Path) -> None:
    run = ten / "run0"
    kept = run / "kept/step-50"
    shutil.copytree(run / "adapter", kept)
    (kept / "adapter_model.safetensors").write_text("others")
    of = {"metrics": {"final": 0.5}, "sha256": model_sha256(kept), "step": 50, "loss": 0.6}
    best = {"answer": {"candidate": "kept/step-50", "metric": "final", "less_first": {}}}
    choice = {"candidates": {"kept/step-50": of}, "best": best, "cases": 9, "counted": 9}
    write_json(run / "chosen.json", choice)
    assert score_of(run, "dev (step 100)") == "0.548 (0.538-0.558)"


def test_what_is_no_longer_that_training_s_is_named(ten: Path) -> None:
    for name in ("0", "1"):  # all the others
        shutil.copytree(ten / "run0", ten.parent / name)
    config = ten.parent / "0/adapter/adapter_config.json"
    config.write_text("{}", "utf-8")
    (ten.parent / "1/adapter/labels.json").write_text("{}", "utf-8")
    (ten.parent / "1/answers/dev/scores.json").write_text("[]", "utf-8")
    changed = list_runs(ten.parent / "0")
    [run] = changed.runs
    assert run.scores == []
    assert len(changed.problems) == 2
    assert all("is not the training that gave" in line for line in changed.problems)
    broken = list_runs(ten.parent / "1")
    assert broken.problems == ["1: broken: adapter/labels.json was changed"]


def test_a_run_of_version_0_4_is_listed(tmp_path: Path) -> None:
    run = tmp_path / "old"
    shutil.copytree(Path(__file__).parents[1] / "version_0_4/run", run)
    os.utime(run / "adapter/manifest.json", (0, 1_700_000_000))
    [listed] = list_runs(run).runs
    assert [name for name, _ in listed.scores] == ["model", "test"]
    assert listed.date == "2023-11-14"


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no run folders"):
        list_runs(tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        list_runs(tmp_path / "missing")
