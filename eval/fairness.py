"""The headline metric for each group of examples, and measures that may explain the differences.

The measures are those of FairLex:

Chalkidis et al., "FairLex: A Multilingual Benchmark for Evaluating Fairness in Legal Text
Processing", ACL 2022.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from panjue.eval.group_counts import Counting, Counts, divergence, read_training_counts
from panjue.eval.values import Members, MetricValues, score_rows, summarize, without_nan
from panjue.prompts.example import UNKNOWN
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.reader import Reader

MIN_EXAMPLES = 20
"""A group of fewer test examples is flagged."""


@dataclass(frozen=True)
class Group:
    """One group of one attribute."""

    n: int  # its test examples
    value: float
    """The metric over them; NaN if it has nothing to score: no number over groups counts it."""
    low: float  # the ends of its 95% interval, by the bootstrap over examples
    high: float
    flagged: bool  # it has fewer than `MIN_EXAMPLES`: no number over groups counts it
    unweighted: bool  # all its examples have weight 0, so `value` is an unweighted mean
    worst_class: str | None  # its gold class with the lowest F1
    worst_class_share: float | None  # of its test examples (worst-class influence)
    train: int | None = None  # training examples of this group (representation inequality)
    shift: float | None = None
    """KL divergence of its training from its test classes, smoothed, in nats (label shift)."""


@dataclass(frozen=True)
class Attribute:
    """One attribute; its numbers are over its groups that are not flagged.

    Mean and worst are None without a group, disparity and gap with fewer than two groups.
    """

    mean: float | None  # mean of the groups' values (FairLex's mF1)
    disparity: float | None  # their population standard deviation (group disparity, GD)
    worst: float | None  # the lowest value (mF1_W), that of `worst_group`
    worst_group: str | None
    gap: float | None  # the highest value minus the lowest
    unknown: int  # number of examples without a known group; they are in no group
    groups: dict[str, Group]  # name -> group, the largest first


@dataclass(frozen=True)
class Fairness:
    """Everything that `panjue fairness` prints."""

    metric: str
    total: float
    examples: int
    attributes: dict[str, Attribute]
    missing: int  # examples without a row, scored as unanswered
    train: list[str]  # the files of the training; empty if they are unknown
    compared_by: str | None  # the method that compared texts, if the metric compares texts

    def to_json(self) -> dict[str, Any]:
        """Return all numbers for JSON; NaN is null."""
        result: dict[str, Any] = without_nan(asdict(self))
        return result


def fairness(reader: Reader, gold: Path, submission: Path, by: Sequence[str]) -> Fairness:
    """Score `submission` by the groups of every attribute in `by`.

    The numbers of training need a submission in its run folder.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    rows = task.data.submission.index(submission)
    if not by or len(set(by)) < len(by):
        raise UserError("--by: name one or more attributes, each once")
    values = MetricValues(task)
    counting = Counting(task, by)
    missing = 0
    for example, gold_row, row in score_rows(reader, gold, rows, values):
        counting.add(example, gold_row, row)
        missing += row is None
    for attribute in by:
        _check_attribute(attribute, values.attributes)
    files, training = read_training_counts(submission)
    attributes = {}
    for attribute, counts in counting.groups.items():
        attributes[attribute] = _attribute(values, attribute, counts, training.get(attribute, {}))
    metric = task.score.names[-1]
    return Fairness(
        metric=metric,
        total=summarize(values, resamples=0).mean[metric],
        examples=len(values),
        attributes=attributes,
        missing=missing,
        train=files,
        compared_by=task.score.compared_by,
    )


def _check_attribute(attribute: str, attributes: Sequence[str]) -> None:
    if attribute not in attributes:
        choices = f"there are {', '.join(attributes) or 'none'}; add others in a side file"
        hint = did_you_mean(attribute, attributes)
        raise UserError(f"--by: no example has {attribute!r}{hint} ({choices}: --groups FILE)")


