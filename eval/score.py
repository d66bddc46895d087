"""Score a submission against gold: the task's metrics with intervals, groups and baselines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from panjue.eval.baselines import Baselines
from panjue.eval.metric_values import (
    MetricValues,
    Summary,
    score_rows,
    submission_rows,
    summaries_by_group,
    summarize,
    without_nan,
)
from panjue.eval.reliability import Certainty, Reliability
from panjue.eval.stage import Lists, outside, read_lists, scored_by
from panjue.eval.twins import NearTwins, TwinCounter
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.names import NameCount
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, no_labels
from panjue.prompts.tasks.metrics import Row
from panjue.serve.answers import Answered
from panjue.serve.decoding import decoding_of, edited


@dataclass(frozen=True)
class ScoreResult:
    """Everything that `panjue score` prints."""

    headline: str  # the name of the headline metric
    total: Summary  # over all examples
    groups: dict[str, dict[str, Summary]]  # attribute -> its value -> metrics, without intervals
    ranked_groups: Sequence[str]  # groups over which the contest takes the mean, if all are there
    ranked_by: dict[str, float]  # metric -> this mean
    baselines: dict[str, dict[str, float]]  # baseline, trivial or human -> its metrics
    calibration: dict[str, Reliability] | None  # of each field; None without confidences
    unreadable_rate: float | None  # share of replies that could not be read; None without replies
    missing: int  # examples without a row, which are scored as unanswered
    faulty: int  # rows that do not count, or that the contest may refuse
    void: str  # why the contest gives this file no score at all, if so
    answered_by: str  # a line on who answered, the model or the text classifier, and why
    outside: Mapping[str, int]  # number of labels that the lists of a stage do not have
    notes: Sequence[str]  # `id: note` on gold examples
    names: NameCount  # names that the facts do not have
    never_asked: Sequence[str]  # `id: reason` of examples that the model was never asked about
    in_sample: str | None  # how the model or the choice was fitted to these cases, if so
    twins: NearTwins | None  # near twins in the training; None without a classifier
    classifier_fault: str  # why the text classifier is no baseline, if it is broken
    changed: str  # how training and labels have changed since they answered, if so
    edited: str  # a line if the submission was changed since it was decoded
    not_in_gold: int  # rows of the submission whose cases are not in gold

    def uncounted_groups(self, attribute: str) -> set[str]:
        """Return the groups of an attribute that do not count in the total."""
        if self.total.unweighted:
            return set()
        groups = self.groups[attribute].items()
        return {name for name, summary in groups if summary.unweighted}

    def to_json(self) -> dict[str, Any]:
        """Return a dict with the metrics and all other numbers at its top level."""
        groups: dict[str, Any] = {}
        for attribute, summaries in self.groups.items():
            groups[attribute] = {
                name: {
                    "examples": summary.examples,
                    "counted": summary.counted,
                    "unweighted": summary.unweighted,
                    **summary.mean,
                }
                for name, summary in summaries.items()
            }
        numbers = {
            **self.total.mean,
            "examples": self.total.examples,
            "counted": self.total.counted,
            "unweighted": self.total.unweighted,
            "interval": self.total.interval,
            **asdict(self),
            "groups": groups,  # as means, without intervals
        }
        # The entries of `total` are at the top level; the others are only for the console.
        for name in ("total", "headline", "classifier_fault", "changed", "edited", "names"):
            del numbers[name]
        if self.names.missing:
            numbers["names_not_in_facts"] = self.names.missing
        for name in (
            "ranked_groups",
            "ranked_by",
            "void",
            "outside",
            "not_in_gold",
            "notes",
            "never_asked",
            "in_sample",
            "twins",
        ):
            if not numbers[name]:  # it says nothing
                del numbers[name]
        result: dict[str, Any] = without_nan(numbers)
        return result


def score(
    reader: Reader,
    gold: Path,
    submission: Path,
    answered: Answered | None = None,
    labels: Sequence[Path] = (),
) -> ScoreResult:
    """Score `submission` by the task's own metrics; with lists of `labels`, by these labels alone.

    If the submission belongs to opened answers, the result also has baselines, the rate of
    unreadable replies, and the calibration of the confidences. Examples without a row are scored as
    unanswered. The files are streamed: memory holds only the numbers of each example.
    """
    task = reader.task
    lists: Lists = {}
    if labels:
        lists = read_lists(task, labels, task.ask.labels(reader.read(gold)))
        task = scored_by(task, lists)
        reader = replace(reader, task=task)
    submission = task.data.submission.find(submission)
    rows = submission_rows(task, submission)
    decoding = decoding_of(submission) or {}
    values = MetricValues(task)
    collected = Collected(task, submission.parent, decoding, answered, lists)
    for example, gold_row, row in score_rows(reader, gold, rows, values):
        collected.add(example, gold_row, row)
    groups = {name: summaries_by_group(values, name, resamples=0) for name in values.groups}
    ranked_groups, ranked_by = _ranking(task, groups)
    of_no_case = len(rows) - (len(values) - values.missing)
    repeated = len(rows.duplicates)
    flaws = {
        "missing": values.missing,
        "of no case": of_no_case,
        "for the second time": repeated,
        "without an answer": collected.unanswered,
    }
    void = ", ".join(f"{count} {what}" for what, count in flaws.items() if count)
    calls = decoding.get("calls")
    return ScoreResult(
        headline=task.score.headline,
        total=summarize(values),
        groups=groups,
        ranked_groups=ranked_groups,
        ranked_by=ranked_by,
        baselines=collected.baselines.means(),
        calibration=collected.certainty.fields() if collected.certainty else None,
        unreadable_rate=decoding["unreadable"] / calls if calls else None,
        missing=values.missing,
        faulty=collected.faulty + of_no_case + repeated,
        void=void if task.score.needs else "",
        answered_by=decoding.get("answered_by", ""),
        outside=dict(collected.outside) if collected.outside.total() else {},
        notes=collected.notes,
        names=collected.names,
        never_asked=decoding.get("refusals", ()),
        in_sample=in_sample(answered) if answered and decoding else None,
        twins=collected.twins.found(values) if collected.twins else None,
        changed=answered.changed if answered else "",
        edited=edited(submission),
        not_in_gold=of_no_case,
        classifier_fault=collected.baselines.classifier_fault,
    )


class Collected:
    """What one pass over the examples collects beside the metric values."""

    def __init__(
        self,
        task: Task,
        run: Path,
        decoding: Mapping[str, Any],
        answered: Answered | None,
        lists: Lists,
    ) -> None:
        self._task = task
        self._answered = answered
        self._lists = lists
        # A submission is compared with the classifier only if it belongs to these answers, and if
        # the classifier did not answer everything itself.
        to_compare = answered if decoding.get("calls") or not decoding else None
        self.baselines = Baselines(task, _labels(task, run, answered), to_compare)
        self.certainty = _certainty(task, run, decoding) if decoding else None
        self.twins = _twins(answered) if answered and decoding else None
        self.faulty = 0  # rows with faults
        self.unanswered = 0  # rows that lack what the contest needs
        self.notes: list[str] = []
        self.names = NameCount()
        self.outside = Counter(gold=0, submission=0)  # labels that the lists do not have

    def add(self, example: Example, gold: Row, row: Row | None) -> None:
        """Add an example with its gold and its row; None if the submission has no row for it."""
        task = self._task
        if self._answered:
            self._answered.refuse_other_text(example)
        self.baselines.add(example, gold)
        if self.certainty:
            self.certainty.add(example, gold, row)
        if self.twins:
            self.twins.add(example)
        self.notes += [f"{example.id}: {note}" for note in example.notes]
        self.names.add(example)
        self.outside["gold"] += outside(self._lists, task, gold)
        if row:
            self.outside["submission"] += outside(self._lists, task, row)
            # None, because the contest does not know which labels our training had.
            self.faulty += any(task.data.check(example, row, None))
            self.unanswered += bool(task.score.needs and not task.score.needs(row))


def _ranking(
    task: Task, groups: Mapping[str, Mapping[str, Summary]]
) -> tuple[Sequence[str], dict[str, float]]:
    """Return the groups over which the contest takes the mean, and the mean of each metric."""
    attribute, names = task.score.ranked_over or ("", ())
    found = groups.get(attribute, {})
    if not names or not found.keys() >= set(names):
        return (), {}
    means = {}
    for metric in task.score.names:
        means[metric] = float(np.mean([found[name].mean[metric] for name in names]))
    return names, means


def _labels(task: Task, run: Path, answered: Answered | None) -> Labels | None:
    """Return the label sets of training; None if they are unknown, or have changed.

    Without a training nobody has counted the labels, so there is no commonest one.
    """
    if task.ask.labels is no_labels:
        return Labels()
    if answered and answered.changed:
        return None
    path = run / "labels.json"
    labels = load_labels(path) if path.exists() else None
    return labels if labels and labels.were_counted else None


def _certainty(task: Task, run: Path, decoding: Mapping[str, Any]) -> Certainty | None:
    """Return a collector of the run's confidences; None if it has none."""
    path = run / "confidence.jsonl"
    if not path.exists():
        return None
    if decoding.get("confidence_sha256") not in (None, sha256(path)):
        raise UserError(f"{path}: was changed; run `panjue decode {run}`, or wait if one runs")
    return Certainty(task, path)


def _twins(answered: Answered) -> TwinCounter | None:
    """Return a counter of near twins; None if training fitted no classifier."""
    if answered.changed:
        return None
    trainings: list[RunRecord] = []
    for trained in answered.answers.trainings:
        if trained is None or not trained.has_classifier:
            return None
        trainings += trained.record.history
    return TwinCounter(trainings, answered.task)


def in_sample(answered: Answered) -> str | None:
    """Say how a model, or a choice of who answers, was fitted to these cases.

    The answered file or gold may be a file of the training.
    """
    record = answered.record
    files = {record.test_sha256, answered.test_sha256}
    trainings = [one.record.history for one in answered.answers.trainings if one]
    for training in chain.from_iterable(trainings):
        if training.dev_sha256 in files or record.held_out:
            return "training and the choice between model and text classifier looked at these cases"
        if not files.isdisjoint({training.train_sha256, training.mix_sha256}):
            return "these cases were trained on"
    return None
