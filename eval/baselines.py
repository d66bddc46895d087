"""The scores that a submission is compared with: trivial or human answers, and the classifier."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from panjue.eval.classifier import CLASSIFIER_NAME, load_classifier
from panjue.eval.decide import Decider
from panjue.eval.means import ScoreTable, metric_values, summarize
from panjue.eval.pool import Pool
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.files import generation, trained_in
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row


class Baselines:
    """The scores of the task's fallback and of its own baselines."""

    def __init__(
        self, task: Task, labels: Labels | None, classifying: Decider | None = None
    ) -> None:
        """Take what decides by the text classifier alone; without `labels` there is no fallback."""
        self._task, self._labels, self._classifying = task, labels, classifying
        self._tables: dict[str, ScoreTable] = defaultdict(lambda: ScoreTable(task))

    def add(self, example: Example) -> None:
        """Score every baseline on one example: the mean if it gives several answers."""
        task, values_by_name = self._task, defaultdict(list)
        if self._labels:
            answer = task.ask.decode("", example, self._labels).answer
            row: Row = task.data.write(example, answer)
            values_by_name[task.score.fallback].append(
                metric_values(task, task.gold(example), row, task.score.fallback)
            )
        if self._classifying:
            row = task.data.write(example, self._classifying.decide_alone(example).answer)
            values_by_name[CLASSIFIER_NAME].append(
                metric_values(task, task.gold(example), row, CLASSIFIER_NAME)
            )
        for name, gold_row, row in task.score.baselines(example):
            values_by_name[name].append(metric_values(task, gold_row, row, name))
        for name, values in values_by_name.items():
            self._tables[name].add(example, task.score.weight(example), np.mean(values, axis=0))

    def means(self) -> dict[str, dict[str, float] | None]:
        """Return every baseline's metrics, over the examples that it answers."""
        unknown = {} if self._labels else {self._task.score.fallback: None}
        means = {name: summarize(table, resamples=0).mean for name, table in self._tables.items()}
        return {**unknown, **means}


def classifier_alone(task: Task, run: Path) -> Decider | None:
    """Return what decides by the text classifier of a run's training alone, if there is one."""
    trained, path = trained_in(run, generation(run)), run / "labels.json"
    classifier = load_classifier(trained, task) if trained else None
    return Decider(task, load_labels(path), pool=Pool(classifier, {})) if classifier else None
