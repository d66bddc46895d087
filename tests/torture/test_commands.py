"""Every command of the pages runs as it is printed, in a copy of the project.

Words that stand for something of the user's (`RUN`, `TRAIN=…`) are replaced, sizes are small, and
the configs are those of these tests; everything else is verbatim. tests/test_readme.py holds every
command to what `make` and `panjue` take, without running it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.served import until
from tests.test_readme import ENGLISH, ROOT, commands, text
from tests.torture.conftest import RAY
from tests.torture.test_proxies import is_ready

TASKS = ROOT / "prompts/tasks"
FACT = json.loads((ROOT / "serve/page/sample.json").read_text("utf-8"))["fact"]
LONGEST_S = 600
DEMO = "See it work"
ALONE = {
    "From your file to a submission",
    "Settings",
    "Several GPUs",
    "Reading and cloze",
    "Long dialogues",
}
"""The sections with a copy of the project for each; others need the demo's finished run."""

TRAINED = "runs/qwen2.5-0.5b-cpu"
WORDS: dict[str, dict[str, str]] = {
    DEMO: {"make test": "make -n test"},  # this is one of its tests
    "From your file to a submission": {"dev.jsonl": "test_a.jsonl"},
    "Settings": {},
    "Several GPUs": {
        "make sft MODEL": "make sft CONFIG=demo RUN=runs/two MODEL",
        "make sft CONFIG=qwen3": "make -n sft CONFIG=qwen3",  # CPUs cannot shard
        "gpus=8": "gpus=2",
    },
    "Reading and cloze": {
        "TRAIN=train.json ": "TRAIN=train.json DEV=dev.json ",
        "RUN TEST": f"{TRAINED}-cloze-tiny-train dev.jsonl",
    },
    "Long dialogues": {
        "panjue generate": "true #",  # tests/serve/test_endpoint.py asks such a server
    },
    "Another task": {"panjue": "true #"},  # tests/serve/test_endpoint.py has such a task
    "The best checkpoint": {},
    "The next stage": {"runs/stage1": "runs/mine", "stage2.jsonl": "train.jsonl"},
    "An adapter of another trainer": {  # tests/serve/test_adopt.py has one
        "panjue adopt": "true #",
        "runs/adopted": "runs/mine",
    },
    "Several trainings vote": {},
    "Fair to whom": {"gender,region": "defendants"},
    "Score": {},
    "Why this label": {"RUN/answers/NAME ID --person NAME": "RUN 0"},
    "Hand it in": {},
    "Who answers": {},  # after those that mean the run's only answers
    "Ask it": {},
    "Serve": {},
    "Many cases": {
        "engine.data_parallel_size=8": "engine.data_parallel_size=1",
        ".ci/install python3 ray": "ls .ci/install",
        "ray start --head": "ray start --head --num-cpus=2 && .venv/bin/ray stop",
        "ray start --address=FIRST:6379": "ray --version",  # there is one machine here
        "ray=auto replicas=8": "",  # tests/torture/test_replicas.py has a cluster
    },
    "Export": {},
}
"""Heading -> what words of its commands become here, beside those of `MEANING`."""

MEANING = {
    "RUN_A": "runs/mine",
    "RUN_B": "runs/second",
    r"\bRUN\b(?!=)": "runs/mine",
    r"\b(GOLD|TEST)\b(?!=)": "test.jsonl",
    "=MODEL": "=tiny",
    "MODEL=…": "MODEL=tiny",
    "FOLDER": "runs/base/model",
    "TRAIN=…": "TRAIN=train.jsonl",
    "=…": "=secret",
}
"""Pattern -> what it stands for, in this order."""


BLOCKS = {
    part.partition("\n")[0]: commands(part)
    for page in ENGLISH
    for part in text(page).split("\n## ")[1:]
    if commands(part)
}
"""Heading -> the commands of its section."""


def meant(heading: str) -> Iterator[str]:
    """Yield the commands of a section as they are run."""
    for printed in BLOCKS[heading]:
        command = printed
        for word, meaning in WORDS[heading].items():
            command = command.replace(word, meaning)
        for pattern, meaning in MEANING.items():
            command = re.sub(pattern, meaning, command)
        yield command


def test_every_section_is_known_here() -> None:
    assert set(BLOCKS) == set(WORDS)


