"""A run that the last state of version 0.4 made (commit a2586c4) is used by the code of today.

`version_0_4_last/` has a training on the base in `version_0_4/`, and the classifier's answers. Base
and code have other hashes since.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from panjue.prompts.plumbing.files import read_json, sha256, write_json

Panjue = Callable[..., CompletedProcess[str]]
HERE = Path(__file__).parent
ALREADY = "already trained with these settings; a version before 0.5 made it: changes of the task's"


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of what it left behind, which is the working directory now."""
    folder = shutil.copytree(HERE / "version_0_4_last", tmp_path / "old")
    shutil.copytree(HERE / "version_0_4/base", folder / "base")
    (folder / "demo").mkdir()
    (folder / "train.jsonl").rename(folder / "demo/train.jsonl")
    shutil.copy(HERE / "version_0_4/test.jsonl", folder / "demo/test.jsonl")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("note", ["", "configuration.json", "说明.txt"])
def test_its_training_is_finished_whatever_lies_in_the_base(
    old: Path, panjue: Panjue, note: str
) -> None:
    if note:
        (old / "base/model" / note).write_text("{}", "utf-8")
    done = panjue("sft", "run/config.yaml")
    assert done.returncode == 0, done.stderr
    assert ALREADY in done.stdout
    assert panjue("merge", "run").returncode == 0


def test_other_settings_and_other_weights_are_refused_by_name(old: Path, panjue: Panjue) -> None:
    done = panjue("sft", "run/config.yaml", "seed=1")
    assert "holds another run (seed: 0 -> 1)" in done.stderr
    with (old / "base/model/model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"x")
    done = panjue("sft", "run/config.yaml")
    assert done.returncode == 2
    assert "holds another run (base base/model: which file differs is not known: " in done.stderr
    assert "was trained on another base than base/model is now" in panjue("merge", "run").stderr


def test_a_training_that_it_began_is_refused(old: Path, panjue: Panjue) -> None:
    shutil.rmtree(old / "run/adapter")
    (old / "run/checkpoints/checkpoint-3").mkdir(parents=True)
    done = panjue("sft", "run/config.yaml")
    assert done.returncode == 2
    assert (
        "(a version before 0.5 began it, and hashed the task's code in another way)" in done.stderr
    )


def test_a_training_starts_from_its_adapter(old: Path, panjue: Panjue) -> None:
    words = ("from=run", "train=demo/test.jsonl", "run=next", "trainer.max_steps=1")
    done = panjue("sft", *words)
    assert done.returncode == 0, done.stderr
    assert "\nfrom         run: adapter of step " in done.stdout
    assert "next (from run)" in panjue("runs", "next").stdout


def test_its_answers_stay(old: Path, panjue: Panjue) -> None:
    before = sha256(old / "run/answers/test/submission.jsonl")
    for words in (
        ("decode", "run/answers/test"),
        ("score", "demo/test.jsonl", "run"),
        ("generate", "run", "demo/test.jsonl", "answer=classifier"),
        ("report", "run"),
        ("runs", "run"),
    ):
        done = panjue(*words)
        assert done.returncode == 0, done.stderr
    assert sha256(old / "run/answers/test/submission.jsonl") == before


def test_settings_that_are_refused_today_do_not_matter_in_what_is_made(
    old: Path, panjue: Panjue
) -> None:
    record = read_json(old / "run/manifest.json")
    record["trainer"]["use_cache"] = False
    write_json(old / "run/manifest.json", record)
    config = old / "run/config.yaml"
    text = config.read_text("utf-8").replace("  trainer:\n", "  trainer:\n    use_cache: false\n")
    config.write_text(text, "utf-8")
    done = panjue("sft", "run/config.yaml")
    assert ALREADY in done.stdout, done.stderr
    done = panjue("generate", "run", "demo/test.jsonl", "answer=classifier")
    assert done.returncode == 0, done.stderr
    done = panjue("sft", "run/config.yaml", "run=other")
    assert "trainer.use_cache: is set by panjue, or has no effect here" in done.stderr


def test_a_merge_without_its_base_stays(old: Path, panjue: Panjue) -> None:
    assert panjue("merge", "run").returncode == 0
    shutil.rmtree(old / "base")
    done = panjue("merge", "run")
    assert done.returncode == 0, done.stderr
