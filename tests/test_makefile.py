"""What make would run: paths go through whole, and invented cases stand in for nobody's own."""

import os
import re
import subprocess
from itertools import chain, combinations
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
STAGES = re.compile(r"^\.venv/bin/panjue (?:sft|generate|tune|serve|score|check)\b.*", re.MULTILINE)
OWN = ("TRAIN=train.jsonl", "TASK=reading", "CONFIG=mine", "MODEL=models/mine")
"""Each says that it is not the demo."""


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-n", *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "MAKEFLAGS": "GPU="},
        capture_output=True,
        text=True,
        check=False,
    )


def planned(*words: str) -> list[str]:
    """Return the stages that make would run, continued lines joined."""
    done = make(*words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("\\\n", " ")
    return [" ".join(line.split()) for line in STAGES.findall(lines)]


def refused(*words: str) -> str:
    """Return the one line that make says instead of running anything."""
    done = make(*words)
    assert done.returncode == 2, done.stdout
    assert not done.stdout
    [line] = done.stderr.splitlines()
    return line


def test_without_words_the_demo_is_scored() -> None:
    assert planned("score") == [
        ".venv/bin/panjue sft finetune/configs/demo.yaml run=runs/demo",
        ".venv/bin/panjue generate serve/configs/demo.yaml run=runs/demo test=data/demo/test.jsonl",
        ".venv/bin/panjue score data/demo/test.jsonl runs/demo --json runs/demo/scores.json",
    ]
    assert "test=data/demo/train.jsonl held_out=true" in planned("tune")[1]


KNOWN = "CHAT CONFIG DEV GENERATE GPU MIX MODEL ON_BAD_ROW PYTHON RUN SERVE SFT TASK TEST TRAIN"


@pytest.mark.parametrize(
    ("word", "hint"),
    [("MODLE=x", "; did you mean MODEL?"), ("train=x", "; did you mean TRAIN?"), ("ZZZ=x", "")],
)
def test_a_variable_that_is_misspelt_is_refused(word: str, hint: str) -> None:
    name = word.partition("=")[0]
    assert f"no variable {name}{hint} (there are {KNOWN})" in refused("score", word)


@pytest.mark.parametrize("goal", ["generate", "score", "check-submission", "tune"])
def test_invented_cases_stand_in_for_nobody_s_own(goal: str) -> None:
    every = chain.from_iterable(combinations(OWN, n) for n in range(1, len(OWN) + 1))
    for words in every:
        if goal != "tune" or not any(word.startswith("TRAIN=") for word in words):
            assert "=FILE: the invented cases are for the demo alone" in refused(goal, *words)
        stages = planned(goal, "TRAIN=other.jsonl", "TEST=test.jsonl", *words)
        assert stages
        assert not any("data/demo" in stage for stage in stages), words


def test_what_a_config_says_itself_is_not_asked_for() -> None:
    [sft] = planned("sft", "CONFIG=mine")
    assert sft == ".venv/bin/panjue sft finetune/configs/mine.yaml run=runs/mine"
    stages = planned("tune", "score", "check-submission", "CONFIG=mine", "DEV=dev", "TEST=test")
    assert not any(re.search(r"\btask\b|\btrain=", stage) for stage in stages)
    assert all("task" in stage for stage in planned("sft", "CONFIG=mine", "TASK=judgment"))
    for place in ROOT.glob("*/configs/*.yaml"):
        data = yaml.safe_load(place.read_text("utf-8")).keys() & {"train", "dev", "mix", "test"}
        assert not data or (place.stem in {"demo", "base"} and data == {"train"}), place


def test_only_what_a_stage_reads_is_asked_for() -> None:
    assert planned("sft", "TASK=reading", "TRAIN=train.json")
    assert planned("serve", "TASK=reading", "TRAIN=train.json")
    assert planned("check-submission", "TASK=reading", "TEST=dev.json")
    assert "say TRAIN=FILE" in refused("sft", "TASK=reading")
    assert "say TRAIN=FILE" in refused("tune", "CONFIG=mine")
    assert "say TEST=FILE" in refused("check-submission", "TRAIN=train.jsonl")


@pytest.mark.parametrize("name", ["TRAIN", "TEST", "DEV", "MIX", "MODEL", "RUN"])
def test_a_path_with_spaces_is_refused(name: str) -> None:
    words = {"TRAIN": "a", "TEST": "b", name: "my data/it.jsonl"}
    line = refused("score", *(f"{key}={value}" for key, value in words.items()))
    assert f"{name}=my data/it.jsonl: make takes no path with spaces" in line


def test_the_slash_behind_a_folder_is_nothing() -> None:
    words = ("MODEL=/models/Qwen3-8B", "TRAIN=data/train", "TEST=test")
    stages = planned("tune", "score", *words)
    assert planned("tune", "score", *(f"{word}/" for word in words[:2]), words[2]) == stages
    assert "run=runs/qwen2.5-0.5b-cpu-Qwen3-8B-train " in stages[0]


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    [targets] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    words = ["make", "help"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "make sft generate score MODEL=" in listed
    for target in targets.split():
        assert re.search(rf"^{target} +\S", listed, re.MULTILINE), target
