"""The classes of test and training examples, counted by group, and FairLex's measures over them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path

import numpy as np
from scipy.stats import entropy

from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.plumbing.files import sha256
from panjue.prompts.plumbing.run import RunRecord, find_answers
from panjue.prompts.reader import Reader, is_held_out, text_hash
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


class Counting:
    """Counts the classes of examples by the groups of some attributes."""

    def __init__(self, task: Task, by: Sequence[str]) -> None:
        """Start without examples."""
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


def training_counts(task: Task, submission: Path, by: Sequence[str]) -> tuple[list[Path], Groups]:
    """Return the files of a training, and the counts of its examples by group.

    Nothing is known if a file has changed. Invalid rows are treated as training treated them.
    """
    answers = find_answers(submission)
    record = answers.training if answers else None
    if not record:
        return [], {}
    files = {}
    for name in ("train", "dev", "mix"):
        if recorded := getattr(record, name):
            path = Path(recorded)
            if not path.exists() or sha256(path) != getattr(record, f"{name}_sha256"):
                return [], {}
            files[name] = path
    counting = Counting(task, by)
    reader = Reader(task, on_bad_row=record.on_bad_row)
    for example in _trained_on(reader, record, files):
        counting.add(example, task.gold(example), None)
    return [files[name] for name in ("train", "mix") if name in files], counting.groups


def _trained_on(reader: Reader, record: RunRecord, files: Mapping[str, Path]) -> Iterator[Example]:
    """Yield the examples of `train` that were not held out, then those chosen from `mix`."""
    held = set()
    if "dev" in files:
        held = {text_hash(example) for example in reader.read(files["dev"])}

    def used(path: Path) -> Iterator[Example]:
        for example in reader.read(path):
            is_held = text_hash(example) in held if record.dev_sha256 else is_held_out(example)
            if example.answer is not None and not is_held:
                yield example

    size = 0
    for example in used(files["train"]):
        size += 1
        yield example
    if "mix" not in files:
        return
    lowest = nsmallest(round((record.mix_ratio or 0) * size), map(text_hash, used(files["mix"])))
    for example in used(files["mix"]):
        if lowest and text_hash(example) <= lowest[-1]:
            yield example


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
