"""The headline metric for each group of examples, and measures that may explain the differences.

The measures are those of FairLex:

Chalkidis et al., "FairLex: A Multilingual Benchmark for Evaluating Fairness in Legal Text
Processing", ACL 2022.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from panjue.eval.group_measures import (
    Attribute,
    ClassCounts,
    Classes,
    Group,
    divergence,
    frequency_band,
    worst_class,
)
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
    compared_by: str | None

    def to_json(self) -> dict[str, Any]:
        """Return all numbers for JSON; NaN is null."""
        result: dict[str, Any] = without_nan(asdict(self))
        return result


@dataclass
class TrainingGroup:
    """The training examples of one group."""

    size: int = 0
    classes: Counter[str] = field(default_factory=Counter)


TrainingGroups = dict[str, TrainingGroup]


def fairness(
    reader: Reader, gold: Path, submission: Path, by: Sequence[str], *, min_n: int = 20
) -> Fairness:
    """Score `submission` by the groups of every attribute in `by`.

    The numbers of training need a submission in its run folder, and an unchanged training file.

    Args:
        reader: The task's reader, with the side file that adds groups, if there is one.
        gold: The file with the gold labels.
        submission: The submission, or its run folder.
        by: Names of the attributes.
        min_n: Groups with fewer examples are flagged.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    run, rows = submission.parent, task.data.submission.index(submission)
    if not by or len(set(by)) < len(by):
        raise UserError("--by: name one or more attributes, each once")
    labels = _labels(run) if CLASS_FREQUENCY in by else None
    values, counts, missing = MetricValues(task), ClassCounts(), 0
    for number, (_, gold_row, row) in enumerate(score_rows(reader, gold, rows, values)):
        classes = _classes(task, gold_row)
        counts.add(number, classes, _classes(task, row))
        for attribute, name in _frequency(classes, labels).items():
            values.set_group(number, attribute, name)
        missing += row is None
    for attribute in by:
        _check_attribute(attribute, values.attributes)
    train, training = _training(replace(reader, side={}), run, by, labels)
    return Fairness(
        metric=task.score.names[-1],
        total=list(summarize(values, resamples=0).mean.values())[-1],
        examples=len(values),
        min_n=min_n,
        attributes={
            name: _attribute(values, counts, name, training.get(name), min_n) for name in by
        },
        missing=missing,
        extra_rows=len(rows) - len(values) + missing,
        train=str(train) if train else None,
        compared_by=task.score.compared_by,
    )


def _check_attribute(attribute: str, attributes: Sequence[str]) -> None:
    if attribute not in attributes:
        choices = f"there are {', '.join(attributes) or 'none'}; add others in a side file"
        hint = did_you_mean(attribute, attributes)
        raise UserError(f"--by: no example has {attribute!r}{hint} ({choices}: --groups FILE)")


def _classes(task: Task, row: Row | None) -> Classes:
    if task.score.classes is None or row is None:
        return frozenset()
    return frozenset(task.score.classes(row))


def _labels(run: Path) -> Labels:
    path = run / "labels.json"
    if not path.exists():
        raise UserError(f"--by: {CLASS_FREQUENCY} needs {path}, which does not exist")
    return load_labels(path)


def _frequency(classes: Classes, labels: Labels | None) -> dict[str, str]:
    """Return the group of the attribute `class_frequency`; with `labels` only."""
    return {CLASS_FREQUENCY: frequency_band(classes, labels)} if labels and classes else {}


def _training(
    reader: Reader, run: Path, by: Sequence[str], labels: Labels | None
) -> tuple[Path | None, dict[str, TrainingGroups]]:
    """Return the training file of a run, and attribute -> group -> its training examples.

    Nothing is known if the file has changed.
    """
    answers = find_answers(run)
    record = answers.training if answers else None
    path = Path(record.train) if record else None
    if not record or not path or not path.exists() or sha256(path) != record.train_sha256:
        return None, {}
    found: dict[str, TrainingGroups] = {name: defaultdict(TrainingGroup) for name in by}
    for example in reader.read(path):
        is_unused = is_held_out(example) and not record.dev_sha256
        if example.answer is None or is_unused:
            continue
        classes = _classes(reader.task, reader.task.gold(example))
        groups = {**example.groups, **_frequency(classes, labels)}
        for attribute in by:
            group = found[attribute][groups.get(attribute, UNKNOWN)]
            group.size += 1
            group.classes.update(classes)
    return path, found