def _attribute(
    values: MetricValues,
    attribute: str,
    counts: Mapping[str, Counts],
    training: Mapping[str, Counts],
) -> Attribute:
    """Return an attribute's groups; `counts` are of the test, `training` of the training."""
    classes: set[str] = set()
    for of in (*counts.values(), *training.values()):
        classes.update(of.gold)
    is_known = bool(training.keys() - {UNKNOWN})  # a side file may have the groups
    groups = {}
    for name, members in values.members(attribute).items():
        group = _group(values, members, counts[name])
        if is_known:
            trained = training.get(name, Counts())
            shift = divergence(trained.gold, counts[name].gold, sorted(classes))
            group = replace(group, train=trained.size, shift=shift)
        groups[name] = group
    unknown = groups.pop(UNKNOWN, None)
    largest_first = dict(sorted(groups.items(), key=lambda item: -item[1].n))
    return _over_groups(largest_first, unknown.n if unknown else 0)


def _group(values: MetricValues, members: Members, counts: Counts) -> Group:
    summary = summarize(values, members)
    metric = values.task.score.names[-1]
    low, high = summary.interval[metric]
    worst = counts.worst_class()
    return Group(
        n=len(members),
        value=summary.mean[metric],
        low=low,
        high=high,
        flagged=len(members) < MIN_EXAMPLES,
        unweighted=summary.unweighted,
        worst_class=worst,
        worst_class_share=None if worst is None else counts.gold[worst] / len(members),
    )


def _over_groups(groups: dict[str, Group], unknown: int) -> Attribute:
    """Return the numbers over the groups that are large enough and have something to score."""
    values = {}
    for name, group in groups.items():
        if not group.flagged and not math.isnan(group.value):
            values[name] = group.value
    numbers = list(values.values())
    several = len(numbers) > 1
    return Attribute(
        mean=float(np.mean(numbers)) if numbers else None,
        disparity=float(np.std(numbers)) if several else None,
        worst=min(numbers, default=None),
        worst_group=min(values, key=lambda name: values[name], default=None),
        gap=max(numbers) - min(numbers) if several else None,
        unknown=unknown,
        groups=groups,
    )


def show(report: Fairness, console: Console) -> None:
    """Print the tables."""
    columns = ("n", report.metric, "95% interval", "train", "shift", "worst class")
    for line in header_lines(report):
        console.print(line, highlight=False, markup=False)
    for name, attribute in report.attributes.items():
        table = Table(escape(f"by {name}"), *columns)
        for group_name, group in attribute.groups.items():
            cells = [Text(cell) for cell in _cells(group_name, group)]
            table.add_row(*cells, style="dim" if group.flagged else None)
        console.print(table)
        for line in remarks(attribute):
            console.print(line, highlight=False, markup=False)


def _cells(name: str, group: Group) -> tuple[str, ...]:
    """Return the cells of a group's row; a dash for an unknown value."""
    worst = group.worst_class
    return (
        f"{name}*" if group.flagged else name,
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
    if report.missing:
        yield f"{report.missing} examples have no row and count as unanswered"
    files = " and ".join(report.train)
    source = f"counted in {files}" if files else "unknown, there is no groups.json of a training"
    yield f"training examples and shifts: {source}"


def remarks(attribute: Attribute) -> Iterator[str]:
    """Yield the lines below an attribute's table."""
    if attribute.mean is None:
        yield f"no group has {MIN_EXAMPLES} examples: no mean, disparity, worst or gap"
    else:
        yield (
            f"mean {attribute.mean:.4f}, disparity {_number(attribute.disparity)}, "
            f"worst {_number(attribute.worst)} ({attribute.worst_group}), "
            f"gap {_number(attribute.gap)}"
        )
    flagged = sum(group.flagged for group in attribute.groups.values())
    if flagged:
        yield f"* {flagged} groups of fewer than {MIN_EXAMPLES} examples: not in these numbers"
    unweighted = [name for name, group in attribute.groups.items() if group.unweighted]
    if unweighted:
        yield f"unweighted means, as all examples have weight 0: {', '.join(unweighted)}"
    if attribute.unknown:
        yield f"{attribute.unknown} examples are in no group: their group is unknown"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"
