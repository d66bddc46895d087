"""What the targets of the Makefile run, by what is given and what is trained."""

import re
import shlex
from pathlib import Path
from shutil import copytree

import pytest

from panjue.finetune.make import VARIABLES, command
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json

HOME = Path.home()
ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
LINES = dict(re.findall(r"^([a-z-]+):[^$]*\$\(PANJUE\) (.*?)(?:  #.*)?$", MAKEFILE, re.MULTILINE))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with the demo, a run that is trained and one that was killed; no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("panjue.finetune.words.config_for_gpu", lambda: "for-gpu")
    copytree(ROOT / "finetune/configs", tmp_path / "finetune/configs")
    for name in ("mine", "for-gpu"):
        write_json(Path(f"finetune/configs/{name}.yaml"), {})
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
        "sft: -> sft demo",
        "score: CONFIG=demo RUN=b -> sft demo run=b; score data/demo/test.jsonl b/answers/test",
        "score: CONFIG=demo-opinions -> sft demo-opinions; score data/demo/test.jsonl "
        "runs/demo-opinions/answers/test",
        "serve: MODEL='q/m 3/' TRAIN='x/a b.c.jsonl' TASK=judgment -> sft task=judgment "
        "'model=q/m 3/' 'train=x/a b.c.jsonl'; serve runs/for-gpu-m_3-a_b.c",
        "serve: CONFIG=mine TASK=reading DEV=d SFT='seed=2 batch=4' -> sft mine "
        "task=reading dev=d seed=2 batch=4; serve runs/mine-reading",
        "serve: RUN=done/ SERVE=port=80 -> serve done port=80",
        "serve: RUN=done/adapter -> serve done/adapter",
        "generate: RUN=done TEST=b.jsonl GENERATE='x=\"a b\"' -> generate done b.jsonl 'x=a b'",
        "check-submission: RUN=done TEST=b.jsonl -> check done/answers/b --cases b.jsonl",
        "check-submission: RUN=done TEST=b.jsonl GENERATE='answers=other seed=1' -> check "
        "done/answers/other --cases b.jsonl",
        "generate: CONFIG=mine TEST=b.jsonl SFT='limit=9 batch=4' GENERATE=limit=9 -> sft mine "
        "limit=9 batch=4; generate runs/mine-limit9 b.jsonl limit=9",
        "generate: TRAIN=c.jsonl TEST=b.jsonl SFT=from=done -> sft train=c.jsonl from=done; "
        "generate runs/done-c b.jsonl",
        "check-submission: RUN=done TEST=b.jsonl GENERATE=limit=9 -> check "
        "done/answers/b-limit9 --cases b.jsonl",
        # words of the training in later commands: panjue says what differs
        "serve: RUN=done MODEL=m -> sft run=done model=m; serve done",
        "serve: RUN=done SFT=seed=2 -> sft run=done seed=2; serve done",
        "sft: RUN=done MODEL=m TRAIN=t -> sft run=done model=m train=t",
        "serve: RUN=killed -> sft run=killed; serve killed",
        "serve: RUN=a MODEL=m TRAIN=t SFT=run=b -> sft run=b model=m train=t run=b; serve b",
        "sft: SFT=--settings -> sft demo --settings",
        "score: RUN=runs/demo -> score data/demo/test.jsonl runs/demo/answers/test",
    ],
)
def test_what_is_run(example: str) -> None:
    words, commands = example.split(" -> ")
    assert planned(words) == commands


@pytest.mark.parametrize(
    "example",
    [
        "sft: -> demo data/demo; sft demo",
        "sft: CONFIG=demo MODEL=m -> demo data/demo; sft demo model=m",
        "sft: CONFIG=demo MODEL=m TRAIN=t -> sft demo model=m train=t",
        "sft: CONFIG=demo MODEL=m SFT=train=t -> sft demo model=m train=t",
        "sft: CONFIG=demo SFT='model=m train=t' -> sft demo model=m train=t",
    ],
)
def test_missing_cases_of_the_demo_are_made_if_they_are_needed(example: str) -> None:
    Path("data/demo/train.jsonl").unlink()
    words, commands = example.split(" -> ")
    assert planned(words) == commands


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("sft: SFT=from=done", "say train=FILE, or run=FOLDER of a training; with make in cap"),
        ("sft: MODEL=m", "say train=FILE, or run=FOLDER of a training; with make in capitals"),
        ("score: TEST=b.jsonl", "say model=NAME and train=FILE, or run=FOLDER of a training; "),
        ("serve: RUN=mien", "say model=NAME and train=FILE, or run=FOLDER of a training: mien has"),
        ("sft generate: MODEL=m TRAIN=t", "say TEST=FILE: the invented cases are for the demo"),
        ("sft generate: MODEL=m TRAIN=t TEST=tset.jsonl", "TEST: no file tset.jsonl"),
        ("sft: SFT=bacth=4", "bacth=4: no setting 'bacth'; did you mean 'batch'?"),
        ('serve: RUN=done SERVE="', "SERVE: No closing quotation"),
        ("sft: RUN=~/x MODEL=m TRAIN=t", f"RUN=~/x: ~ is not expanded here; write RUN={HOME}/x"),
    ],
)
def test_what_is_refused_before_anything_runs(words: str, reason: str) -> None:
    with pytest.raises(UserError) as error:
        planned(words)
    assert reason in str(error.value).replace("finetune/configs/", "C/")
