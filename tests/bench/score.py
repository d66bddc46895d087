"""Processor seconds to decode and to score many rows, by this checkout and by another one.

    python -m tests.bench.score ANSWERS FOLDER [--cases 30000] [--against CHECKOUT]

ANSWERS is the folder of a run's answers to a file of several-defendant cases. Its cases, with a
number after the facts, and its replies are repeated into FOLDER: a million take some 3 GB and 1 GB.
Both ways write their submission and scores, which are compared.
`make check` has run in both checkouts.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from panjue.prompts.plumbing.files import dump, read_lines, sha256
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
    scores = given.folder / "scores.json"
    commands = {
        "decode": (["decode", answers], answers / "submission.jsonl"),
        "score": (["score", cases, answers, "--json", scores], scores),
    }
    for name, (words, written) in commands.items():
        print(f"{name}: {given.cases} cases")
        compare_checkouts(words, written, given.against, given.rounds)
    print(f"{getrusage(RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f} GiB in the largest process")


def write_files(answers: Path, folder: Path, count: int) -> tuple[Path, Path]:
    """Write the cases, the run's adapter, and the folder of answers."""
    run = open_answers(answers)
    cases = folder / "cases.jsonl"
    result = folder / "run/answers/cases"
    trained = run.trained
    assert trained, "a training answered"
    shutil.copytree(trained.folder, folder / "run/adapter")
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
    run.record.model_copy(update=changed).write(result)
    return cases, result


def compare_checkouts(words: list[object], written: Path, other: Path, rounds: int) -> None:
    """Run a command by both checkouts in turns; say whether they write the same file."""
    hashes: dict[str, str] = {}

    def measured(way: str, checkout: Path) -> float:
        used = processor_seconds(checkout, words)
        hashes[way] = sha256(written)
        return used

    checkouts = {"this one": ROOT, "the other": other}
    ways = {way: partial(measured, way, checkout) for way, checkout in checkouts.items()}
    compare(ways, "processor seconds", "the other", rounds)
    print(f"both wrote the same {written.name}: {len(set(hashes.values())) == 1}")


def processor_seconds(checkout: Path, words: list[object]) -> float:
    """Run a command by the code of a checkout; return the processor time that it took."""
    command = [sys.executable, "-m", "panjue.prompts.cli", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "build/typing")}
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
