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
        ".venv/bin/panjue sft finetune/configs/demo.yaml run=runs/demo --as-trained",
        ".venv/bin/panjue generate serve/configs/demo.yaml run=runs/demo "
        "test=data/demo/test.jsonl answers=test",
        ".venv/bin/panjue score data/demo/test.jsonl runs/demo/answers/test "
        "--json runs/demo/answers/test/scores.json",
    ]
    assert "test=data/demo/train.jsonl held_out=true answers=train" in planned("tune")[1]
    generate, tune = planned("tune", "ANSWERS=other")[1:]
    assert "held_out=true answers=other" in generate
    assert tune.endswith("runs/demo/tune/answers/other")


KNOWN = (
    "ACCELERATE ANSWERS CHAT CONFIG DEV GENERATE GPU GPUS MIX MODEL ON_BAD_ROW PYTHON RUN SERVE "
    "SFT TASK TEST TRAIN"
)


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
    assert planned("score", "RUN=") == planned("score"), "an empty one is none"
    folders = ("DEV=dev/", "TRAIN=data/train", "TEST=data/test/", "TASK=dialogue")
    assert "/answers/test " in planned("tune", "score", *folders)[-1]
    assert planned("tune", *folders)[-1].endswith("/answers/dev")
    assert planned("tune", "score", *(f"{word}/" for word in words[:2]), words[2]) == stages
    assert "run=runs/qwen2.5-0.5b-cpu-Qwen3-8B-train " in stages[0]


def run_of(folder: Path, *lines: str) -> str:
    """Write the record of a finished training; return the word that names its run."""
    (folder / "adapter").mkdir(parents=True)
    (folder / "config.yaml").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return f"RUN={folder}"


def test_what_a_run_was_trained_with_is_not_asked_for_again(tmp_path: Path) -> None:
    lines = ("# finetune/configs/qwen3-8b-lora.yaml", "task: reading", "train: t.json", "dev: null")
    run = run_of(tmp_path / "run", *lines)
    assert planned("serve", f"{run}/") == [
        f".venv/bin/panjue sft finetune/configs/qwen3-8b-lora.yaml run={tmp_path}/run task=reading "
        "--as-trained",
        f".venv/bin/panjue serve serve/configs/qwen3-8b-lora.yaml run={tmp_path}/run task=reading",
    ]
    assert planned("generate", run, "TEST=b.json")[1].endswith(" test=b.json answers=b")
    assert "test=t.json held_out=true" in planned("tune", run)[1]
    assert planned("tune", run)[2] == f".venv/bin/panjue tune {tmp_path}/run/tune/answers/t"
    with_dev = run_of(tmp_path / "dev", *lines[:-1], "dev: d.json")
    assert "test=d.json" in planned("tune", with_dev)[1]
    assert "say TEST=FILE" in refused("generate", run)
    mine = run_of(
        tmp_path / "mine", "# finetune/configs/demo.yaml", "task: judgment", "train: a.jsonl"
    )
    assert "say TEST=FILE" in refused("score", mine), "the invented cases are not asked of it"
    bare = tmp_path / "bare"
    (bare / "adapter").mkdir(parents=True)
    (bare / "adapter/manifest.json").write_text('{\n  "task": "reading",\n', "utf-8")
    [_, generate] = planned("generate", f"RUN={bare}", "TEST=b.json")
    assert "serve/configs/qwen2.5-0.5b-cpu.yaml" in generate
    assert "task=reading" in generate
    assert "--as-trained" not in planned("sft", run)[0], "who says sft asks for this training"
    folder = f"{tmp_path}/run/answers/x"
    assert planned("score", run, "TEST=b.json", "ANSWERS=x")[2].endswith(
        f"b.json {folder} --task reading --json {folder}/scores.json"
    )


@pytest.mark.parametrize("goal", ["generate", "tune", "score", "serve"])
def test_a_run_that_is_not_there_is_no_demo(goal: str, tmp_path: Path) -> None:
    run = tmp_path / "mien"
    assert refused(goal, f"RUN={run}", "TEST=b.jsonl").endswith(
        f"RUN={run}: nothing is trained there; say CONFIG=demo to train the demo there, "
        "or MODEL=… TRAIN=….  Stop."
    )
    assert planned(goal, f"RUN={run}", "CONFIG=demo")


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    [targets] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    words = ["make", "help"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "make sft generate score MODEL=" in listed
    for target in targets.split():
        assert re.search(rf"^{target} +\S", listed, re.MULTILINE), target
