"""Generation in a Ray cluster whose workers, machines and driver are killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from panjue.prompts.tasks.judgment.demo import write_demo
from tests.served import left_of
from tests.torture.conftest import ENGINE, MODEL, RAY, Job, check_same, panjue

pytestmark = pytest.mark.endurance


class Nodes:
    """The cluster of `nodes.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self.say("")

    def say(self, word: str) -> str:
        """Have it do something; return what it answers."""
        assert self._process.stdin
        assert self._process.stdout
        if word:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the replicas, oldest first."""
        tree = psutil.Process(self._process.pid).children(recursive=True)
        found = [each for each in tree if each.name().startswith("ray::Replica")]
        return sorted(found, key=psutil.Process.create_time)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Start the cluster."""
    words = [sys.executable, str(Path(__file__).with_name("nodes.py"))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with RAY, subprocess.Popen(words, stderr=subprocess.DEVNULL, **pipes) as process:
        yield Nodes(process)
        assert process.stdin
        process.stdin.close()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return so many cases that all replicas are back before the end, also on a fast machine."""
    folder = tmp_path_factory.mktemp("many")
    write_demo(folder, {"test": 1000})
    return folder / "test.jsonl"


@pytest.fixture(scope="module")
def once(run: Path, cases: Path) -> Path:
    """Return the folder of answers to these cases that nobody disturbed."""
    panjue("generate", run, cases, "answers=many", MODEL, *ENGINE)
    return run / "answers/many"


def wait_for(job: Job, text: str, after: str = "") -> None:
    """Wait until the job has printed a text, after the last of another."""
    job.wait(lambda: text in (job.said.rpartition(after)[2] if after else job.said))


def test_killed_replicas_and_machines_lose_nothing(nodes: Nodes, job: Job, once: Path) -> None:
    one, two = "1 of 2 replicas", "2 of 2 replicas"
    words = ("ray=auto", "replicas=2", "in_flight=1")
    job.start(*words, RAY_ADDRESS=nodes.address)
    wait_for(job, two)
    job.wait(lambda: job.rows >= 6)
    nodes.workers()[0].kill()
    wait_for(job, one)
    wait_for(job, two, after=one)
    nodes.say("kill")
    wait_for(job, one, after=two)
    nodes.say("add")
    wait_for(job, two, after=one)
    job.end()
    assert "given out again" in job.said
    check_same(job.answers, once)


def test_a_killed_driver_ends_its_replicas_and_resumes(nodes: Nodes, job: Job, once: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGINT):
        wanted = job.rows + 20
        job.start("ray=auto", "replicas=2", "in_flight=2", RAY_ADDRESS=nodes.address)
        job.wait(lambda: job.rows >= wanted)  # noqa: B023
        job.process.send_signal(number)
        job.process.wait(timeout=60)
        said = "run the same command to resume" in job.said
        assert said == (number == signal.SIGINT), job.said
        assert left_of(nodes.workers()) == [], "replicas outlive their driver"
    job.finish()  # without Ray
    check_same(job.answers, once)
