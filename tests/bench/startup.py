"""From the command to the first reply: `panjue generate`, the engine compiled or not.

    python -m tests.bench.startup RUN CASES.jsonl [--cases 24] [--rounds 3] [--set key=value …]

RUN is a finished LoRA training. A cold start finds neither the merged model nor what vLLM and torch
have compiled before; a warm one finds both. Each way runs in turns, as a whole command. Prints the
medians of the seconds to the first row on the disk and to the end, with the least and the most.
"""

import os
import shutil
import subprocess
import tempfile
import time
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.prompts.plumbing.files import dump, read_lines
from tests.bench.common import PANJUE, parser, spread

WAYS = {"compiled": "engine.enforce_eager=false", "not compiled": "engine.enforce_eager=true"}


def main() -> None:
    """Run every way in turns and print the table."""
    options = parser(__doc__)
    options.add_argument("run", type=Path)
    options.add_argument("cases_file", type=Path)
    options.add_argument("--cases", type=int, default=24)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--set", nargs="*", default=[], help="further settings")
    given = options.parse_args()
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        cases = Path(name, "cases.jsonl")
        rows = islice(read_lines(given.cases_file), given.cases)
        cases.write_text("".join(f"{dump(row)}\n" for _, row in rows), "utf-8")
        for number in range(given.rounds):
            for way, word in WAYS.items():
                place = Path(name, f"{way} {number}".replace(" ", "-"))  # inductor's g++ needs it
                shutil.copytree(given.run / "adapter", place / "adapter")
                shutil.copy(given.run / "config.yaml", place)
                for start in ("cold", "warm"):
                    shutil.rmtree(place / "answers", ignore_errors=True)
                    found = timed(place, cases, [word, *given.set])
                    seconds.setdefault((way, start), []).append(found)
                    print(f"round {number + 1}, {way}, {start}: {found}", flush=True)
                shutil.rmtree(place)
    table = Table("", "start", "first reply, s", "end, s")
    for (way, start), each in seconds.items():
        first, end = zip(*each, strict=True)
        table.add_row(way, start, spread(first), spread(end))
    Console().print(table)
    print(f"{given.cases} cases, {given.rounds} rounds, medians (least - most)")


def timed(place: Path, cases: Path, words: list[str]) -> tuple[float, float]:
    """Return the seconds to the first row and to the end of one command."""
    caches = {"VLLM_CACHE_ROOT": f"{place}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{place}/inductor"}
    command = [PANJUE, "generate", str(place), str(cases), *words]
    rows = place / "answers/cases/completions.jsonl"
    began, first = time.perf_counter(), 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **caches}) as run:
        while run.poll() is None:
            if not first and rows.exists() and rows.stat().st_size:
                first = time.perf_counter() - began
            time.sleep(0.05)
    assert run.returncode == 0, "the command has printed why"
    return round(first, 1), round(time.perf_counter() - began, 1)


if __name__ == "__main__":
    main()
