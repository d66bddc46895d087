"""One metric for each group of examples, and three measures that may explain the differences.

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

from panjue.eval.calibration import calibration
from panjue.eval.group_measures import (
    Attribute,
    Classes,
    Group,
    divergence,
    frequency_band,
    widest_recall_gap,
    worst_class,
)
from panjue.eval.means import (
    ScoreTable,
    check_answered,
    gold_rows,
    metric_values,
    summarize,
    without_nan,
)
from panjue.eval.score import certainty_of, decoding_of
from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.files import generation, read_json, sha256, trained_in
from panjue.prompts.reader import Reader, is_held_out, side_groups
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row

CLASS_FREQUENCY = "class_frequency"
"""An attribute of tasks with classes: how frequent an example's rarest class is in training."""

MIN_CLASS_EXAMPLES = 5
"""Minimum gold examples of a class in a group; with fewer, its recall is not computed."""


@dataclass(frozen=True)
class Report:
    """Everything that `panjue fairness` prints.

    Attributes:
        missing: Examples without a row, scored as unanswered.
        extra_rows: Rows whose id no example has.
        train: The training file; None if it is unknown or has changed.
        compared_by: The method that compared texts, if the metric compares texts.
        cross: Group of the first attribute -> group of the second -> (number of examples, metric)
            over the examples in both groups.
    """

    task: str
    metric: str
    total: float
    examples: int
    min_n: int
    attributes: dict[str, Attribute]
    missing: int
    extra_rows: int
    train: str | None
    compared_by: str | None = None
    cross: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers for JSON; NaN is null."""
        result: dict[str, Any] = without_nan(asdict(self))
        return result


def report(  # noqa: PLR0913  # one parameter per option of the command line
    name: str,
    reader: Reader,
    gold: Path,
    submission: Path,
    by: Sequence[str],
    *,
    train: Path | None = None,
    train_groups: Path | None = None,
    metric: str | None = None,
    min_n: int = 20,
) -> Report:
    """Score `submission` by the groups of every attribute in `by`.

    Args:
        name: The task's name.
        reader: The task's reader, with the side file that adds groups, if there is one.
        gold: The file with the gold labels.
        submission: The submission, or its run folder.
        by: Names of the attributes.
        train: The training file; by default the one in the run's provenance, if it is unchanged.
        train_groups: The side file of the training file, whose ids may differ from those of `gold`.
        metric: One of the task's metrics; by default its headline metric.
        min_n: Groups with fewer examples are flagged.

    Raises:
        UserError: A file is missing or broken, or an attribute or the metric is unknown.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    run = submission.parent
    metric = metric or task.score.names[-1]
    if metric not in task.score.names:
        hint = did_you_mean(metric, task.score.names)
        raise UserError(f"--metric: no {metric!r} in {name}{hint}")
    if not by or len(set(by)) < len(by):
        raise UserError("--by: name one or more attributes, each once")
    labels = _labels(run) if CLASS_FREQUENCY in by else None
    table = _Table(reader, gold, submission, labels, metric)
    attributes = list(table.scores.groups)
    for attribute in by:
        if attribute not in attributes:
            choices = f"there are {', '.join(attributes) or 'none'}; add others in a side file"
            hint = did_you_mean(attribute, attributes)
            raise UserError(f"--by: no example has {attribute!r}{hint} ({choices}: --groups FILE)")
    training_file = TrainingFile(train, held_out=False) if train else _find_training_file(run)
    train_reader = replace(reader, side=side_groups(train_groups))
    counts = _count_training(train_reader, training_file, by, labels)
    return Report(
        task=name,
        metric=metric,
        total=table.metric_value(np.ones(len(table.gold), dtype=bool)),
        examples=len(table.gold),
        min_n=min_n,
        attributes={
            attribute: _attribute(table, attribute, counts.get(attribute), min_n)
            for attribute in by
        },
        missing=table.missing,
        extra_rows=table.extra_rows,
        train=str(training_file.path) if training_file else None,
        compared_by=task.score.compared_by,
        cross=_cross(table, by[0], by[1]) if len(by) > 1 else {},
    )


