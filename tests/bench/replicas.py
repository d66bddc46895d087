"""Generation in a Ray cluster: what a second replica gains, and what the driver can take.

    python tests/bench/replicas.py CONFIG.yaml CASES.jsonl [--rounds 3]
    python tests/bench/replicas.py --driver CASES.jsonl [--rounds 3]

Both print the medians of the rounds, the least and the most.
The first answers CASES with the settings of CONFIG (as `panjue generate` has it), in turns: one
engine with a thread for each core, and replicas with a core each, all on this machine. Its rates
are from the first row to the last, so without the starts.
The second has fakes of the engine answer at once, so that the driver alone is at work: it reads the
cases, shares them out and writes the rows. Give it some ten thousand cases.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import ray

from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.fleet import Fleet, cluster
from panjue.serve.generate import append
from panjue.serve.work import Row, Step, Work, batches

CORES = len(os.sched_getaffinity(0))
IN_FLIGHT = 256


def main() -> None:
    """Measure one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("cases", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--driver", action="store_true")
    options = parser.parse_args()
    if options.driver:
        measure_driver(options.cases, options.rounds)
    else:
        compare(options.config, options.cases, options.rounds)


class Instant:
    """A replica whose engine answers at once, with a row as long as that of a real case."""

    def start(self) -> None:
        """Do nothing."""

    def answer(self, examples: list[Example], _: dict[str, Row]) -> Iterator[Step]:
        """Yield the rows of a batch, `IN_FLIGHT` at a time."""
        reply = json.dumps([{"name": "被告人", "charges": ["盗窃罪"], "articles": ["264"]}] * 2)
        row = {"texts": [reply], "finish": ["stop"], "alternatives": [], "completion_tokens": 80}
        for begin in range(0, len(examples), IN_FLIGHT):
            part = examples[begin : begin + IN_FLIGHT]
            rows = [{"id": example.id, **row} for example in part]
            yield Step(rows, begin + len(part))


def measure_driver(cases: Path, rounds: int) -> None:
    """Print how many rows a second the driver passes on."""
    reader = Reader(load_task("judgment"))
    count = sum(1 for _ in reader.read(cases))
    rates = []
    with tempfile.TemporaryDirectory() as folder, cluster("local"):
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
        for number in range(rounds):
            fakes = [ray.remote(Instant).options(num_cpus=0).remote() for _ in range(2)]
            work = Work(reader.read(cases), count, None)
            fleet = Fleet(fakes, batches(work, len(fakes), IN_FLIGHT))
            fleet.wait_for_first()
            began = time.monotonic()
            append(Path(folder) / f"completions-{number}.jsonl", fleet.steps(), 0, count)
            rates.append(count / (time.monotonic() - began))
    print(f"{count:,} rows a round, {figures(rates, 0)} rows/s")


def compare(config: Path, cases: Path, rounds: int) -> None:
    """Print the rates of one engine and of replicas, in turns."""
    ways = {
        f"one engine, {CORES} threads": ({"OMP_NUM_THREADS": str(CORES)}, []),
        f"{CORES} replicas": ({}, ["ray=local", f"replicas={CORES}"]),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (variables, words) in ways.items():
            rates[name].append(rate(config, cases, variables, words))
            print(f"{name}: {rates[name][-1]:.2f} cases/s", flush=True)
    for name, each in rates.items():
        print(f"{name}: {figures(each, 1)} cases/s")
    one, many = (median(each) for each in rates.values())
    print(f"ratio {many / one:.2f}")


def figures(rates: list[float], digits: int) -> str:
    """Return the median, the least and the most."""
    return f"{median(rates):,.{digits}f} ({min(rates):,.{digits}f} - {max(rates):,.{digits}f})"


def rate(config: Path, cases: Path, variables: dict[str, str], words: list[str]) -> float:
    """Return the cases a second between the first row and the last."""
    panjue = str(Path(sys.executable).with_name("panjue"))
    with tempfile.TemporaryDirectory() as folder:
        command = [panjue, "generate", str(config), f"run={folder}", f"test={cases}", "answers=a"]
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **variables}
        rows = Path(folder) / "answers/a/completions.jsonl"
        began = 0.0
        with subprocess.Popen([*command, *words], env=environment) as process:
            while process.poll() is None:
                if not began and rows.exists() and rows.stat().st_size:
                    began = time.monotonic()
                time.sleep(0.02)
        seconds = rows.stat().st_mtime - (time.time() - time.monotonic() + began)
        return len(rows.read_bytes().splitlines()) / seconds


if __name__ == "__main__":
    main()
