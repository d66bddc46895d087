"""Every command of the pages runs as it is printed, in a copy of the project.

Words that stand for something of the user's (`RUN`, `TRAIN=…`) are replaced, sizes are small, and
the configs are those of these tests; everything else is verbatim. tests/test_readme.py holds every
command to what `make` and `panjue` take, without running it.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.torture.test_proxies import is_ready

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "prompts/tasks"
SAMPLE = "serve/page/sample.txt"
FACT = (ROOT / SAMPLE).read_text("utf-8")
LONGEST_S = 600
DEMO = "See it work"
AFTER_DEMO = {
    *("Ask it", "Serve", "Many cases", "Export", "Score", "Fair to whom", "Hand it in"),
    "How an answer is decided",
}
"""The sections whose commands need the demo's finished run."""

TRAINED = "runs/qwen2.5-0.5b-cpu"
WORDS: dict[str, dict[str, str]] = {
    DEMO: {},
    "Your own cases, a real model": {"runs/qwen3-8b-lora": TRAINED},
    "Settings": {},
    "Groups": {"make sft": "make sft CONFIG=demo"},
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
    "Fair to whom": {"gender,region": "defendants"},
    "Score": {},
    "Hand it in": {},
    "How an answer is decided": {},  # after those that mean the run's only answers
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


def sections() -> Iterator[tuple[str, list[str]]]:
    """Yield heading and commands of every section that has some, continued lines joined."""
    for folder in (".", "finetune", "serve", "eval", "prompts"):
        page = (ROOT / folder / "README.md").read_text("utf-8")
        for part in page.split("\n## ")[1:]:
            blocks = re.findall(r"^```sh\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
            lines = "".join(blocks).replace("\\\n", " ").splitlines()
            if lines:
                heading = part.partition("\n")[0]
                yield heading, [re.sub(r"\s+# .*", "", line).strip() for line in lines]


BLOCKS = dict(sections())


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


class House:
    """A copy of the project in which commands run."""

    def __init__(self, place: Path, workshop: Path) -> None:
        if not (Path(sys.prefix) / "installed").exists():
            pytest.skip("not installed by `make install`")
        self.place = place
        shutil.copytree(ROOT / ".ci", place / ".ci")
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, place)
        for made in (*place.iterdir(), *(place / ".ci").iterdir()):
            os.utime(made, (0, 0))  # older than what is installed: nothing to do
        (place / ".venv").symlink_to(sys.prefix)
        self._add_configs(workshop)
        (place / "Qwen").mkdir()
        for name in ("tiny", "Qwen/Qwen3-8B"):
            (place / name).symlink_to(workshop / "base/model")
        for name, source in (("train", "train"), ("test", "test"), ("test_a", "base")):
            lines = (workshop / f"demo/{source}.jsonl").read_text("utf-8").splitlines(True)
            (place / f"{name}.jsonl").write_text("".join(lines[:40]), "utf-8")
        (place / SAMPLE).parent.mkdir(parents=True)
        (place / SAMPLE).write_text(FACT, "utf-8")

    def _add_configs(self, workshop: Path) -> None:
        configs = self.place / "finetune/configs"
        shutil.copytree(ROOT / "finetune/configs", configs)
        small = configs / "qwen2.5-0.5b-cpu.yaml"
        # Compiling takes longer than few replies.
        eager = small.read_text("utf-8").replace("&engine\n", "&engine\n    enforce_eager: true\n")
        small.write_text(eager, "utf-8")
        for name, source in (("base", "base"), ("demo", "sft")):
            text = (workshop / f"{source}.yaml").read_text("utf-8")
            for there, here in (("demo", "data/demo"), ("base", "runs/base"), ("run", "runs/demo")):
                text = text.replace(f"{workshop}/{there}", here)
            (configs / f"{name}.yaml").write_text(text, "utf-8")

    def run(self, command: str) -> str:
        """Run one command as a user's shell does."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.place,
            env=environment(),
            input=FACT,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def follow(self, commands: Sequence[str]) -> None:
        """Run commands in order; what serves is served until the end, or the next that does."""
        with ExitStack() as served:
            for command in commands:
                if re.search(r"\b(?:make|panjue) serve\b", command):
                    served.close()
                    port = re.search(r"port=(\d+)", command)
                    served.enter_context(self.serving(command, int(port[1]) if port else 8000))
                else:
                    self.run(command)

    @contextmanager
    def serving(self, command: str, port: int) -> Iterator[None]:
        """Run a command that serves until the block ends; enter when it can answer."""
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.fail(f"something else answers at port {port}: end it first")
        log = self.place / "server.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.place,
                env=environment(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            latest = time.monotonic() + LONGEST_S
            while not is_ready(f"http://127.0.0.1:{port}"):
                is_running = process.poll() is None and time.monotonic() < latest
                assert is_running, log.read_text("utf-8")[-3000:]
                time.sleep(1)
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A GPU is not for these tests, whatever machine they run on.
    return {**os.environ, "PATH": path, "MAKEFLAGS": "GPU=", "CUDA_VISIBLE_DEVICES": ""}


def furnish(place: Path, heading: str) -> None:
    """Put there what a section takes for granted: a task's sample, to train on and to answer."""
    if heading == "Reading and cloze":
        for name in ("train", "dev"):
            shutil.copy(TASKS / "reading/sample.json", place / f"{name}.json")
            shutil.copy(TASKS / "cloze/sample.jsonl", place / f"{name}.jsonl")
        other = (place / "train.json").read_text("utf-8").replace("经审理查明", "本院查明")
        (place / "train.json").write_text(other, "utf-8")  # cases of DEV are not trained on
    if heading == "Groups":
        shutil.copy(TASKS / "severity/sample.jsonl", place / "train.jsonl")
    if heading == "Long dialogues":
        for name in ("train", "test"):
            shutil.copytree(TASKS / "dialogue/sample.folder", place / name)


@pytest.fixture(scope="module")
def demo(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> House:
    """Return the house in which the first section's commands have run: it has a finished run."""
    house = House(tmp_path_factory.mktemp("house"), workshop)
    house.follow(list(meant(DEMO)))
    shutil.copy(house.place / "data/demo/test.jsonl", house.place)
    for name in ("mine", "second"):
        shutil.copytree(house.place / "runs/demo", house.place / "runs" / name)
    return house


@pytest.mark.endurance
@pytest.mark.parametrize("heading", list(WORDS))
def test_every_command_of_a_section_runs(
    heading: str, workshop: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if heading == "Ask it" and not shutil.which("curl"):
        pytest.skip("there is no curl here")
    needs_demo = heading in {DEMO, *AFTER_DEMO}
    house = request.getfixturevalue("demo") if needs_demo else House(tmp_path, workshop)
    furnish(house.place, heading)
    commands = [] if heading == DEMO else list(meant(heading))
    house.follow(commands)
