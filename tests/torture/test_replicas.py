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
LONGEST_S = 900


class Nodes:
    """The cluster of `nodes.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self.tell("")

    def tell(self, word: str) -> str:
        """Have it do something; return what it says."""
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

    def __init__(self, process: subprocess.Popen[bytes], log: Path, completions: Path) -> None:
        self.process, self._log, self._completions = process, log, completions

    @property
    def told(self) -> str:
        """Return what it has printed."""
        return self._log.read_text("utf-8")

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        path = self._completions
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for something that comes before its end."""
        began = time.monotonic()
        while not until():
            assert self.process.poll() is None, self.told
            assert time.monotonic() - began < LONGEST_S, self.told
            time.sleep(0.1)

    def wait_for(self, rows: int) -> None:
        """Wait until there are so many rows."""
        self.wait(lambda: self.rows >= rows)

    def end(self) -> None:
        """Wait for its end."""
        assert self.process.wait(timeout=LONGEST_S) == 0, self.told


@contextmanager
def generating(config: Path, nodes: Nodes, *words: str) -> Iterator[Running]:
    """Generate in the cluster within the block."""
    log, completions = config.with_suffix(".log"), answers_of(config) / "completions.jsonl"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [PANJUE, "generate", str(config), str(config / "cases.jsonl"), "ray=auto", *words],
            stdout=out,
            stderr=out,
            env={**os.environ, "RAY_ADDRESS": nodes.address},
        )
        try:
            yield Running(process, log, completions)
        finally:
            process.kill()
            process.wait()


def answers_of(config: Path) -> Path:
    return config / "answers/test"


@pytest.mark.endurance
@pytest.mark.promise("replicas answer as one process does")
def test_undisturbed_replicas(
    nodes: Nodes, make: Callable[[str], Path], once: Path, same: Any, promise: Any
) -> None:
    config = make("undisturbed")
    with promise.attempt(), generating(config, nodes, "replicas=2") as run:
        run.end()
        assert "given out again" not in run.told
        promise.tell(f"{run.rows} cases, {same(answers_of(config), once)} with a near tie")


@pytest.mark.promise("generation in a cluster survives kill -9")
def test_kills_in_a_cluster(
    nodes: Nodes, make: Callable[[str], Path], once: Path, same: Any, promise: Any, full: bool
) -> None:
    config, replicas = make("cluster"), 2 if full else 1
    # So slow that every replica that is killed is back before the end.
    words = [f"replicas={replicas}", f"in_flight={1 if full else 2}"]
    with promise.attempt(), generating(config, nodes, *words) as run:
        run.wait(
            lambda: run.rows >= 6 and (f"{replicas} of {replicas} replicas" in run.told or not full)
        )
        if full:
            run.wait(lambda: "2 of 2 replicas" in run.told)
        nodes.workers()[0].kill()
        if full:
            run.wait(lambda: "1 of 2 replicas" in run.told)
            run.wait(lambda: "2 of 2 replicas" in run.told.rpartition("1 of 2 replicas")[2])
            nodes.tell("kill")
            run.wait(lambda: "1 of 2 replicas" in run.told.rpartition("2 of 2 replicas")[2])
            nodes.tell("add")
            run.wait(lambda: "2 of 2 replicas" in run.told.rpartition("1 of 2 replicas")[2])
        run.end()
        [*_, line] = [line for line in run.told.splitlines() if line.endswith("given out again")]
        promise.tell(f"{line}, {same(answers_of(config), once)} with a near tie")


@pytest.mark.endurance
@pytest.mark.promise("generation in a cluster survives kill -9")
def test_kills_of_the_driver(
    nodes: Nodes, make: Callable[[str], Path], once: Path, same: Any, promise: Any
) -> None:
    config = make("driver")
    with promise.attempt():
        for number in (signal.SIGKILL, signal.SIGINT):
            with generating(config, nodes, "replicas=2", "in_flight=2") as run:
                wanted = run.rows + 20
                run.wait_for(wanted)
                run.process.send_signal(number)
                run.process.wait(timeout=60)
                said = "run the same command to resume" in run.told
                assert said == (number == signal.SIGINT), run.told
            _gone, alive = psutil.wait_procs(nodes.workers(), timeout=60)
            assert not alive, f"replicas outlive their driver: {alive}"
        with generating(config, nodes, "replicas=1") as run:
            run.wait_for(100)
            run.process.kill()
        words = [PANJUE, "generate", str(config), str(config / "cases.jsonl")]
        subprocess.run(words, timeout=LONGEST_S, check=True)
        promise.tell(f"driver: {same(answers_of(config), once)} with a near tie")
