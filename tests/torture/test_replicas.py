"""Generation in a Ray cluster whose workers, machines and driver are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

PANJUE = str(Path(sys.executable).with_name("panjue"))
ENGINE = ("engine.dtype=float32", "engine.max_num_seqs=16", "engine.enforce_eager=true")
LONGEST_S = 900

pytestmark = pytest.mark.endurance

Record = Callable[[str, object], None]


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


class Running:
    """`panjue generate` with replicas, in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, answers: Path) -> None:
        self.process, self._log, self.answers = process, log, answers

    @property
    def said(self) -> str:
        """Return what it has printed."""
        return self._log.read_text("utf-8")

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        path = self.answers / "completions.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for something that comes before its end."""
        began = time.monotonic()
        while not until():
            assert self.process.poll() is None, self.said
            assert time.monotonic() - began < LONGEST_S, self.said
            time.sleep(0.1)

    def wait_for(self, text: str, after: str = "") -> None:
        """Wait until it has printed a text, after the last of another."""
        self.wait(lambda: text in self.said.rpartition(after)[2] if after else text in self.said)

    def end(self) -> None:
        """Wait for its end."""
        assert self.process.wait(timeout=LONGEST_S) == 0, self.said


@pytest.fixture
def generating(run: Path, cases: Path, nodes: Nodes) -> Callable[..., Any]:
    """Return what generates into answers of this name, in the cluster, within a block."""

    @contextmanager
    def block(name: str, *words: str) -> Iterator[Running]:
        log = run / f"{name}.log"
        given = ["generate", str(run), str(cases / "test.jsonl"), f"answers={name}", *ENGINE]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [PANJUE, *given, *words],
                stdout=out,
                stderr=out,
                env={**os.environ, "RAY_ADDRESS": nodes.address},
            )
            try:
                yield Running(process, log, run / "answers" / name)
            finally:
                process.kill()
                process.wait()

    return block


def test_undisturbed_replicas_answer_as_one_process_does(
    generating: Any, once: Path, same: Any, record_property: Record
) -> None:
    with generating("undisturbed", "ray=auto", "replicas=2") as job:
        job.end()
        assert "given out again" not in job.said
    ties = same(job.answers, once)
    record_property("figure", f"{job.rows} cases, {ties} with a near tie")


def test_killed_replicas_and_machines_lose_nothing(
    nodes: Nodes, generating: Any, once: Path, same: Any, record_property: Record
) -> None:
    one, two = "1 of 2 replicas", "2 of 2 replicas"
    # So slow that every replica that is killed is back before the end.
    with generating("cluster", "ray=auto", "replicas=2", "in_flight=1") as job:
        job.wait_for(two)
        job.wait(lambda: job.rows >= 6)
        nodes.workers()[0].kill()
        job.wait_for(one)
        job.wait_for(two, after=one)
        nodes.say("kill")
        job.wait_for(one, after=two)
        nodes.say("add")
        job.wait_for(two, after=one)
        job.end()
    [*_, line] = [line for line in job.said.splitlines() if line.endswith("given out again")]
    record_property("figure", f"{line}, {same(job.answers, once)} with a near tie")


def test_a_killed_driver_ends_its_replicas_and_resumes(
    nodes: Nodes, generating: Any, once: Path, same: Any
) -> None:
    for number in (signal.SIGKILL, signal.SIGINT):
        with generating("driver", "ray=auto", "replicas=2", "in_flight=2") as job:
            wanted = job.rows + 20
            job.wait(lambda: job.rows >= wanted)  # noqa: B023
            job.process.send_signal(number)
            job.process.wait(timeout=60)
            said = "run the same command to resume" in job.said
            assert said == (number == signal.SIGINT), job.said
        _gone, alive = psutil.wait_procs(nodes.workers(), timeout=60)
        assert not alive, f"replicas outlive their driver: {alive}"
    with generating("driver") as job:  # without Ray
        job.end()
    same(job.answers, once)
