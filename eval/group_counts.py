"""The classes of test and training examples, counted by group, and FairLex's measures over them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import entropy

from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.prompts.plumbing.run import find_answers
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row


@dataclass
class Counts:
    """The examples of one group, and how many of them have each class."""

    size: int = 0
    gold: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    correct: Counter[str] = field(default_factory=Counter)

    def add(self, gold: Collection[str], predicted: Collection[str]) -> None:
        """Count an example."""
        self.size += 1
        self.gold.update(gold)
        self.predicted.update(predicted)
        self.correct.update(set(gold) & set(predicted))

    def f1(self, name: str) -> float:
        """Return the F1 of a class that gold or predictions have."""
        return 2 * self.correct[name] / (self.gold[name] + self.predicted[name])

    def worst_class(self) -> str | None:
        """Return the gold class with the lowest F1; of equal ones the first by name."""
        return min(self.gold, key=lambda name: (self.f1(name), name), default=None)


Groups = dict[str, dict[str, Counts]]
"""Attribute -> group -> its counts."""

COUNTS = "groups.json"
"""File in a run folder, with the `Groups` of the examples that it is trained on."""


class Counting:
    """Counts the classes of examples by the groups of some attributes."""

    def __init__(self, task: Task, by: Sequence[str]) -> None:
        self._task = task
        self.groups: Groups = {name: defaultdict(Counts) for name in by}

    def add(self, example: Example, gold: Row, row: Row | None) -> None:
        """Count an example, its gold row and its row of the submission, if it has one."""
        gold_classes = self._classes(gold)
        classes = self._classes(row)
        for attribute, groups in self.groups.items():
            groups[example.groups.get(attribute, UNKNOWN)].add(gold_classes, classes)

    def _classes(self, row: Row | None) -> frozenset[str]:
        classes = self._task.score.classes
        if classes is None or row is None:
            return frozenset()
        return frozenset(classes(row))


def write_training_counts(run: Path, task: Task, examples: Iterable[Example]) -> None:
    """Write the groups of the examples that a run is trained on, for `panjue fairness`.

    `examples` can be read several times.
    """
    attributes = {name for example in examples for name in example.groups}
    counting = Counting(task, sorted(attributes))
    for example in examples:
        counting.add(example, task.gold(example), None)
    groups: dict[str, dict[str, Any]] = {}
    for attribute, by_name in counting.groups.items():
        groups[attribute] = {}
        for name, counts in by_name.items():
            groups[attribute][name] = {"size": counts.size, "gold": counts.gold}
    write_json(run / COUNTS, groups)


def read_training_counts(submission: Path) -> tuple[list[str], Groups]:
    """Return the files of the training that answered, and the counts of its examples by group.

    Both are empty if they are not known.
    """
    answers = find_answers(submission)
    record = answers.training if answers else None
    if answers is None or answers.trained is None or record is None:
        return [], {}
    path = answers.trained.parent / COUNTS
    if not path.exists():
        return [], {}
    groups: Groups = {}
    for attribute, by_name in read_json(path).items():
        groups[attribute] = {}
        for name, counts in by_name.items():
            groups[attribute][name] = Counts(counts["size"], Counter(counts["gold"]))
    return [record.train, *filter(None, [record.mix])], groups


def divergence(
    train: Mapping[str, int], test: Mapping[str, int], classes: Sequence[str]
) -> float | None:
    """Return the Kullback-Leibler divergence of the train from the test distribution, in nats.

    Both are add-one smoothed over the classes of all groups. None if one has no class.
    """
    if not train or not test:
        return None
    trained = np.array([train.get(name, 0) + 1.0 for name in classes])
    tested = np.array([test.get(name, 0) + 1.0 for name in classes])
    return float(entropy(trained, tested))  # it scales both to sum to 1
