"""Rejection sampling: replace the gold of cases by the best of their sampled replies.

    python tests/bench/rejection.py ANSWERS OUT.jsonl

ANSWERS is a run of `panjue generate` with samples on cases that have gold and had no part in the
training. Writes the cases with the reply of the highest official metric as their outcomes (of equal
ones the first); a penalty class is written as the longest sentence of that class. A case without
a readable reply is left out.
For finetune/EXPERIMENTS.md. Prints the mean of the first replies, of all, and of those written.
"""

import argparse
from pathlib import Path
from typing import Any

from panjue.eval.answers import open_run
from panjue.eval.means import metric_values
from panjue.prompts.example import Answer, Example
from panjue.prompts.plumbing.files import dump
from panjue.prompts.tasks.judgment.read import FIELDS, sentence_of_class
from panjue.prompts.tasks.judgment.repair import PENALTIES

Scored = tuple[float, Answer]


def as_case(example: Example, answer: Answer) -> dict[str, Any]:
    """Return a training case with this answer as its outcomes."""
    outcomes = [
        {
            "name": judgment["name"],
            **{field: judgment[field] for field in FIELDS},
            "penalty": sentence_of_class(PENALTIES.index(judgment["penalty"])),
        }
        for judgment in answer["judgments"]
    ]
    names = list(example.names)
    return {"id": example.id, "fact": example.text, "defendants": names, "outcomes": outcomes}


def main() -> None:
    """Write the cases and print the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    run = open_run(args.answers)
    task, replies = run.task, list[list[Scored]]()
    with args.out.open("w", encoding="utf-8") as out:
        for example, row in run.completions():
            gold, scored = task.gold(example), list[Scored]()
            for text in row.get("texts", ()):
                decoded = task.ask.decode(text, example, run.labels)
                if decoded.readable:
                    written = task.data.write(example, decoded.answer)
                    final = metric_values(task, gold, written, str(run.folder))[-1]
                    scored.append((float(final), decoded.answer))
            if scored:
                replies.append(scored)
                best = max(scored, key=lambda pair: pair[0])
                out.write(dump(as_case(example, best[1])) + "\n")
    means = [
        ("first reply", [scored[0][0] for scored in replies]),
        ("all", [final for scored in replies for final, _ in scored]),
        ("written", [max(final for final, _ in scored) for scored in replies]),
    ]
    told = ", ".join(f"{name} {sum(all_) / len(all_):.3f}" for name, all_ in means)
    print(f"{len(replies)} cases; mean {task.score.names[-1]}: {told}")


if __name__ == "__main__":
    main()
