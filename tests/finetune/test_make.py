"""What the targets of the Makefile run, by what is given and what is trained."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from panjue.finetune.make import VARIABLES, command, config_for_gpu
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
LINES = dict(re.findall(r"^([a-z-]+):[^$]*\$\(PANJUE\) (.*?)(?:  #.*)?$", MAKEFILE, re.MULTILINE))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with the demo, a run that is trained and one that was killed; no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("panjue.finetune.make.config_for_gpu", lambda: "for-gpu")
    (tmp_path / "finetune").mkdir()
    (tmp_path / "finetune/configs").symlink_to(ROOT / "finetune/configs")
    for trained in ("runs/base/model", "runs/demo/model", "done/adapter"):
        write_json(Path(trained, "labels.json"), [])
    for name in ("done/config.yaml", "killed/config.yaml", "data/demo/train.jsonl", "b.jsonl"):
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
        "sft: MODEL='q/m 3/' TRAIN='x/a b.c.jsonl' TASK=judgment -> sft C/for-gpu.yaml "
        "run=runs/for-gpu-m_3-a_b.c task=judgment 'model=q/m 3/' 'train=x/a b.c.jsonl'",
        "sft: CONFIG=mine TASK=reading DEV=d SFT='seed=2 batch=4' -> sft C/mine.yaml "
        "run=runs/mine-reading task=reading dev=d seed=2 batch=4",
        "serve: RUN=done/ SERVE=port=80 -> serve done port=80",
        "serve: RUN=done/adapter -> serve done/adapter",
        "generate: RUN=done TEST=b.jsonl GENERATE='x=\"a b\"' -> generate done b.jsonl 'x=a b'",
        "check-submission: RUN=done TEST=b.jsonl -> check done --cases b.jsonl",
        # words of the training in later commands: panjue says what differs
        "serve: RUN=done MODEL=m -> sft done/config.yaml run=done model=m; serve done",
        "serve: RUN=done SFT=seed=2 -> sft done/config.yaml run=done seed=2; serve done",
        "sft: RUN=done MODEL=m TRAIN=t -> sft C/for-gpu.yaml run=done model=m train=t",
        "serve: RUN=killed -> sft killed/config.yaml run=killed; serve killed",
    ],
)
def test_what_is_run(example: str) -> None:
    words, commands = example.split(" -> ")
    assert planned(words) == commands


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("sft: MODEL=m", "say TRAIN=FILE, or RUN=FOLDER of a training: nothing is trained for MO"),
        ("score: TEST=b.jsonl", "say MODEL=NAME and TRAIN=FILE, or RUN=FOLDER of a training: "),
        ("serve: RUN=mien", "nothing is trained for RUN=mien (CONFIG=demo trains a toy)"),
        ("sft generate: MODEL=m TRAIN=t", "say TEST=FILE: the invented cases are for the demo"),
        ("sft generate: MODEL=m TRAIN=t TEST=tset.jsonl", "TEST: no file tset.jsonl"),
        ('serve: RUN=done SERVE="', "SERVE: No closing quotation"),
    ],
)
def test_what_is_refused_before_anything_runs(words: str, reason: str) -> None:
    with pytest.raises(UserError) as error:
        planned(words)
    assert reason in str(error.value).replace("finetune/configs/", "C/")


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ([], "qwen2.5-0.5b-cpu"),
        ([24_564], "qwen3-8b-qlora"),
        ([24_564, 40_536], "qwen3-8b-lora"),
    ],
)
def test_the_largest_gpu_chooses_the_config(
    sizes: list[int], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SimpleNamespace(total_memory=size * 2**20) for size in sizes]
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpus))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr("torch.cuda.get_device_properties", gpus.__getitem__)
    assert config_for_gpu() == config
