"""Score a submission against gold: the task's metrics with intervals, groups and baselines.

The near twin of a case is a training case with almost the same text. A confidence estimates how
likely an answer to a field is right; its calibration compares that with how many are right.
`decoding` is the `decode.json` of the submission, or empty if there is none for exactly this one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from panjue.eval.agreement import used_replies
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

NOT_IN_JSON = ("total", "headline", "classifier_fault", "changed", "edited", "names")
"""Entries of a `ScoreResult` that only the console needs."""

LEFT_OUT_IF_EMPTY = (
    "ranked_groups",
    "ranked_by",
    "void",
    "outside",
    "not_in_gold",
    "notes",
    "never_asked",
    "in_sample",
    "twins",
)
"""Entries of a `ScoreResult` that its JSON lacks if they are empty, 0 or None."""


@dataclass(frozen=True)
class ScoreResult:
    """Everything that `panjue score` prints."""

    headline: str  # the name of the headline metric
    total: Summary  # over all examples
    groups: dict[str, dict[str, Summary]]  # attribute -> group -> metrics, without intervals
    ranked_groups: Sequence[str]  # groups over which the contest takes the mean, if all are there
    ranked_by: dict[str, float]  # metric -> this mean
    baselines: dict[str, dict[str, float]]  # baseline, trivial or human -> its metrics
    calibration: dict[str, Reliability] | None  # of each field; None without confidences
    unreadable_rate: float | None  # share of replies that could not be read; None without replies
    missing: int  # examples without a row, which are scored as unanswered
    faulty: int  # rows that do not count, or that the contest may refuse
    void: str  # why the contest gives this file no score, with counts of its bad rows; or empty
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

    def to_json(self) -> dict[str, Any]:
        """Return a dict with the metrics and all other numbers at its top level.

        It lacks `NOT_IN_JSON`, and empty entries of `LEFT_OUT_IF_EMPTY`.
        """
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
        numbers = {  # the entries of `total` are at the top level
            **self.total.mean,
            "examples": self.total.examples,
            "counted": self.total.counted,
            "unweighted": self.total.unweighted,
            "interval": self.total.interval,
            **asdict(self),
            "groups": groups,  # as means, without intervals
        }
        for name in NOT_IN_JSON:
            del numbers[name]
        if self.names.missing:
            numbers["names_not_in_facts"] = self.names.missing
        for name in LEFT_OUT_IF_EMPTY:
            if not numbers[name]:
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

    For opened answers, the result also says how the text classifier alone scores, how many cases
    have near twins, and whether training or the choice of who answers used these cases. Examples
    without a row are scored as unanswered. The files are streamed: memory holds only numbers.
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
    ranked_groups, ranked_by = _ranking(task, groups)  # the contest's mean over groups, if any
    n_scored_rows = len(values) - values.missing
    of_no_case = len(rows) - n_scored_rows
    repeated = len(rows.duplicates)
    flaws = {
        "missing": values.missing,
        "of no case": of_no_case,
        "for the second time": repeated,
        "without an answer": collected.unanswered,
    }
    # A contest whose rows need an answer (`Score.needs`) scores only files without such flaws.
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
        faulty=collected.faulty + of_no_case + repeated,  # all rows that do not count
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
        """Prepare for a submission in the folder `run`; `answered` is None if it has no record."""
        self._task = task
        self._answered = answered
        self._lists = lists
        # The text classifier is no baseline for a submission in which it answered everything.
        to_compare = answered if used_replies(decoding) else None
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
        self.outside["gold"] += outside(self._lists, task, gold)  # labels outside of the lists
        if row:
            self.outside["submission"] += outside(self._lists, task, row)
            any_label = None  # the contest does not know which labels our training had
            self.faulty += any(task.data.check(example, row, any_label))
            has_answer = task.score.needs
            if has_answer:  # the contest refuses rows without an answer
                self.unanswered += not has_answer(row)


def _ranking(
    task: Task, groups: Mapping[str, Mapping[str, Summary]]
) -> tuple[Sequence[str], dict[str, float]]:
    """Return the groups over which the contest takes the mean, and metric -> mean; else nothing."""
    attribute, names = task.score.ranked_over or ("", ())
    found = groups.get(attribute, {})
    if not names or not found.keys() >= set(names):
        return (), {}
    means = {}
    for metric in task.score.names:
        means[metric] = float(np.mean([found[name].mean[metric] for name in names]))
    return names, means


def _labels(task: Task, run: Path, answered: Answered | None) -> Labels | None:
    """Return the labels by which the baseline of commonest labels answers; None if unknown.

    They are those of training, beside the submission. The fallback of some tasks needs none.
    """
    if task.ask.labels is no_labels:
        return Labels()
    path = run / "labels.json"
    if (answered and answered.changed) or not path.exists():
        return None
    labels = load_labels(path)
    # Labels that come from the task's code alone have no counts, so none is the commonest.
    return labels if labels.were_counted else None


def _certainty(task: Task, run: Path, decoding: Mapping[str, Any]) -> Certainty | None:
    """Return a collector of the confidences beside a submission; None if there are none."""
    path = run / "confidence.jsonl"
    if not path.exists():
        return None
    if decoding.get("confidence_sha256") not in (None, sha256(path)):
        raise UserError(f"{path}: was changed; run `panjue decode {run}`, or wait if one runs")
    return Certainty(task, path)


def _twins(answered: Answered) -> TwinCounter | None:
    """Return a counter of near twins; None if a training is unknown or has no text classifier."""
    if answered.changed:
        return None
    trainings: list[RunRecord] = []
    for trained in answered.answers.trainings:
        if trained is None or not trained.has_classifier:
            return None
        trainings += trained.record.history
    return TwinCounter(trainings, answered.task)


def in_sample(answered: Answered) -> str | None:
    """Say how a model, or a choice of who answers, was fitted to these cases; None if none was."""
    record = answered.record
    files = {record.test_sha256, answered.test_sha256}  # the answered file, and gold
    histories = [trained.record.history for trained in answered.answers.trainings if trained]
    for training in chain.from_iterable(histories):
        # Held-out cases are those of the dev file, or else a part of the training file. They decide
        # which step of a training is kept, and who answers each field.
        if training.dev_sha256 in files or record.held_out:
            return "training and the choice between model and text classifier looked at these cases"
        if not files.isdisjoint({training.train_sha256, training.mix_sha256}):
            return "these cases were trained on"
    return None