def _attribute(
    values: MetricValues,
    class_counts: ClassCounts,
    attribute: str,
    training: TrainingGroups | None,
    min_n: int,
) -> Attribute:
    names, codes = values.codes(attribute)
    members, counts = by_code(codes, len(names)), class_counts.by_group(codes, len(names))
    support = {name for gold, *_ in counts for name in gold}
    for trained in (training or {}).values():
        support |= trained.classes.keys()
    groups = {}
    for code in sorted(range(1, len(names)), key=lambda code: -len(members[code])):
        group = _group(values, members[code], counts[code], min_n)
        of = training.get(names[code], TrainingGroup()) if training is not None else None
        groups[names[code]] = _with_training(group, counts[code][0], of, sorted(support))
    return _over_groups(groups, len(members[0]), training or {})


def _group(
    values: MetricValues, members: Members, counts: Sequence[Counter[str]], min_n: int
) -> Group:
    gold, predicted, correct = counts
    summary, metric = summarize(values, members), values.task.score.names[-1]
    low, high = summary.interval[metric]
    worst = worst_class(gold, predicted, correct)
    weighted = int((values.weights[members] > 0).sum())
    return Group(
        n=len(members),
        value=summary.mean[metric],
        low=low,
        high=high,
        flagged=(weighted or len(members)) < min_n,
        worst_class=worst,
        worst_class_share=gold[worst] / len(members) if worst is not None else None,
        unweighted=summary.unweighted,
    )


def _with_training(
    group: Group, gold: Counter[str], training: TrainingGroup | None, support: Sequence[str]
) -> Group:
    if training is None:
        return group
    is_known = training.classes and gold
    shift = divergence(training.classes, gold, support) if is_known else None
    return replace(group, train=training.size, shift=shift)


def _over_groups(groups: dict[str, Group], unknown: int, training: TrainingGroups) -> Attribute:
    """Return the numbers over the groups that are large enough and have something to score."""
    values = {
        name: group.value
        for name, group in groups.items()
        if not group.flagged and not math.isnan(group.value)
    }
    several, numbers = len(values) > 1, list(values.values())
    return Attribute(
        mean=float(np.mean(numbers)) if values else None,
        disparity=float(np.std(numbers)) if several else None,
        worst=min(numbers, default=None),
        worst_group=min(values, key=lambda name: values[name], default=None),
        gap=max(numbers) - min(numbers) if several else None,
        unknown=unknown,
        absent=sorted(training.keys() - groups.keys() - {UNKNOWN}),
        groups=groups,
    )


def show(report: Fairness, console: Console) -> None:
    """Print the tables."""
    for line in header_lines(report):
        console.print(line, highlight=False, markup=False)
    for name, attribute in report.attributes.items():
        columns = ("n", report.metric, "95% interval", "train", "shift", "worst class")
        table = Table(escape(f"by {name}"), *columns)
        for group_name, group in attribute.groups.items():
            star, style = ("*", "dim") if group.flagged else ("", None)
            table.add_row(*map(Text, (group_name + star, *_cells(group))), style=style)
        console.print(table)
        for line in remarks(report, attribute):
            console.print(line, highlight=False, markup=False)


def _cells(group: Group) -> tuple[str, ...]:
    """Return the cells of a group's row; a dash for an unknown value."""
    worst = group.worst_class
    return (
        str(group.n),
        _number(group.value),
        f"{_number(group.low)} - {_number(group.high)}",
        "-" if group.train is None else str(group.train),
        _number(group.shift),
        "-" if worst is None else f"{worst} ({group.worst_class_share:.0%})",
    )


def header_lines(report: Fairness) -> Iterator[str]:
    """Yield the lines above the tables: the metric over all examples, and the files used."""
    yield f"{report.metric} {_number(report.total)} over all {report.examples} examples"
    if report.compared_by:
        yield f"texts compared by {report.compared_by}"
    if report.missing or report.extra_rows:
        yield (
            f"{report.missing} examples have no row and count as unanswered; "
            f"{report.extra_rows} rows belong to no example: is this the right file?"
        )
    source = (
        f"counted in {report.train}"
        if report.train
        else "unknown, no file that a run was trained on"
    )
    yield f"training examples and shifts: {source}"


def remarks(report: Fairness, attribute: Attribute) -> Iterator[str]:
    """Yield the lines below an attribute's table."""
    if attribute.mean is None:
        yield f"no group has {report.min_n} examples: no mean, disparity, worst or gap"
    else:
        yield (
            f"mean {attribute.mean:.4f}, disparity {_number(attribute.disparity)}, "
            f"worst {_number(attribute.worst)} ({attribute.worst_group}), "
            f"gap {_number(attribute.gap)}"
        )
    flagged = sum(group.flagged for group in attribute.groups.values())
    if flagged:
        yield f"* {flagged} groups of fewer than {report.min_n} examples: not in these numbers"
    if any(group.unweighted for group in attribute.groups.values()):
        yield "if all examples of a group have weight 0, its value is the unweighted mean"
    if attribute.unknown:
        yield f"{attribute.unknown} examples are in no group: their group is unknown"
    if attribute.absent:
        yield f"groups in the training file only: {', '.join(attribute.absent)}"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"
