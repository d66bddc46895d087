"""Does a group-robust objective help the worst group? On a planted problem, three seeds each.

Each text tells how grave a deed is, in one of many ways, and ends with a remark. In four of five
cases the class is the deed's; in the fifth something decides that the text does not tell. In the
group `aligned` (95% of training) the remark goes with the class; in the group `opposed` it goes
with another. So the remark is the better guess for whoever minds all examples alike, however long
it is trained, and it is wrong throughout the small group; where the groups count alike, the deed
is. The test file has both groups alike.

The problem was fixed before the first run of any objective on it (see the history of this file).
How many steps the tiny model needs to read the deed was found with a remark that says nothing.

    python tests/bench/fairness.py BASE FOLDER [--steps 800] [--seeds 3] [--methods …]
    python tests/bench/fairness.py BASE FOLDER --train T --test T --by gender,region --seeds 1

BASE is the tiny base (`make base`: runs/base/model). With `--train` and `--test` it is done on
other files of the task `severity`. Every run is trained, answered by vLLM and reported on as a user
would; what is there already in FOLDER, made by the same settings, is not done again.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from panjue.prompts.plumbing.files import atomic_write, dump
from panjue.prompts.tasks.judgment.demo import DRUGS, HOURS, INJURY, MONEY, PEOPLE

PANJUE = Path(sys.executable).with_name("panjue")

CONFIG = """
task: severity
model: {base}
max_tokens: 512
robust: {{warmup: 50}}
dtype: float32
score_examples: 0
lora: {{r: 16, lora_alpha: 32, target_modules: all-linear}}
trainer:
  per_device_train_batch_size: 16
  learning_rate: 1.0e-3
  lr_scheduler_type: cosine
  warmup_steps: 10
  eval_strategy: "no"
  save_strategy: "no"
"""
ANSWER = "task: severity\nengine: {dtype: float32, enforce_eager: true}\n"


CLASSES = (1, 3, 5)
"""Of `severity`, for a deed's three levels of gravity."""

REMARKS = ("案发后表现平静。", "案发后情绪激动。", "案发后一言不发。")

OPENINGS = ("经审理查明，", "公诉机关指控，", "另查明，", "侦查终结，")

SHARE = 0.05
"""Of training examples that are `opposed`."""

UNTOLD = 0.2
"""Share of examples whose class is not the deed's."""


def examples(draw: random.Random, opposed: float) -> Iterator[dict[str, Any]]:
    """Yield endless examples, a share of which is `opposed`."""
    while True:
        deed = draw.randrange(3)
        level = other_than(deed, draw) if draw.random() < UNTOLD else deed
        is_opposed = draw.random() < opposed
        remark = other_than(level, draw) if is_opposed else level
        measure, (low, high) = draw.choice((MONEY, INJURY, DRUGS, HOURS, PEOPLE))[deed]
        when = f"{draw.randint(2010, 2023)}年{draw.randint(1, 12)}月"
        told = measure.format(n=draw.randint(low, high))
        yield {
            "fact": f"{draw.choice(OPENINGS)}{when}，被告人作案，{told}。{REMARKS[remark]}",
            "label": CLASSES[level],
            "groups": {"cue": "opposed" if is_opposed else "aligned"},
        }


def other_than(level: int, draw: random.Random) -> int:
    """Return one of the other two levels."""
    return draw.choice([other for other in range(3) if other != level])


def write_planted(folder: Path, sizes: Mapping[str, int], seed: int = 0) -> None:
    """Write `<name>.jsonl` with as many examples as `sizes` says; half of `test` is opposed."""
    for name, size in sizes.items():
        stream = examples(random.Random(f"{seed}/{name}"), 0.5 if name == "test" else SHARE)
        with atomic_write(folder / f"{name}.jsonl") as out:
            for number in range(size):
                out.write(dump({"id": number, **next(stream)}) + "\n")


def panjue(*words: object) -> None:
    """Run a command, quietly unless it fails."""
    done = subprocess.run([PANJUE, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")


def reported(folder: Path, files: tuple[Path, Path], by: str, words: tuple[str, ...]) -> Any:
    """Return attribute -> numbers of the report on one run: trained, answered, reported."""
    train, test = files
    run = folder / "-".join(word.partition("=")[2] for word in words)
    groups = by.split(",", maxsplit=1)[0]
    settings = (f"train={train}", f"run={run}", f"robust.by={groups}", *words)
    panjue("sft", folder / "sft.yaml", *settings)
    panjue("generate", folder / "generate.yaml", f"run={run}", f"test={test}")
    report = run / "fairness.json"
    panjue("fairness", test, run, "--task", "severity", "--by", by, "--json", report)
    return json.loads(report.read_text("utf-8"))["attributes"]


def main() -> None:
    """Train, answer, report, and print a table for each attribute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default="erm,group_uniform,group_dro,vrex")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--by", default="cue")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not args.train:
        write_planted(folder, {"train": 9600, "test": 600})
    train, test = args.train or folder / "train.jsonl", args.test or folder / "test.jsonl"
    (folder / "sft.yaml").write_text(CONFIG.format(base=args.base.resolve()), "utf-8")
    (folder / "generate.yaml").write_text(ANSWER, "utf-8")
    found = {
        method: [
            reported(
                folder,
                (train.resolve(), test.resolve()),
                args.by,
                (f"robust.method={method}", f"seed={seed}", f"trainer.max_steps={args.steps}"),
            )
            for seed in range(args.seeds)
        ]
        for method in args.methods.split(",")
    }
    for attribute in args.by.split(","):
        Console().print(table_of(attribute, found))


def table_of(attribute: str, found: dict[str, list[Any]]) -> Table:
    """Return means over seeds, and what each method gains over the first."""
    table = Table(
        f"by {attribute}", "worst", "mean", "disparity", "worst by seed", "less the first"
    )
    first: Any = None
    for method, reports in found.items():
        numbers = [[one[attribute][k] for k in ("worst", "mean", "disparity")] for one in reports]
        worst, mean, disparity = np.mean(numbers, axis=0)
        first = first or (worst, mean)
        each = ", ".join(f"{row[0]:.3f}" for row in numbers)
        gains = f"{worst - first[0]:+.3f} worst, {mean - first[1]:+.3f} mean"
        table.add_row(method, f"{worst:.3f}", f"{mean:.3f}", f"{disparity:.3f}", each, gains)
    return table


if __name__ == "__main__":
    main()