def copy_project(place: Path, workshop: Path) -> Path:
    """Make a copy of the project in which commands run: small configs, cases and models."""
    if not (Path(sys.prefix) / "installed").exists():
        pytest.skip("not installed by `make install`")
    ignored = shutil.ignore_patterns(".*", "build", "data", "runs")
    shutil.copytree(ROOT, place, ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(ROOT / ".ci", place / ".ci")
    for made in (*place.iterdir(), *(place / ".ci").iterdir()):
        os.utime(made, (0, 0))  # older than what is installed: nothing to do
    (place / ".venv").mkdir()
    for made in Path(sys.prefix).iterdir():
        if made.name in ("installed", "dev"):
            (place / ".venv" / made.name).write_text(str(place), "utf-8")
        else:
            (place / ".venv" / made.name).symlink_to(made)
    add_configs(place / "finetune/configs", workshop)
    (place / "Qwen").mkdir()
    for name in ("tiny", "Qwen/Qwen3-8B"):
        (place / name).symlink_to(workshop / "base/model")
    for name, source in (("train", "train"), ("test", "test"), ("test_a", "base")):
        lines = (workshop / f"demo/{source}.jsonl").read_text("utf-8").splitlines(True)
        (place / f"{name}.jsonl").write_text("".join(lines[:40]), "utf-8")
    return place


def add_configs(configs: Path, workshop: Path) -> None:
    small = configs / "qwen2.5-0.5b-cpu.yaml"
    # Compiling takes longer than few replies.
    eager = small.read_text("utf-8").replace("&engine\n", "&engine\n    enforce_eager: true\n")
    small.write_text(eager, "utf-8")
    for name, source in (("base", "base"), ("demo", "sft")):
        config = (workshop / f"{source}.yaml").read_text("utf-8")
        for there, here in (("demo", "data/demo"), ("base", "runs/base"), ("run", "runs/demo")):
            config = config.replace(f"{workshop}/{there}", here)
        (configs / f"{name}.yaml").write_text(config, "utf-8")


def follow(commands: Iterable[str], place: Path) -> None:
    """Run commands in order; what serves is served until the end, or the next that does."""
    with ExitStack() as served:
        for command in commands:
            if re.search(r"\b(?:make|panjue) serve\b", command):
                served.close()
                served.enter_context(serving(command, place))
                continue
            asked: Any = {**shell(command, place), "input": FACT, "text": True}
            done = subprocess.run(**asked, capture_output=True, check=False, timeout=LONGEST_S)
            assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def shell(command: str, place: Path) -> dict[str, Any]:
    """Return what subprocess needs to run a command as a user's shell does."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A GPU is not for these tests, whatever machine they run on.
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return {"args": ["bash", "-c", command], "cwd": place, "env": env}


@contextmanager
def serving(command: str, place: Path) -> Iterator[None]:
    """Run a command that serves until the block ends; enter when it can answer."""
    port = re.search(r"port=(\d+)", command)
    log = place / "server.log"
    url = f"http://127.0.0.1:{port[1] if port else 8000}"
    with log.open("wb") as out:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            **shell(command, place), stdout=out, stderr=out, start_new_session=True
        )
    try:
        until(lambda: is_ready(url) or process.poll() is not None, LONGEST_S)
        assert process.poll() is None, log.read_text("utf-8")[-3000:]
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def furnish(place: Path, heading: str) -> None:
    """Put there what a section takes for granted: a task's sample, to train on and to answer."""
    if heading == "Reading and cloze":
        for name in ("train", "dev"):
            shutil.copy(TASKS / "reading/sample.json", place / f"{name}.json")
            shutil.copy(TASKS / "cloze/sample.jsonl", place / f"{name}.jsonl")
        other = (place / "train.json").read_text("utf-8").replace("经审理查明", "本院查明")
        (place / "train.json").write_text(other, "utf-8")  # cases of DEV are not trained on
    if heading == "Long dialogues":
        for name in ("train", "test"):
            shutil.copytree(TASKS / "dialogue/sample.folder", place / name)


@pytest.fixture(scope="module")
def demo(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the copy in which the first section's commands have run: it has a finished run."""
    place = copy_project(tmp_path_factory.mktemp("project"), workshop)
    follow(meant(DEMO), place)
    shutil.copy(place / "data/demo/test.jsonl", place)
    for name in ("mine", "second"):
        shutil.copytree(place / "runs/demo", place / "runs" / name)
    return place


@pytest.mark.endurance
@pytest.mark.parametrize("heading", list(WORDS))
def test_every_command_of_a_section_runs(
    heading: str, workshop: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if heading == "Ask it" and not shutil.which("curl"):
        pytest.skip("there is no curl here")
    if heading in ALONE:
        place = copy_project(tmp_path, workshop)
        furnish(place, heading)
    else:
        place = request.getfixturevalue("demo")
    if heading != DEMO:  # its commands have run
        with RAY if heading == "Many cases" else nullcontext():
            follow(meant(heading), place)
