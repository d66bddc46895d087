"""A million cases on one machine: minutes and memory of every stage that needs no model.

    python tests/bench/million.py ANSWERS FOLDER [--cases 1000000]

ANSWERS is the folder of a run's answers to a file of several-defendant cases. Its cases, with a
number after the facts, and its replies are repeated into FOLDER (a million take some 3 GB and 2 GB)
and read, decoded without a decision rule, and scored, each by its own command. Prints the minutes
of each and the memory of its largest process.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.eval.answers import open_answers
from panjue.prompts.model import DECISION
from panjue.prompts.plumbing.files import dump, read_lines, sha256
from panjue.prompts.plumbing.run import Answers

PANJUE = str(Path(sys.executable).with_name("panjue"))
READ = """
import sys
from pathlib import Path
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
print(sum(1 for _ in Reader(load_task("judgment")).read(Path(sys.argv[1]))))
"""


def main() -> None:
    """Write the files, run the stages and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=1_000_000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    cases, answers = write_files(options.answers, options.folder, options.cases)
    alone = options.folder / "submission.jsonl"  # beside no run: no column of the classifier
    alone.symlink_to((answers / "submission.jsonl").resolve())
    table = Table("stage", "minutes", "GiB of the largest process")
    for stage, words in {
        "read": [sys.executable, "-c", READ, cases],
        "decode": [PANJUE, "decode", answers],
        "score": [PANJUE, "score", cases, alone],
        "score, with the classifier's column": [PANJUE, "score", cases, answers],
    }.items():
        seconds, memory = measured([str(word) for word in words])
        table.add_row(stage, f"{seconds / 60:.1f}", f"{memory:.2f}")
        print(f"{stage}: {seconds:.0f} s, {memory:.2f} GiB", flush=True)
    print(f"{options.cases} cases, {cases.stat().st_size / 1e9:.1f} GB, {os.cpu_count()} cores")
    Console().print(table)


def write_files(answers: Path, folder: Path, count: int) -> tuple[Path, Path]:
    """Write the cases, the run's adapter without its decision rule, and the folder of answers."""
    run = open_answers(answers)
    cases, result = folder / "cases.jsonl", folder / "run/answers/cases"
    shutil.copytree(
        run.trained, folder / "run/adapter", ignore=shutil.ignore_patterns(DECISION, "*.log")
    )
    shutil.copytree(
        run.folder, result, ignore=lambda *_: ["completions.jsonl", "decode.json", "scores.json"]
    )
    rows = [row for _, row in read_lines(run.folder / "completions.jsonl")]
    by_id = {row["id"]: row for row in rows}
    known = [row for _, row in read_lines(run.test) if row["id"] in by_id]
    write_rows(cases, known, count, numbered="fact")
    write_rows(result / "completions.jsonl", [by_id[row["id"]] for row in known], count)
    changed = {
        "test": str(cases.resolve()),
        "test_sha256": sha256(cases),
        "trained": str((folder / "run/adapter").resolve()),
    }
    Answers(run.folder).record.model_copy(update=changed).write(result)
    return cases, result


def write_rows(
    path: Path, rows: list[dict[str, object]], count: int, numbered: str | None = None
) -> None:
    """Write the rows, again and again up to `count`, with ids from 0.

    The id is added to the text of `numbered` too: what is held out and what the classifier is
    fitted on depend on the hash of the facts.
    """
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(islice(cycle(rows), count)):
            further = {numbered: f"{row[numbered]}{number}"} if numbered else {}
            file.write(dump({**row, "id": number, **further}) + "\n")


def measured(words: list[str]) -> tuple[float, float]:
    """Run a command; return its seconds, and the GiB of its largest process at the most."""
    began = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{words[:3]}: exit code {process.returncode}")
    return time.monotonic() - began, usage.ru_maxrss / 2**20


if __name__ == "__main__":
    main()
