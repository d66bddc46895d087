"""Baselines of a submission: scores of trivial or human answers, and of the text classifier."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from panjue.eval.metric_values import MetricValues, metric_values, summarize
from panjue.finetune.classifier.classifier import CLASSIFIER_NAME
from panjue.finetune.classifier.opinions import EMPTY_REPLY, Advisor
from panjue.prompts.example import Example, call_key
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row
from panjue.serve.answers import Answered


class Baselines:
    """Scores of the task's fallback, of the task's baselines, and of the text classifier alone."""

    def __init__(self, task: Task, labels: Labels | None, answered: Answered | None) -> None:
        """Prepare to score baselines on the cases of a submission.

        Without `labels`, the fallback has no score; without `answered`, the classifier has none.
        """
        self._task = task
        self._labels = labels
        self._values: dict[str, MetricValues] = defaultdict(lambda: MetricValues(task))
        self._advisor = None
        self._completions: Rows | None = None  # may contain the classifier's opinions
        self.classifier_fault = ""  # why the run's text classifier is broken, if it is
        if answered is None:
            return
        try:
            # A classifier that was fitted on these cases would score too high.
            self._advisor = None if fitted_on_these(answered) else answered.advisor
            completions = answered.folder / "completions.jsonl"
            # Opinions are stored by the position of their person. Gold may list other persons.
            if self._advisor and answered.is_answered_file and completions.exists():
                self._completions = Rows(completions, key=call_key, last_counts=True)
        except UserError as error:
            self._advisor = None
            self.classifier_fault = str(error)

    def add(self, example: Example, gold: Row) -> None:
        """Score the answers of every baseline. If a baseline has several, their mean counts."""
        values_by_name = defaultdict(list)
        for name, gold_row, row in self._answers(example, gold):
            values_by_name[name].append(metric_values(self._task, gold_row, row, name))
        for name, values in values_by_name.items():
            self._values[name].add(example, np.mean(values, axis=0))

    def _answers(self, example: Example, gold: Row) -> Iterator[tuple[str, Row, Row]]:
        """Yield (name of the baseline, gold row, row) for each answer of the baselines.

        The gold row of a human answer has only the other people's answers.
        """
        task = self._task
        if self._labels:
            fallback = task.ask.decode("", example, self._labels)  # answers an empty reply
            yield task.score.fallback, gold, task.data.write(example, fallback.answer)
        if self._advisor:
            row = self._completions.get(example.id) if self._completions else None
            yield CLASSIFIER_NAME, gold, row_of_classifier(task, self._advisor, example, row)
        yield from task.score.baselines(example)

    def means(self) -> dict[str, dict[str, float]]:
        """Return the metrics of every baseline over the examples that it answers."""
        return {name: summarize(of, resamples=0).mean for name, of in self._values.items()}


def row_of_classifier(
    task: Task, advisor: Advisor, example: Example, reply: Mapping[str, Any] | None
) -> Row:
    """Return the classifier's own submission row; opinions in a row of completions are reused."""
    opinions = advisor.opinions(example, reply or EMPTY_REPLY)
    return task.data.write(example, advisor.alone(example, opinions))


def fitted_on_these(answered: Answered) -> RunRecord | None:
    """Return the training that was fitted on the answered cases; None if none was.

    It is the training that answered, or an earlier one from which that started.
    """
    last = answered.trained.record if answered.trained else None
    files = {answered.record.test_sha256, answered.test_sha256}  # the answered file, and gold
    for training in last.history if last else ():
        if training.adopted and training is not last:
            continue  # nobody knows on what the other trainer's adapter was trained
        # Every training without a dev file holds out the same tenth of a file, so none of them
        # was fitted on held-out cases.
        is_held_out = answered.record.held_out and training.dev_sha256 is None
        was_in_training = not files.isdisjoint({training.train_sha256, training.mix_sha256})
        if was_in_training and not is_held_out:
            return training
    return None
