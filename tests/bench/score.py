"""Seconds to decode and to score many rows, by this checkout and by another one.

    python -m tests.bench.score ANSWERS FOLDER [--cases 30000] [--against CHECKOUT]

ANSWERS is the folder of a run's answers to a file of several-defendant cases. Its cases, with a
number after the facts, and its replies are repeated into FOLDER: a million take some 3 GB and 1 GB.
`make check` has run in both checkouts.
"""

import os
import shutil
import subprocess
import sys
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from panjue.prompts.plumbing.files import dump, read_lines, sha256
from panjue.prompts.plumbing.run import Answers
from panjue.serve.answers import open_answers
from tests.bench.common import compare, parser

ROOT = Path(__file__).parents[2]
OWN = ("completions.jsonl", "decode.json", "scores.json")  # files that are made for FOLDER


def main() -> None:
    """Write the files, run both commands by each checkout and print the tables."""
    options = parser(__doc__, "answers", "folder")
    options.add_argument("--cases", type=int, default=30_000)
    options.add_argument("--against", type=Path, default=ROOT)
    given = options.parse_args()
    given.folder.mkdir(parents=True)
    cases, answers = write_files(given.answers, given.folder, given.cases)
    for words in (["decode", answers], ["score", cases, answers]):
        print(f"{words[0]}: {given.cases} cases")
        checkouts = {"this one": ROOT, "the other": given.against}
        ways = {name: partial(seconds, place, words) for name, place in checkouts.items()}
        compare(ways, "seconds", "the other", given.rounds)
    print(f"{getrusage(RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f} GiB in the largest process")


def write_files(answers: Path, folder: Path, count: int) -> tuple[Path, Path]:
    """Write the cases, the run's adapter, and the folder of answers."""
    run = open_answers(answers)
    cases = folder / "cases.jsonl"
    result = folder / "run/answers/cases"
    trained = run.answers.trained
    assert trained, "a training answered"
    shutil.copytree(trained, folder / "run/adapter")
    shutil.copytree(run.folder, result, ignore=shutil.ignore_patterns(*OWN))
    rows = [row for _, row in read_lines(run.folder / "completions.jsonl")]
    by_id = {row["id"]: row for row in rows}
    known = [row for _, row in read_lines(run.test) if row["id"] in by_id]
    with (
        cases.open("w", encoding="utf-8") as facts,
        (result / "completions.jsonl").open("w", encoding="utf-8") as replies,
    ):
        for number, row in enumerate(islice(cycle(known), count)):
            # What is held out and what the classifier is fitted on depend on a hash of the facts.
            facts.write(dump({**row, "id": number, "fact": f"{row['fact']}{number}"}) + "\n")
            replies.write(dump({**by_id[row["id"]], "id": number}) + "\n")
    changed = {
        "test": str(cases.resolve()),
        "test_sha256": sha256(cases),
        "trained": str((folder / "run/adapter").resolve()),
    }
    Answers(run.folder).record.model_copy(update=changed).write(result)
    return cases, result


def seconds(checkout: Path, words: list[object]) -> float:
    """Run a command by the code of a checkout; return its seconds."""
    command = [sys.executable, "-m", "panjue.prompts.cli", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "build/typing")}
    began = time.perf_counter()
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
