"""The scores that a submission is compared with: trivial or human answers, and the classifier."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from panjue.eval.answers import advisor_of
from panjue.eval.classifier import CLASSIFIER_NAME
from panjue.eval.opinions import EMPTY_REPLY, Advisor
from panjue.eval.values import MetricValues, metric_values, summarize
from panjue.prompts.example import Example, call_key
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.run import find_answers
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row

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
        self._advisor = None
        self._replies: Rows | None = None
        replies = run / "completions.jsonl"
        try:
            self._advisor = classifier_alone(task, run, gold)
            if self._advisor and replies.exists():
                self._replies = Rows(replies, key=call_key)
        except UserError as error:
            self.unknown[CLASSIFIER_NAME] = str(error)
        self._values: dict[str, MetricValues] = defaultdict(lambda: MetricValues(task))

    def add(self, example: Example, gold: Row) -> None:
        """Score the answers of every baseline; if it gives several, their mean counts."""
        values_by_name = defaultdict(list)
        for name, gold_row, row in self._answers(example, gold):
            values_by_name[name].append(metric_values(self._task, gold_row, row, name))
        for name, values in values_by_name.items():
            self._values[name].add(example, np.mean(values, axis=0))

    def _answers(self, example: Example, gold: Row) -> Iterator[tuple[str, Row, Row]]:
        """Yield (name, gold row, row) of the baselines."""
        task = self._task
        if self._labels:
            answer = task.ask.decode("", example, self._labels).answer
            yield task.score.fallback, gold, task.data.write(example, answer)
        if self._advisor:
            reply = self._replies.get(example.id) if self._replies else None
            answer = self._advisor.alone(example, reply or EMPTY_REPLY)
            yield CLASSIFIER_NAME, gold, task.data.write(example, answer)
        yield from task.score.baselines(example)

    def means(self) -> dict[str, dict[str, float] | None]:
        """Return every baseline's metrics, over the examples that it answers."""
        means: dict[str, dict[str, float] | None] = dict.fromkeys(self.unknown)
        for name, values in self._values.items():
            means[name] = summarize(values, resamples=0).mean
        return means


def classifier_alone(task: Task, run: Path, gold: Path) -> Advisor | None:
    """Return the text classifier of a run's training, if there is one.

    None too if it was fitted on the cases of `gold`, or if its answers are the submission.
    """
    answers = find_answers(run)
    if answers is None or answers.record.answered_by == "classifier":
        return None
    advisor = advisor_of(answers, task, load_labels(run / "labels.json"))
    training = answers.training
    if training is None:
        return None
    is_seen = sha256(gold) in (training.train_sha256, training.mix_sha256)
    return None if is_seen and not answers.record.held_out else advisor
