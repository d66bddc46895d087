"""Milliseconds a case of the text classifier, beside another checkout; real cases of four persons.

    python -m tests.bench.classifier RUN CASES.jsonl OTHER [--rounds 3]

RUN is a training with a classifier that both can read, OTHER the folder of another checkout of
panjue. The ways run in turns, each in a process of its own. Their probabilities are compared.
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.bench.common import compare, parser

PERSONS = 4

Predictions = list[list[dict[str, dict[str, float]]]]
"""For each case and item: field -> label -> probability."""

WORKER = f"""
import json, sys, time
from pathlib import Path
from panjue.finetune.trained import open_trained
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

trained, cases, way = open_trained(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
task = load_task(trained.record.task)
classifier = trained.advisor(task).classifier
examples = [one for one in Reader(task).read(cases) if len(one.names) == {PERSONS}]
for _ in sys.stdin:
    began = time.process_time()
    if way == "many":
        found = classifier.predict(examples)
    else:
        found = [classifier.probabilities(one) for one in examples]
    milliseconds = 1000 * (time.process_time() - began) / len(examples)
    print(json.dumps([milliseconds, found]), flush=True)
"""


def main() -> None:
    """Run every way in turns, print the table and the largest difference of a probability."""
    given = parser(__doc__, "run", "cases", "other").parse_args()
    found: dict[str, Predictions] = {}
    with tempfile.TemporaryDirectory() as name:
        workers = {}
        for way, checkout in (("many", Path()), ("one", Path()), ("other, one", given.other)):
            root = Path(name, way)
            (root / "panjue").mkdir(parents=True)
            for folder in ("prompts", "finetune", "serve", "eval"):
                (root / "panjue" / folder).symlink_to((checkout / folder).resolve())
            command = [sys.executable, "-c", WORKER, given.run, given.cases, way]
            workers[way] = subprocess.Popen(
                list(map(str, command)),
                env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        def measured(way: str) -> float:
            worker = workers[way]
            assert worker.stdin
            assert worker.stdout
            worker.stdin.write("\n")
            worker.stdin.flush()
            milliseconds, found[way] = json.loads(worker.stdout.readline())
            return float(milliseconds)

        ways = {way: partial(measured, way) for way in workers}
        compare(ways, "ms a case", "other, one", given.rounds)
        for worker in workers.values():
            worker.kill()
    for way in ("many", "one"):
        difference = largest_difference(found[way], found["other, one"])
        print(f"{way}: the largest difference of a probability is {difference:.1e}")


def largest_difference(found: Predictions, other: Predictions) -> float:
    largest = 0.0
    for items, other_items in zip(found, other, strict=True):
        for item, other_item in zip(items, other_items, strict=True):
            for field, of_labels in item.items():
                of_other = other_item[field]
                for label in {*of_labels, *of_other}:
                    difference = abs(of_labels.get(label, 0) - of_other.get(label, 0))
                    largest = max(largest, difference)
    return largest


if __name__ == "__main__":
    main()
