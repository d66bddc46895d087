"""What make would run, in a copy of the project in which nothing is trained."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
KNOWN = "CONFIG DEV GENERATE GPU MODEL PYTHON RUN SCORE SERVE SFT STAGE TASK TEST TRAIN V"
OWN = ("TRAIN=train.jsonl", "TASK=reading", "CONFIG=mine", "MODEL=models/mine", "RUN=runs/mine")
"""Each says that it is not the demo."""

Planned = Callable[..., list[str]]


def make(*words: str, gpu: str | None = "GPU=") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-n", *words],
        env={"PATH": os.environ["PATH"], "MAKEFLAGS": gpu or ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(autouse=True)
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder in which all is installed and nothing is trained."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci", copy_function=lambda _, to: Path(to).touch())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/installed").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(run: str, result: str = "adapter") -> None:
    (Path(run) / result).mkdir(parents=True)
    (Path(run) / result / "manifest.json").touch()


def planned(*words: str, gpu: str | None = "GPU=") -> list[str]:
    """Return the commands of panjue that make would run, without the remarks."""
    done = make(*words, gpu=gpu)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\.venv/bin/panjue (.*?)(?:  #.*)?$", done.stdout, re.MULTILINE)
    return [" ".join(line.replace("'", "").split()) for line in found]


def refused(*words: str) -> str:
    """Return the one line that make prints instead of running anything."""
    done = make(*words)
    assert done.returncode == 2, done.stdout
    assert not done.stdout
    [line] = done.stderr.splitlines()
    return line


def test_without_words_the_demo_is_made_trained_and_scored() -> None:
    assert planned("score") == [
        "demo data/demo",
        "base finetune/configs/base.yaml",
        "sft finetune/configs/demo.yaml run=runs/demo",
        "generate runs/demo data/demo/test.jsonl",
        "score data/demo/test.jsonl runs/demo --json runs/demo/answers/test/scores.json",
    ]
    assert planned("score", "RUN=", "TEST=") == planned("score"), "an empty variable is none"


@pytest.mark.parametrize("result", ["adapter", "model"])
def test_what_is_finished_is_not_made_again(result: str) -> None:
    trained("runs/mine", result)
    run = "RUN=runs/mine"
    assert planned("serve", f"{run}/") == ["serve runs/mine"]
    commands = [line.split()[0] for line in planned("score", run, "TEST=b.jsonl")]
    assert commands == ["generate", "score"]
    again = "sft finetune/configs/demo.yaml run=runs/mine"
    assert planned("sft", run, "TRAIN=a.jsonl")[-1] == f"{again} train=a.jsonl"
    assert f"{again} seed=2" in planned("serve", run, "SFT=seed=2"), "panjue names the difference"


@pytest.mark.parametrize(
    ("word", "hint"),
    [("MODLE=x", "; did you mean MODEL?"), ("train=x", "; did you mean TRAIN?"), ("ZZZ=x", "")],
)
def test_a_misspelt_variable_is_refused(word: str, hint: str) -> None:
    name = word.partition("=")[0]
    assert f"no variable {name}{hint} (there are {KNOWN})" in refused("score", word)


@pytest.mark.parametrize("goal", ["generate", "score", "check-submission"])
def test_invented_cases_never_stand_in_for_own_files(goal: str) -> None:
    for words in (*combinations(OWN, 1), *combinations(OWN, 2), OWN):
        assert "say TEST=FILE; the invented cases are for the demo alone" in refused(goal, *words)
        files = ("TRAIN=other.jsonl", "TEST=test.jsonl")
        assert not any("data/demo/test" in line for line in planned(goal, *words, *files)), words


def test_only_what_a_command_reads_is_asked_for() -> None:
    assert planned("serve", "TASK=reading", "TRAIN=train.json")
    assert planned("check-submission", "TASK=reading", "TEST=dev.json")
    assert planned("sft", "CONFIG=mine") == ["sft finetune/configs/mine.yaml run=runs/mine"]
    assert "say TRAIN=FILE" in refused("sft", "TASK=reading")
    for config in ROOT.glob("finetune/configs/*.yaml"):
        text = yaml.safe_load(config.read_text("utf-8"))
        named = (text.get("sft") or {}).keys() & {"train", "dev", "mix"}
        assert not named or (config.stem in {"demo", "base"} and named == {"train"}), config


@pytest.mark.parametrize("goal", ["generate", "score", "serve"])
def test_a_run_that_does_not_exist_is_not_the_demo(goal: str) -> None:
    words = (goal, "RUN=mien", "TEST=b.jsonl", "DEV=d.jsonl")
    assert "say TRAIN=FILE or correct RUN: nothing is trained in mien." in refused(*words)
    assert planned(*words, "CONFIG=demo")


def test_paths_with_spaces_and_slashes_work() -> None:
    words = ("MODEL=my models/Qwen 3/", "TRAIN=my data/a b.jsonl", "TEST=my data/c d.jsonl")
    sft, _, score = planned("score", *words)
    run = "runs/qwen2.5-0.5b-cpu-Qwen_3-a_b"
    assert sft.endswith(f"run={run} model=my models/Qwen 3/ train=my data/a b.jsonl")
    assert score == f"score my data/c d.jsonl {run} --json {run}/answers/c d/scores.json"
    trained("my runs/x y")
    done = make("score", "RUN=my runs/x y", words[2])
    assert ".venv/bin/panjue generate 'my runs/x y' 'my data/c d.jsonl'" in done.stdout
    assert "sft" not in done.stdout


@pytest.mark.parametrize(
    ("said", "config"),
    [
        ("81559\n81559", "qwen3-8b-lora"),
        ("40536", "qwen3-8b-lora"),
        ("81559\n24564", "qwen3-8b-qlora"),  # the smallest card decides
        ("15360", "qwen3-8b-qlora"),
        ("No devices were found", "qwen2.5-0.5b-cpu"),
    ],
)
def test_the_card_chooses_the_config(
    said: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n", "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    [sft] = planned("sft", "MODEL=m", "TRAIN=t.jsonl", gpu=None)
    assert sft.startswith(f"sft finetune/configs/{config}.yaml ")


def test_a_test_file_that_is_not_there_is_said_before_the_training() -> None:
    words = ["make", "sft", "generate", "MODEL=x", "TRAIN=train.jsonl", "TEST=tset.jsonl"]
    clean = {"PATH": os.environ["PATH"]}  # a make above this one would have it say its folder
    done = subprocess.run(words, env=clean, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "TEST: no file tset.jsonl"


def test_help_lists_every_target() -> None:
    text = Path("Makefile").read_text("utf-8")
    assert len(text.splitlines()) <= 50
    [targets] = re.findall(r"^\.PHONY: (.*) again$", text, re.MULTILINE)
    listed = subprocess.run(["make", "help"], capture_output=True, text=True, check=True).stdout
    assert "make sft generate score MODEL=" in listed
    for target in targets.split():
        assert re.search(rf"^{target} +\S", listed, re.MULTILINE), target
