"""From the command to the first reply: `panjue generate`, the engine compiled or not.

    python -m tests.bench.startup RUN CASES.jsonl [--set key=value …]

RUN is a finished LoRA training. A cold start finds neither the merged model nor what vLLM and torch
have compiled before; a warm one finds both. Each way runs in turns, as a whole command.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.bench.common import compare, parser

PANJUE = Path(sys.executable).with_name("panjue")


def main() -> None:
    """Run every way in turns and print the table."""
    options = parser(__doc__, "run", "cases")
    options.add_argument("--set", nargs="*", default=[], help="further settings")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        ways = {}
        for way, is_eager in (("not compiled", "true"), ("compiled", "false")):
            copy = Path(name, way.replace(" ", "-"))  # inductor's g++ takes no spaces
            command = [PANJUE, "generate", copy, given.cases.resolve(), *given.set]
            command.append(f"engine.enforce_eager={is_eager}")
            ways[f"{way}, cold"] = partial(first_reply, command, copy, given.run)
            ways[f"{way}, warm"] = partial(first_reply, command, copy)
        compare(ways, "seconds", "not compiled, warm", given.rounds)


def first_reply(command: list[object], copy: Path, fresh: Path | None = None) -> float:
    """Return the seconds to the first row of a command; first copy the run `fresh`, if given."""
    if fresh:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(fresh / "adapter", copy / "adapter")
        shutil.copy(fresh / "config.yaml", copy)
    shutil.rmtree(copy / "answers", ignore_errors=True)
    caches = {"VLLM_CACHE_ROOT": f"{copy}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{copy}/inductor"}
    words = list(map(str, command))
    began = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, **caches}) as run:
        while not any(file.stat().st_size for file in copy.glob("answers/*/completions.jsonl")):
            assert run.poll() is None, "the command has printed why it ended"
            time.sleep(0.05)
        seconds = time.perf_counter() - began
        run.terminate()
    return seconds


if __name__ == "__main__":
    main()
