"""What the targets of the Makefile run, by what is given and what is trained."""

import re
import shlex
from pathlib import Path

import pytest

from panjue.finetune.gpu import config_for_gpu
from panjue.finetune.make import VARIABLES, command
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
LINES = dict(re.findall(r"^([a-z-]+):[^$]*\$\(PANJUE\) (.*?)(?:  #.*)?$", MAKEFILE, re.MULTILINE))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with the demo, a run that is trained and one that was killed; no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "finetune").mkdir()
    (tmp_path / "finetune/configs").symlink_to(ROOT / "finetune/configs")
    for run in (Path("done"), Path("killed")):
        write_json(run / "manifest.json", {"task": "judgment", "base": "m", "train": "t.jsonl"})
        (run / "config.yaml").write_text("sft: {train: t.jsonl}\n", "utf-8")
    for name in ("runs/base/model/labels", "runs/demo/model/labels", "done/adapter/labels"):
        write_json(Path(f"{name}.json"), [])
    for name in ("data/demo/train.jsonl", "b.jsonl"):
        write_json(Path(name), {})


def planned(words: str) -> str:
    """Return what is run for the words of a make command, by its goals and what comes before."""
    given = dict.fromkeys(VARIABLES, "")
    for name, value in re.findall(r"([A-Z]+)=('[^']*'|\S*)", words):
        given[name] = value.strip("'")
    goals = words.partition(":")[0].split()
    steps = goals if goals == ["check-submission"] else ["demo", "base", "sft", *goals]
    commands = [command(LINES[step].split(), goals, given) for step in dict.fromkeys(steps)]
    return "; ".join(map(shlex.join, filter(None, commands))).replace("finetune/configs/", "C/")


@pytest.mark.parametrize(
    "example",
    [
        "serve: -> serve runs/demo",
        "sft: -> sft C/demo.yaml run=runs/demo",
        "score: CONFIG=demo RUN=b -> sft C/demo.yaml run=b; score data/demo/test.jsonl b "
        "--json b/answers/test/scores.json",
        "sft: MODEL='q/m 3/' TRAIN='x/a b.c.jsonl' TASK=judgment -> sft C/qwen2.5-0.5b-cpu.yaml "
        "run=runs/qwen2.5-0.5b-cpu-m_3-a_b.c task=judgment 'model=q/m 3/' 'train=x/a b.c.jsonl'",
        "sft: CONFIG=mine TASK=reading DEV=d SFT='seed=2 batch=4' -> sft C/mine.yaml "
        "run=runs/mine-reading task=reading dev=d seed=2 batch=4",
        "serve: RUN=done/ SERVE=port=80 -> serve done port=80",
        "serve: RUN=done/adapter -> serve done/adapter",
        "generate: RUN=done TEST=b.jsonl GENERATE='x=\"a b\"' -> generate done b.jsonl 'x=a b'",
        "check-submission: RUN=done TEST=b.jsonl -> check done --cases b.jsonl",
        # words of the training in later commands: panjue says what differs
        "serve: RUN=done MODEL=m -> sft done/config.yaml run=done model=m; serve done",
        "serve: RUN=done SFT=seed=2 -> sft done/config.yaml run=done seed=2; serve done",
        "sft: RUN=done TRAIN=t.jsonl -> sft done/config.yaml run=done train=t.jsonl",
        "sft: RUN=done MODEL=m TRAIN=t -> sft C/qwen2.5-0.5b-cpu.yaml run=done model=m train=t",
        "serve: RUN=killed -> sft killed/config.yaml run=killed; serve killed",
    ],
)
def test_what_is_run(example: str) -> None:
    words, commands = example.split(" -> ")
    assert planned(words) == commands


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("sft: TRAIN=t", "nothing is trained for TRAIN=t (CONFIG=demo trains a toy)"),
        ("score: TEST=b.jsonl", "nothing is trained for TEST=b.jsonl (CONFIG=demo trains a toy)"),
        ("serve: RUN=mien", "nothing is trained for RUN=mien (CONFIG=demo trains a toy)"),
        ("serve: RUN=done MODEL=x", "MODEL=x: done has MODEL=m; leave MODEL out"),
        ("sft generate: MODEL=m TRAIN=t", "say TEST=FILE: the invented cases are for the demo"),
        ("score: CONFIG=demo TASK=reading", "say TEST=FILE: the invented cases are for the demo"),
        ("sft generate: MODEL=m TRAIN=t TEST=tset.jsonl", "TEST: no file tset.jsonl"),
        ('serve: RUN=done SERVE="', "SERVE: No closing quotation"),
    ],
)
def test_what_is_refused_before_anything_runs(words: str, reason: str) -> None:
    with pytest.raises(UserError) as error:
        planned(words)
    assert reason in str(error.value).replace("finetune/configs/", "C/")


@pytest.mark.parametrize(
    ("sizes", "visible", "config"),
    [
        ("24564 40536", None, "qwen3-8b-lora"),
        ("24564 40536", "0", "qwen3-8b-qlora"),
        ("24564 40536", "0,GPU-1", "qwen3-8b-lora"),
        ("24564 40536", "", "qwen2.5-0.5b-cpu"),
        ("81559", "MIG-7f2a", "qwen3-8b-qlora"),
        ("[N/A]", None, "qwen3-8b-lora"),  # it has the machine's
        ("", None, "qwen2.5-0.5b-cpu"),
    ],
)
def test_the_gpu_that_is_used_chooses_the_config(
    sizes: str, visible: str | None, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{number}, GPU-{number}f0, {size}" for number, size in enumerate(sizes.split())]
    listed = "\n".join(rows) or "No devices were found"
    Path("nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n", "utf-8")
    Path("nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(Path.cwd()), prepend=":")
    monkeypatch.setattr("panjue.finetune.gpu.machine_size", lambda: 120_000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert config_for_gpu() == config
