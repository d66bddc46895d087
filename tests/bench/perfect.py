"""What would a perfect model score on dialogues? Each step answered as its gold says, way by way.

    python tests/bench/perfect.py FOLDER

What is missing from 1.0 no training can bring: holders that the chat does not have, sentiments
that are none of the five, and above all merging, which joins neighbouring equal states that gold
keeps apart.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.eval.means import ScoreTable, metric_values, summarize
from panjue.prompts.example import Decoded, Example, Solve, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, configured, load_task

WAYS = (
    {"way": "whole", "merge": False},
    {"way": "whole"},
    {"way": "retrieval", "emotions": "whole", "merge": False},
    {"way": "retrieval", "emotions": "whole"},
    {"way": "window", "merge": False},
    {"way": "window", "emotions": "whole", "merge": False},
    {"way": "window"},
)


def perfect_row(task: Task, example: Example) -> dict[str, object]:
    """Return the submission row of a model that answers every step right, within its schema."""
    assert isinstance(task.answer, Solve)
    answer = task.answer.gold_oracle(example)

    def reply(_: int, question: Example) -> Decoded:
        return task.ask.decode(task.ask.target(answer(question)), question, Labels())

    return task.data.write(example, run_steps(task.answer.solving(example), reply))


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    base = load_task("dialogue")
    examples = list(Reader(base).read(args.folder))
    title = f"{len(examples)} dialogues; {base.score.compared_by}"
    table = Table("way", "sextuple", "event", title=title)
    for way in WAYS:
        task = configured(base, way)
        columns = ScoreTable(task)
        for example in examples:
            row = perfect_row(task, example)
            columns.add(
                example.groups, 1.0, metric_values(task, task.gold(example), row, example.text)
            )
        mean = summarize(columns, resamples=0).mean
        told = ", ".join(f"{key}={value}" for key, value in way.items())
        table.add_row(told, f"{mean['sextuple']:.4f}", f"{mean['event']:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
