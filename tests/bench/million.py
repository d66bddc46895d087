"""A million cases on one machine: minutes and memory of every stage that needs no model.

    python -m tests.bench.million ANSWERS FOLDER [--cases 1000000]

ANSWERS is the folder of a run's answers to a file of several-defendant cases. Its cases, with a
number after the facts, and its replies are repeated into FOLDER (a million take some 3 GB and 1 GB)
and checked, decoded and scored, each by its own command. Prints the minutes of each and the memory
of its largest process.
"""

import os
import shutil
import subprocess
import time
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.eval.answers import open_answers
from panjue.prompts.plumbing.files import dump, read_lines, sha256
from panjue.prompts.plumbing.run import Answers
from tests.bench.common import PANJUE, parser


def main() -> None:
    """Write the files, run the stages and print the table."""
    options = parser(__doc__)
    options.add_argument("answers", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--cases", type=int, default=1_000_000)
    given = options.parse_args()
    given.folder.mkdir(parents=True)
    cases, answers = write_files(given.answers, given.folder, given.cases)
    print(f"{given.cases} cases, {cases.stat().st_size / 1e9:.1f} GB, {os.cpu_count()} cores")
    table = Table("stage", "minutes", "GiB of the largest process")
    for stage, *words in (("check", cases), ("decode", answers), ("score", cases, answers)):
        seconds, memory = measured([PANJUE, stage, *map(str, words)])
        table.add_row(stage, f"{seconds / 60:.1f}", f"{memory:.2f}")
        print(f"{stage}: {seconds:.0f} s, {memory:.2f} GiB", flush=True)
    Console().print(table)


def write_files(answers: Path, folder: Path, count: int) -> tuple[Path, Path]:
    """Write the cases, the run's adapter, and the folder of answers."""
    run = open_answers(answers)
    cases, result = folder / "cases.jsonl", folder / "run/answers/cases"
    trained = run.answers.trained
    assert trained, "a training answered"
    shutil.copytree(trained, folder / "run/adapter")
    shutil.copytree(
        run.folder, result, ignore=lambda *_: ["completions.jsonl", "decode.json", "scores.json"]
    )
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
