"""The scores that a submission is compared with: trivial or human answers, and the classifier."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from panjue.eval.classifier import CLASSIFIER_NAME, trained_classifier
from panjue.eval.decide import Decider
from panjue.eval.means import ScoreTable, metric_values, summarize
from panjue.eval.pool import Pool
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.model import has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import generation, read_json, sha256, trained_in
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Numbers, Row

NO_LABELS = "there is no labels.json beside the submission"


class Baselines:
    """The scores of the task's fallback, of its own baselines and of the text classifier alone.

    Attributes:
        unknown: Baseline -> why it has no score.
    """

    def __init__(self, task: Task, labels: Labels | None, run: Path, gold: Path) -> None:
        """Prepare for the scores of `run`; without `labels` the fallback has no score."""
        self._task, self._labels = task, labels
        self.unknown = {} if labels else {task.score.fallback: NO_LABELS}
        self._classifying = None
        try:
            self._classifying = classifier_alone(task, run, gold)
        except UserError as error:
            self.unknown[CLASSIFIER_NAME] = str(error)
        self._tables: dict[str, ScoreTable] = defaultdict(lambda: ScoreTable(task))

    def values(self, example: Example) -> dict[str, Numbers]:
        """Return the metric values of every baseline: the mean if it gives several answers."""
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
        return {name: np.mean(values, axis=0) for name, values in values_by_name.items()}

    def add(self, groups: Mapping[str, str], weight: float, values: Mapping[str, Numbers]) -> None:
        """Count one example."""
        for name, numbers in values.items():
            self._tables[name].add(groups, weight, numbers)

    def means(self) -> dict[str, dict[str, float] | None]:
        """Return every baseline's metrics, over the examples that it answers."""
        unknown = dict.fromkeys(self.unknown)
        means = {name: summarize(table, resamples=0).mean for name, table in self._tables.items()}
        return {**unknown, **means}


def classifier_alone(task: Task, run: Path, gold: Path) -> Decider | None:
    """Return what decides by the text classifier of a run's training alone, if there is one.

    None too if the classifier was fitted on the cases of `gold`.

    Raises:
        UserError: The classifier or the label sets are missing or broken.
    """
    provenance = generation(run)
    trained = trained_in(run, provenance)
    if trained is None or not has_classifier(trained):
        return None
    manifest, digest = read_json(trained / "manifest.json"), sha256(gold)
    is_seen = digest in (manifest.get("train_sha256"), manifest.get("mix_sha256"))
    if is_seen and not provenance.get("held_out"):
        return None
    pool = Pool(trained_classifier(trained, task), {})
    return Decider(task, load_labels(run / "labels.json"), pool=pool)