class _Table:
    """The data of a report: one row per example."""

    def __init__(
        self, reader: Reader, gold: Path, submission: Path, labels: Labels | None, metric: str
    ) -> None:
        """Read gold and submission; with `labels`, add the attribute `class_frequency`."""
        task = reader.task
        rows = task.data.submission.index(submission)
        check_answered(reader, gold, rows)
        self.scores, self.metric = ScoreTable(task), metric
        self.gold: list[Classes] = []
        self.predicted: list[Classes] = []
        self.confidences: list[list[tuple[str, float, bool]]] = []
        self.missing = 0
        is_decoded = decoding_of(submission) is not None
        certainty = certainty_of(task, submission.parent) if is_decoded else None
        for example, gold_row in gold_rows(reader, gold):
            row = rows.get(example.id)
            self.missing += row is None
            values = metric_values(task, gold_row, row, f"{submission}: id {example.id}")
            classes = _classes(task, gold_row)
            groups = _groups(example, classes, labels)
            self.scores.add(groups, task.score.weight(example), values)
            self.gold.append(classes)
            self.predicted.append(_classes(task, row) if row is not None else frozenset())
            judgments = certainty.judge(example, gold_row, row).judgments if certainty else []
            self.confidences.append(judgments)
        self.extra_rows = len(rows) - len(self.gold) + self.missing

    def groups(self, attribute: str) -> NDArray[np.str_]:
        """Return the group of every example."""
        return np.array(self.scores.groups[attribute])

    def metric_value(self, mask: NDArray[np.bool_]) -> float:
        """Return the metric over the examples where `mask` is true."""
        return summarize(self.scores, resamples=0, mask=mask).mean[self.metric]

    def calibration_error(self, members: NDArray[np.int64]) -> float | None:
        """Return the calibration error of the examples `members`, averaged over fields.

        Only fields with a confidence are used; None if there are none.
        """
        by_field: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        for name, confidence, correct in (row for i in members for row in self.confidences[i]):
            by_field[name].append((confidence, correct))
        errors = [calibration(*zip(*pairs, strict=True)).error for pairs in by_field.values()]
        return float(np.mean(errors)) if errors else None


def _classes(task: Task, row: Row) -> Classes:
    return frozenset(task.score.classes(row)) if task.score.classes else frozenset()


def _groups(example: Example, classes: Classes, labels: Labels | None) -> dict[str, str]:
    """Return an example's groups; with `labels`, also the frequency band of its rarest class."""
    bands = {CLASS_FREQUENCY: frequency_band(classes, labels)} if labels and classes else {}
    return {**example.groups, **bands}


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
    path = (trained_in(run, generation(run)) or Path("nowhere")) / "manifest.json"
    manifest = read_json(path) if path.exists() else {}
    train = Path(manifest.get("train", "nowhere"))
    if not train.exists() or sha256(train) != manifest.get("train_sha256"):
        return None
    return TrainingFile(train, held_out=not manifest.get("dev_sha256"))


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
        groups = _groups(example, classes, labels)
        for attribute in by:
            group = groups.get(attribute, UNKNOWN)
            counts[attribute].sizes[group] += 1
            counts[attribute].classes[group].update(classes)
    return counts


def _attribute(
    table: _Table, attribute: str, training: TrainingCounts | None, min_n: int
) -> Attribute:
    group_names = table.groups(attribute)
    names = [name for name, _ in Counter(group_names.tolist()).most_common() if name != UNKNOWN]
    support = {name for classes in table.gold for name in classes}
    if training:
        support |= {name for counts in training.classes.values() for name in counts}
    groups = {
        name: _group(table, name, group_names == name, training, sorted(support), min_n)
        for name in names
    }
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
        unknown=int((group_names == UNKNOWN).sum()),
        absent=sorted(training.sizes.keys() - set(names) - {UNKNOWN}) if training else [],
        groups=groups,
    )


def _group(
    table: _Table,
    name: str,
    mask: NDArray[np.bool_],
    training: TrainingCounts | None,
    support: Sequence[str],
    min_n: int,
) -> Group:
    summary = summarize(table.scores, mask=mask)
    low, high = summary.interval[table.metric]
    members = np.flatnonzero(mask)
    gold, predicted = [table.gold[i] for i in members], [table.predicted[i] for i in members]
    counts = Counter(label for classes in gold for label in classes)
    hits = Counter(label for a, b in zip(gold, predicted, strict=True) for label in a & b)
    worst = worst_class(gold, predicted)
    weighted = sum(table.scores.weights[i] > 0 for i in members)
    train_counts = training.classes.get(name) if training else None
    return Group(
        n=len(members),
        value=summary.mean[table.metric],
        low=low,
        high=high,
        flagged=(weighted or len(members)) < min_n,
        train=training.sizes[name] if training else None,
        shift=divergence(train_counts, counts, support) if train_counts and counts else None,
        worst_class=worst,
        worst_class_share=counts[worst] / len(members) if worst is not None else None,
        recalls={c: hits[c] / n for c, n in sorted(counts.items()) if n >= MIN_CLASS_EXAMPLES},
        error=table.calibration_error(members),
        unweighted=summary.unweighted,
    )


def _cross(table: _Table, first: str, second: str) -> dict[str, dict[str, tuple[int, float]]]:
    groups_1, groups_2 = table.groups(first), table.groups(second)
    cells: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    for a, b in sorted(set(zip(groups_1.tolist(), groups_2.tolist(), strict=True))):
        if UNKNOWN not in (a, b):
            mask = (groups_1 == a) & (groups_2 == b)
            cells[a][b] = (int(mask.sum()), table.metric_value(mask))
    return dict(cells)
