"""The headline metric for each group of examples, and measures that may explain the differences.

The measures are those of FairLex:

Chalkidis et al., "FairLex: A Multilingual Benchmark for Evaluating Fairness in Legal Text
Processing", ACL 2022.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.eval.calibration import Certainty, calibration
from panjue.eval.group_measures import (
    Attribute,
    ClassCounts,
    Classes,
    Group,
    divergence,
    frequency_band,
    widest_recall_gap,
    worst_class,
)
from panjue.eval.score import certainty_of, decoding_of
from panjue.eval.values import Members, MetricValues, by_code, score_rows, summarize, without_nan
from panjue.prompts.example import UNKNOWN
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.files import sha256
from panjue.prompts.plumbing.run import find_answers
from panjue.prompts.reader import Reader, is_held_out
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row

CLASS_FREQUENCY = "class_frequency"
"""An attribute of tasks with classes: how frequent an example's rarest class is in training."""

MIN_CLASS_EXAMPLES = 5
"""Minimum gold examples of a class in a group; with fewer, its recall is not computed."""


@dataclass(frozen=True)
class Fairness:
    """Everything that `panjue fairness` prints.

    Attributes:
        missing: Examples without a row, scored as unanswered.
        extra_rows: Rows whose id no example has.
        train: The training file; None if it is unknown or has changed.
        compared_by: The method that compared texts, if the metric compares texts.
    """

    metric: str
    total: float
    examples: int
    min_n: int
    attributes: dict[str, Attribute]
    missing: int
    extra_rows: int
    train: str | None
    compared_by: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all numbers for JSON; NaN is null."""
        result: dict[str, Any] = without_nan(asdict(self))
        return result


def fairness(
    reader: Reader,
    gold: Path,
    submission: Path,
    by: Sequence[str],
    *,
    train: Path | None = None,
    min_n: int = 20,
) -> Fairness:
    """Score `submission` by the groups of every attribute in `by`.

    Args:
        reader: The task's reader, with the side file that adds groups, if there is one.
        gold: The file with the gold labels.
        submission: The submission, or its run folder.
        by: Names of the attributes.
        train: The training file; by default the one in the run's record, if it is unchanged.
        min_n: Groups with fewer examples are flagged.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    run = submission.parent
    if not by or len(set(by)) < len(by):
        raise UserError("--by: name one or more attributes, each once")
    labels = _labels(run) if CLASS_FREQUENCY in by else None
    cases = _Cases(MetricValues(task))
    extra_rows = cases.read(reader, gold, submission, labels)
    for attribute in by:
        _check_attribute(attribute, cases.values.attributes)
    training_file = TrainingFile(train, held_out=False) if train else _find_training_file(run)
    counts = _count_training(replace(reader, side={}), training_file, by, labels)
    return Fairness(
        metric=cases.metric,
        total=cases.metric_value(None),
        examples=len(cases.values),
        min_n=min_n,
        attributes={name: _attribute(cases, name, counts.get(name), min_n) for name in by},
        missing=cases.missing,
        extra_rows=extra_rows,
        train=str(training_file.path) if training_file else None,
        compared_by=task.score.compared_by,
    )


def _check_attribute(attribute: str, attributes: Sequence[str]) -> None:
    if attribute not in attributes:
        choices = f"there are {', '.join(attributes) or 'none'}; add others in a side file"
        hint = did_you_mean(attribute, attributes)
        raise UserError(f"--by: no example has {attribute!r}{hint} ({choices}: --groups FILE)")


@dataclass
class _Cases:
    """What the report needs of every example, in arrays."""

    values: MetricValues
    classes: ClassCounts = field(default_factory=ClassCounts)
    certainty: Certainty | None = None
    missing: int = 0

    def read(self, reader: Reader, gold: Path, submission: Path, labels: Labels | None) -> int:
        """Score a submission; return the number of rows that belong to no example.

        With `labels`, examples have the attribute `class_frequency` too.
        """
        task, rows = reader.task, reader.task.data.submission.index(submission)
        if decoding_of(submission):
            self.certainty = certainty_of(task, submission.parent)

        for number, scored in enumerate(score_rows(reader, gold, rows, self.values)):
            example, gold_row, row = scored
            classes = _classes(task, gold_row)
            predicted = _classes(task, row) if row is not None else frozenset()
            self.classes.add(number, classes, predicted)
            if labels and classes:
                band = frequency_band(classes, labels)
                self.values.set_group(number, CLASS_FREQUENCY, band)
            self.missing += row is None
            if self.certainty:
                self.certainty.add(example, gold_row, row)
        return len(rows) - len(self.values) + self.missing

    @property
    def metric(self) -> str:
        """Return the name of the headline metric."""
        return self.values.task.score.names[-1]

    def metric_value(self, members: Members | None) -> float:
        """Return the metric over some examples, or all."""
        return summarize(self.values, members, resamples=0).mean[self.metric]

    def calibration_errors(self, groups: NDArray[np.int32], size: int) -> list[float | None]:
        """Return the calibration error of every group, averaged over the fields.

        Only fields with a confidence are used; None if there are none.
        """
        errors: list[list[float]] = [[] for _ in range(size)]
        for judgments in self.certainty.judgments.values() if self.certainty else ():
            confidence, correct = np.asarray(judgments.confidence), np.asarray(judgments.correct)
            members = by_code(groups[np.asarray(judgments.example)], size)
            for number, rows in enumerate(members):
                if len(rows):
                    errors[number].append(calibration(confidence[rows], correct[rows]).error)
        return [float(np.mean(of)) if of else None for of in errors]


