"""The model card in the folder of a training: its numbers, and nothing of the cases."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from panjue.finetune.card import is_as_written, update_card, write_card
from panjue.finetune.trained import Trained, open_trained, read_trained
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.files import read_json, sha256, write_json
from panjue.prompts.plumbing.records import (
    AnswersRecord,
    Best,
    Candidate,
    Choice,
    Choices,
    RunRecord,
    TrainingSummary,
)
from tests.conftest import ROOT

from .conftest import logged, main


def card(run: Path) -> str:
    return (run / "adapter/README.md").read_text("utf-8")


def test_the_card_has_base_data_settings_and_loss(trained: Path, workshop: Path) -> None:
    text = card(trained)
    _, front, _ = text.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "peft"
    record = open_trained(trained).record
    for digest in (record.base_sha256, record.train_sha256):
        assert digest in text
    assert "| train | `train.jsonl` |" in text
    assert f"Trained on {record.examples} examples" in text
    labels = load_labels(trained / "adapter/labels.json").counts
    assert f"charges {len(labels['charges'])}, articles {len(labels['articles'])}" in text
    kept = min(logged(trained, "eval_loss"), key=lambda entry: entry["eval_loss"])
    summary = TrainingSummary.read(trained)
    assert summary
    assert (summary.steps, summary.kept_step) == (12, kept["step"])
    assert summary.tokens == logged(trained, "num_tokens")[-1]["num_tokens"]
    assert summary.seconds
    assert summary.memory
    said = (
        f"Loss {kept['eval_loss']:.4f} on {summary.held_out} examples, with these weights of step"
    )
    assert f"{said} {kept['step']}." in text
    assert "config `sft`, nothing changed." in text
    assert "More Information Needed" not in text
    assert str(workshop) not in text, "no paths"


def with_scores(run: Path) -> Trained:
    """Return the training of an old run, with invented settings, losses and scores."""
    shutil.copytree(ROOT / "tests/version_0_4_last/run", run)
    record = RunRecord.read(run / "adapter")
    known = {"base": "Qwen/Qwen3-8B", "dev": "/home/me/dev.jsonl", "dev_sha256": "d" * 64}
    record.model_copy(update={**known, "base_files": {"a": "a"}}).write(run / "adapter")
    trained = open_trained(run)
    changed = {"lora.r": 4, "trainer.run_name": "a|b", "columns": None}
    summary = read_json(run / "training.json")
    write_json(run / "training.json", {**summary, "changed": changed})
    (run / "log.jsonl").write_text('{"step": 6, "eval_loss": 0.25}\n', "utf-8")
    best = Best(
        candidate="classifier", metric="charge_f1", less_first={"classifier": (0.25, 0.125, 0.5)}
    )
    choice = Choice(
        candidates={
            "model": Candidate(metrics={"charge_f1": 0.5}, sha256=trained.sha256),
            "classifier": Candidate(metrics={"charge_f1": 0.75}),
        },
        best={"charges": best},
        cases=40,
        counted=40,
    )
    write_json(trained.folder / "choice.json", Choices(choices=(choice,)).model_dump(mode="json"))
    answers = run / "answers/test"
    of_answers = AnswersRecord.read(answers)
    of_answers.model_copy(update={"trained_sha256": trained.sha256}).write(answers)
    scores = {
        "final": 0.5,
        "examples": 8,
        "interval": {"final": [0.375, 0.625]},
        "answered_by": "answered by the model",
        "in_sample": "these cases were trained on",
        "submission_sha256": sha256(answers / "submission.jsonl"),
    }
    write_json(answers / "scores.json", scores)
    return open_trained(run)


def test_it_is_written_byte_for_byte(tmp_path: Path) -> None:
    trained = with_scores(tmp_path / "run")
    write_card(trained, 6)
    golden = ROOT / "tests/golden/adapter.card.md"
    assert (trained.folder / "README.md").read_bytes() == golden.read_bytes()


def test_nothing_of_the_cases_is_in_it(answered: Path, workshop: Path) -> None:
    cases = (workshop / "demo/train.jsonl").read_text("utf-8").splitlines()
    text = card(answered)
    for case in map(json.loads, cases):
        assert case["fact"][:12] not in text
        assert not any(name in text for name in case["defendants"])


def test_settings_of_the_command_line_are_named_after_a_resume_too(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = ["trainer.max_steps=1", "trainer.eval_strategy='no'", "lora.r=4", "seed=0"]

    def stop(_: object, __: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("panjue.finetune.sft.ReplyTrainer.train_or_resume", stop)
        with pytest.raises(KeyboardInterrupt):
            main(workshop / "sft.yaml", [f"run={run}", *words])
    main(run / "config.yaml", ["trainer.logging_steps=5"])
    text = card(run)
    rows = re.findall(r"^\| `(.*)` \| `(.*)` \|$", text, re.MULTILINE)
    assert dict(rows) == {
        "lora.r": "4",
        "trainer.max_steps": "1",
        "trainer.eval_strategy": '"no"',
        "trainer.logging_steps": "5",
    }
    assert "config `sft`; changed:" in text


def test_scores_come_into_the_card_and_an_edited_one_stays(
    answered: Path,
    workshop: Path,
    tmp_path: Path,
    panjue: Callable[..., CompletedProcess[str]],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(answered, run)
    assert "Scores on" not in card(run)
    before = open_trained(run).record, (run / "adapter/manifest.json").read_bytes()
    done = panjue("score", workshop / "demo/test.jsonl", run)
    assert done.returncode == 0, done.stderr
    scores = read_json(run / "answers/test/scores.json")
    text = card(run)
    assert "## Scores on test.jsonl" in text
    low, high = scores["interval"]["final"]
    assert f"| final | {scores['final']:.4f} | {low:.4f} to {high:.4f} |" in text
    assert before == (open_trained(run).record, (run / "adapter/manifest.json").read_bytes())
    write_json(run / "answers/test/scores.json", {**scores, "counted": 1})
    update_card(open_trained(run))
    assert f"| final | {scores['final']:.4f} | - |" in card(run), "one case has no interval"
    assert panjue("decode", run / "answers/test", "answer=classifier").returncode == 0
    assert "Scores on" not in card(run), "they are of another submission"
    edited = text.replace("# run", "# My adapter")
    (run / "adapter/README.md").write_text(edited, "utf-8")
    assert not is_as_written(run / "adapter/README.md")
    update_card(open_trained(run))
    assert card(run) == edited


def test_broken_scores_are_no_reason_to_fail(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "answers/test").mkdir(parents=True)
    write_json(run / "answers/test/manifest.json", {"test_sha256": ""})
    write_json(run / "answers/test/scores.json", {"final": 0.5})
    update_card(open_trained(run))
    assert "Scores on" not in card(run)


def test_scores_of_another_training_are_left_out(
    answered: Path,
    workshop: Path,
    tmp_path: Path,
    panjue: Callable[..., CompletedProcess[str]],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(answered, run)
    panjue("score", workshop / "demo/test.jsonl", run)
    config = run / "adapter/adapter_config.json"
    config.write_text(config.read_text("utf-8") + " ", "utf-8")
    update_card(open_trained(run))
    assert "Scores on" not in card(run)


def test_the_card_of_an_adapter_without_its_run_stays(trained: Path, tmp_path: Path) -> None:
    before = card(trained)
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    update_card(read_trained(tmp_path / "adapter"))
    assert card(tmp_path) == before


def test_some_scores_are_not_kept(
    answered: Path,
    workshop: Path,
    tmp_path: Path,
    panjue: Callable[..., CompletedProcess[str]],
) -> None:
    """Those by other lists of labels, and those of a copy that somebody may have changed."""
    run = tmp_path / "run"
    shutil.copytree(answered, run)
    gold = workshop / "demo/test.jsonl"
    answers = run / "answers/test"
    assert panjue("score", gold, run, "--labels", answers / "labels.json").returncode == 0
    copy = shutil.copy(answers / "submission.jsonl", tmp_path / "copy.jsonl")
    assert panjue("score", gold, copy).returncode == 0
    assert not (answers / "scores.json").exists()
