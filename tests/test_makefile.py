"""What only make can break: the order of the targets, and how variables get through."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from panjue.prompts.plumbing.files import dump
from panjue.prompts.tasks.judgment.penalties import sentence
from tests.records import write_answers

ROOT = Path(__file__).parents[1]


def make(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    command = ["make", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder in which all is installed; its panjue prints what it is called with."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "Makefile", tmp_path)
    programs = {"python": f'exec {sys.executable} "$@"', "panjue": "printf '<%s> ' \"$@\"; echo"}
    Path(".venv/bin").mkdir(parents=True)
    for name, line in programs.items():
        Path(".venv/bin", name).write_text(f"#!/bin/sh\n{line}\n", "utf-8")
        Path(".venv/bin", name).chmod(0o755)
    shutil.copytree(ROOT / "finetune/configs", "finetune/configs")
    for name in ("pyproject.toml", "c d.jsonl", ".venv/installed", "finetune/configs/a.yaml"):
        Path(name).touch()


def test_the_environment_does_not_steer_what_the_targets_run_in_order() -> None:
    done = make("score", MODEL="m", TEST="t", RUN="r", SFT="seed=2", TASK="reading")
    assert done.stdout.splitlines() == [
        "<demo> <data/demo> ",
        "<base> <finetune/configs/base.yaml> ",
        "<sft> <demo> ",
        "<generate> <runs/demo> <data/demo/test.jsonl> ",
        "<score> <data/demo/test.jsonl> <runs/demo/answers/test> ",
    ]
    assert '--model ""' in make("-n", "gpu", MODEL="m").stdout


def test_both_configs_of_the_demo_have_the_invented_cases_and_the_tiny_base() -> None:
    done = make("sft", "CONFIG=demo-opinions")
    assert done.stdout.splitlines() == [
        "<demo> <data/demo> ",
        "<base> <finetune/configs/base.yaml> ",
        "<sft> <demo-opinions> ",
    ]


def test_words_get_through_as_they_are_typed() -> None:
    sft_words = "SFT=model='a  b' dev=$HOME columns.V=1"
    words = ("CONFIG=a", "RUN=b c/$x \"y'", "TRAIN=e\\f.jsonl", sft_words)
    sft, serve = make("serve", *words, "V=").stdout.splitlines()
    run, data = "<run=b c/$x \"y'>", "<train=e\\f.jsonl>"
    assert sft == f"<sft> <a> {run} {data} <model=a  b> <dev=$HOME> <columns.V=1> "
    assert serve == "<serve> <b c/$x \"y'> "
    assert ".venv/bin/panjue serve 'a b'\n" in make("serve", "CONFIG=a", "RUN=a b", "V=1").stdout


def test_a_file_without_outcomes_is_answered_and_not_scored() -> None:
    """The submission is what such a file is answered for."""
    case = {"id": 1, "fact": "甲盗窃。", "defendants": ["甲"]}
    outcome = {"name": "甲", "penalty": sentence(imprisonment=6), "charges": [], "articles": []}
    for name, row in {"no": case, "with": {**case, "outcomes": [outcome]}}.items():
        Path(f"{name}.jsonl").write_text(dump(row) + "\n", "utf-8")
        folder = Path("r/answers", name)
        write_answers(folder, Path(f"{name}.jsonl"))
        (folder / "submission.jsonl").touch()
    Path("r/adapter").mkdir()
    Path("r/adapter/labels.json").touch()
    done = make("score", "RUN=r", "TEST=no.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "<generate> <r> <no.jsonl> ",
        "no.jsonl: has no outcomes: nothing to score; the submission is in r/answers/no",
    ]
    assert "<score> <with.jsonl>" in make("score", "RUN=r", "TEST=with.jsonl").stdout


def test_a_wrong_word_stops_make_before_anything_runs() -> None:
    reasons = {
        "TEST=tset": "TEST: no file tset",
        "model=x": "no variable model",
        "SFT=seed=2 bacth=4": "bacth=4: no setting 'bacth'",
    }
    for word, reason in reasons.items():
        done = make("sft", "generate", "CONFIG=a", word)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"panjue: {reason}")
        _, of_make = done.stderr.splitlines()
        assert re.fullmatch(r"make: \*\*\* \[Makefile:\d+: variables\] Error 2", of_make)


def test_help_lists_every_target_of_the_makefile() -> None:
    text = Path("Makefile").read_text("utf-8")
    targets, _ = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    listed = make("help").stdout
    assert "make sft generate score MODEL=" in listed
    for target in targets.split():
        assert re.search(rf"^{target} +\S", listed, re.MULTILINE), target
