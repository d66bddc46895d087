"""Generation in a Ray cluster whose workers, machines and driver are killed."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

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
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, **pipes) as process:
        yield Nodes(process)
        assert process.stdin
        process.stdin.close()
        process.wait(timeout=60)


@pytest.fixture
def start(nodes: Nodes) -> Callable[..., None]:
    """Return what starts a job in the cluster."""
    return lambda job, *words: job.start("ray=auto", *words, RAY_ADDRESS=nodes.address)


def wait_for(job: Any, text: str, after: str = "") -> None:
    """Wait until the job has printed a text, after the last of another."""
    job.wait(lambda: text in (job.said.rpartition(after)[2] if after else job.said))


def test_undisturbed_replicas_answer_as_one_process_does(
    job: Any, start: Any, once: Path, same: Any
) -> None:
    undisturbed = job("undisturbed")
    start(undisturbed, "replicas=2")
    undisturbed.end()
    assert "given out again" not in undisturbed.said
    same(undisturbed.answers, once)


def test_killed_replicas_and_machines_lose_nothing(
    nodes: Nodes, job: Any, start: Any, once: Path, same: Any
) -> None:
    one, two, killed = "1 of 2 replicas", "2 of 2 replicas", job("cluster")
    start(killed, "replicas=2", "in_flight=1")  # every replica is back before the end
    wait_for(killed, two)
    killed.wait(lambda: killed.rows >= 6)
    nodes.workers()[0].kill()
    wait_for(killed, one)
    wait_for(killed, two, after=one)
    nodes.say("kill")
    wait_for(killed, one, after=two)
    nodes.say("add")
    wait_for(killed, two, after=one)
    killed.end()
    assert "given out again" in killed.said
    same(killed.answers, once)


def test_a_killed_driver_ends_its_replicas_and_resumes(
    nodes: Nodes, job: Any, start: Any, once: Path, same: Any
) -> None:
    driven = job("driver")
    for number in (signal.SIGKILL, signal.SIGINT):
        wanted = driven.rows + 20
        start(driven, "replicas=2", "in_flight=2")
        driven.wait(lambda: driven.rows >= wanted)  # noqa: B023
        driven.process.send_signal(number)
        driven.process.wait(timeout=60)
        said = "run the same command to resume" in driven.said
        assert said == (number == signal.SIGINT), driven.said
        _gone, alive = psutil.wait_procs(nodes.workers(), timeout=60)
        assert not alive, f"replicas outlive their driver: {alive}"
    driven.start()  # without Ray
    driven.end()
    same(driven.answers, once)
