"""From the command to the first reply: `panjue generate`, the engine compiled or not.

    python tests/bench/startup.py RUN CASES.jsonl [--cases 24] [--rounds 3] [--set key=value …]

RUN is a finished LoRA training. A cold start finds neither the merged model nor what vLLM and torch
have compiled before; a warm one finds both. Each way runs in turns, as a whole command. Prints the
medians of the seconds to the first row on the disk and to the end, with the least and the most.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from panjue.prompts.plumbing.files import lines

WAYS = {
    "compiled": ["engine.enforce_eager=false"],
    "not compiled": ["engine.enforce_eager=true"],
}


def main() -> None:
    """Run every way in turns and print the table."""
    options = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = folder / "cases.jsonl"
        chosen = islice(lines(options.cases_file), options.cases)
        cases.write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for _, line in chosen))
        seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(options.rounds):
            for way, words in WAYS.items():
                place = folder / f"{way} {number}".replace(" ", "-")  # inductor's g++ needs it
                shutil.copytree(options.run / "adapter", place / "adapter")
                shutil.copy(options.run / "config.yaml", place)
                for start in ("cold", "warm"):
                    shutil.rmtree(place / "answers", ignore_errors=True)
                    found = timed(place, cases, [*words, *options.set])
                    seconds.setdefault((way, start), []).append(found)
                    print(f"round {number + 1}, {way}, {start}: {found}", flush=True)
                shutil.rmtree(place)
    table = Table("", "start", "first reply, s", "end, s")
    for (way, start), each in seconds.items():
        table.add_row(way, start, *(figures(list(part)) for part in zip(*each, strict=True)))
    Console().print(table)
    print(f"{options.cases} cases, {options.rounds} rounds, medians (least - most)")


def timed(place: Path, cases: Path, words: list[str]) -> tuple[float, float]:
    """Return the seconds to the first row and to the end of one command."""
    caches = {"VLLM_CACHE_ROOT": place / "vllm", "TORCHINDUCTOR_CACHE_DIR": place / "inductor"}
    command = [Path(sys.executable).with_name("panjue"), "generate", place, cases, *words]
    rows = place / "answers/cases/completions.jsonl"
    began, first = time.perf_counter(), 0.0
    env = {**os.environ, **{name: str(path) for name, path in caches.items()}}
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, env=env) as run:
        while run.poll() is None:
            if not first and rows.exists() and rows.stat().st_size:
                first = time.perf_counter() - began
            time.sleep(0.05)
    end = time.perf_counter() - began
    assert run.returncode == 0, "the command has printed why"
    return round(first or end, 1), round(end, 1)


def figures(seconds: list[float]) -> str:
    """Return the median, the least and the most."""
    return f"{median(seconds):.1f} ({min(seconds):.1f} - {max(seconds):.1f})"


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("cases_file", type=Path)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="further settings")
    return parser.parse_args()


if __name__ == "__main__":
    main()