def _classes(task: Task, row: Row) -> Classes:
    return frozenset(task.score.classes(row)) if task.score.classes else frozenset()


def _labels(run: Path) -> Labels:
    path = run / "labels.json"
    if not path.exists():
        raise UserError(f"--by: {CLASS_FREQUENCY} needs {path}, which does not exist")
    return load_labels(path)


@dataclass(frozen=True)
class TrainingFile:
    """A training file; if `held_out`, a tenth of its examples was not trained on."""

    path: Path
    held_out: bool


def _find_training_file(run: Path) -> TrainingFile | None:
    """Return the file that the run's adapter was trained on, if it is still unchanged."""
    answers = find_answers(run)
    training = answers.training if answers else None
    train = Path(training.train if training else "nowhere")
    if not training or not train.exists() or sha256(train) != training.train_sha256:
        return None
    return TrainingFile(train, held_out=not training.dev_sha256)


@dataclass
class TrainingCounts:
    """Numbers of training examples for one attribute: by group, and by group and class."""

    sizes: Counter[str] = field(default_factory=Counter)
    classes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def _count_training(
    reader: Reader, file: TrainingFile | None, by: Sequence[str], labels: Labels | None
) -> dict[str, TrainingCounts]:
    """Return the training counts of every attribute; empty if the training file is unknown."""
    counts: dict[str, TrainingCounts] = defaultdict(TrainingCounts)
    for example in reader.read(file.path) if file else ():
        if example.answer is None or (file and file.held_out and is_held_out(example)):
            continue
        classes = _classes(reader.task, reader.task.gold(example))
        bands = {CLASS_FREQUENCY: frequency_band(classes, labels)} if labels and classes else {}
        groups = {**example.groups, **bands}
        for attribute in by:
            group = groups.get(attribute, UNKNOWN)
            counts[attribute].sizes[group] += 1
            counts[attribute].classes[group].update(classes)
    return counts


def _attribute(
    cases: _Cases, attribute: str, training: TrainingCounts | None, min_n: int
) -> Attribute:
    names, codes = cases.values.codes(attribute)
    members = by_code(codes, len(names))
    counts = cases.classes.by_group(codes, len(names))
    errors = cases.calibration_errors(codes, len(names))
    support = {label for gold, *_ in counts for label in gold}
    if training:
        support |= {label for of in training.classes.values() for label in of}
    groups = {}
    for code in sorted(range(1, len(names)), key=lambda code: -len(members[code])):
        group = _group(cases, members[code], counts[code], errors[code], min_n)
        name = names[code]
        groups[name] = _with_training(group, name, counts[code][0], training, sorted(support))
    return _over_groups(groups, len(members[0]), training)


def _group(
    cases: _Cases,
    members: Members,
    counts: Sequence[Counter[str]],
    error: float | None,
    min_n: int,
) -> Group:
    gold, predicted, correct = counts
    summary = summarize(cases.values, members)
    low, high = summary.interval[cases.metric]
    worst = worst_class(gold, predicted, correct)
    weighted = int((cases.values.weights[members] > 0).sum())
    return Group(
        n=len(members),
        value=summary.mean[cases.metric],
        low=low,
        high=high,
        flagged=(weighted or len(members)) < min_n,
        worst_class=worst,
        worst_class_share=gold[worst] / len(members) if worst is not None else None,
        recalls={c: correct[c] / n for c, n in sorted(gold.items()) if n >= MIN_CLASS_EXAMPLES},
        error=error,
        unweighted=summary.unweighted,
    )


def _with_training(
    group: Group,
    name: str,
    gold: Counter[str],
    training: TrainingCounts | None,
    support: Sequence[str],
) -> Group:
    """Return the group with its numbers of the training file, if that is known."""
    if training is None:
        return group
    classes = training.classes.get(name)
    shift = divergence(classes, gold, support) if classes and gold else None
    return replace(group, train=training.sizes[name], shift=shift)


def _over_groups(
    groups: dict[str, Group], unknown: int, training: TrainingCounts | None
) -> Attribute:
    """Return the numbers over the groups that are large enough and have something to score."""
    counted = {
        name: group
        for name, group in groups.items()
        if not group.flagged and not math.isnan(group.value)
    }
    values = [group.value for group in counted.values()]
    recall_class, recall_gap = widest_recall_gap(list(counted.values()))
    several = len(values) > 1
    return Attribute(
        mean=float(np.mean(values)) if values else None,
        disparity=float(np.std(values)) if several else None,
        worst=min(values, default=None),
        worst_group=min(counted, key=lambda name: counted[name].value, default=None),
        gap=max(values) - min(values) if several else None,
        recall_gap=recall_gap,
        recall_class=recall_class,
        unknown=unknown,
        absent=sorted(training.sizes.keys() - groups.keys() - {UNKNOWN}) if training else [],
        groups=groups,
    )
