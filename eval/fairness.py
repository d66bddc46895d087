"""The headline metric for each group of examples, and how much the groups differ.

The measures are those of FairLex:

Chalkidis et al., "FairLex: A Multilingual Benchmark for Evaluating Fairness in Legal Text
Processing", ACL 2022.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from panjue.eval.metric_values import (
    MetricValues,
    counted_size,
    scored,
    submission_rows,
    summaries_by_group,
    summarize,
    without_nan,
)
from panjue.prompts.example import UNKNOWN
from panjue.prompts.plumbing.errors import UserError, did_you_mean, printable
from panjue.prompts.plumbing.intervals import interval_text
from panjue.prompts.reader import Reader

MIN_EXAMPLES = 20
"""A group with fewer test examples that count (`Summary.counted`) is flagged."""


@dataclass(frozen=True)
class Group:
    """One group of one attribute."""

    n: int  # its test examples
    counted: int  # those of them that count
    value: float
    """The metric over them. NaN if there is nothing to score; numbers over groups leave it out."""
    low: float  # ends of its 95% interval, by the bootstrap over examples; NaN if there is none
    high: float
    flagged: bool  # fewer than `MIN_EXAMPLES` count; numbers over groups leave it out
    unweighted: bool
    """Whether all its examples have weight 0. Then `value` is an unweighted mean, and does not
    count if other groups have a weight."""


@dataclass(frozen=True)
class Attribute:
    """One attribute. Its numbers are computed over the groups that are not flagged.

    Mean and worst are None without such a group; disparity and gap with fewer than two.
    """

    mean: float | None  # mean of the groups' values (FairLex's mF1)
    disparity: float | None  # their population standard deviation (group disparity, GD)
    worst: float | None  # the lowest value (mF1_W), of `worst_group`
    worst_group: str | None
    gap: float | None  # the highest value minus the lowest
    unknown: int  # number of examples whose group is unknown; they are in no group
    groups: dict[str, Group]  # name -> group; groups with most examples that count come first


@dataclass(frozen=True)
class Fairness:
    """Everything that `panjue fairness` prints."""

    metric: str
    total: float
    examples: int
    counted: int
    attributes: dict[str, Attribute]
    missing: int  # examples without a row, scored as unanswered

    def to_json(self) -> dict[str, Any]:
        """Return all numbers for JSON, with null for NaN."""
        result: dict[str, Any] = without_nan(asdict(self))
        return result


def fairness(reader: Reader, gold: Path, submission: Path, by: Sequence[str]) -> Fairness:
    """Score `submission` by the groups of every attribute in `by`."""
    if not by or len(set(by)) < len(by):
        raise UserError("--by: name one or more attributes, each once")
    values = scored(reader, gold, submission_rows(reader.task, submission))
    for attribute in by:
        if attribute not in values.groups:
            choices = f"there are {', '.join(values.groups) or 'none'}; add others in a side file"
            hint = did_you_mean(attribute, values.groups)
            raise UserError(f"--by: no example has {attribute!r}{hint} ({choices}: --groups FILE)")
    metric = reader.task.score.headline
    total = summarize(values, resamples=0)
    return Fairness(
        metric=metric,
        total=total.mean[metric],
        examples=total.examples,
        counted=total.counted,
        attributes={attribute: _compare_groups(values, attribute) for attribute in by},
        missing=values.missing,
    )


def _compare_groups(values: MetricValues, attribute: str) -> Attribute:
    """Score every group of an attribute, and compare those that are large enough."""
    summaries = summaries_by_group(values, attribute)
    unknown = summaries.pop(UNKNOWN, None)
    metric = values.task.score.headline
    groups = {}
    for name, summary in sorted(summaries.items(), key=lambda item: -item[1].counted):
        low, high = summary.interval[metric]
        groups[name] = Group(
            n=summary.examples,
            counted=summary.counted,
            value=summary.mean[metric],
            low=low,
            high=high,
            flagged=summary.counted < MIN_EXAMPLES,
            unweighted=summary.unweighted,
        )
    compared = {}  # group that is large enough and has something to score -> value
    for name, group in groups.items():
        if not group.flagged and not math.isnan(group.value):
            compared[name] = group.value
    numbers = list(compared.values())
    several = len(numbers) > 1
    return Attribute(
        mean=float(np.mean(numbers)) if numbers else None,
        disparity=float(np.std(numbers)) if several else None,
        worst=min(numbers, default=None),
        worst_group=min(compared, key=lambda name: compared[name], default=None),
        gap=max(numbers) - min(numbers) if several else None,
        unknown=unknown.examples if unknown else 0,
        groups=groups,
    )


def show_fairness(report: Fairness, console: Console) -> None:
    """Print the total, and for each attribute a table of its groups with remarks."""

    def show_line(line: str) -> None:
        console.print(printable(line), highlight=False, markup=False)

    size = counted_size(report.examples, report.counted)
    show_line(f"{report.metric} {_number(report.total)} over all {size} examples")
    if report.missing:
        show_line(f"{report.missing} examples have no row and count as unanswered")
    for name, attribute in report.attributes.items():
        console.print(_table(name, attribute.groups, report.metric))
        for remark in _remarks(attribute):
            show_line(remark)


def _table(attribute: str, groups: Mapping[str, Group], metric: str) -> Table:
    """Return the table of an attribute's groups; those that are not compared have a star."""
    table = Table(escape(printable(f"by {attribute}")), "n", metric, "95% interval")
    for name, group in groups.items():
        table.add_row(
            Text(printable(f"{name}*" if group.flagged else name)),
            counted_size(group.n, group.counted),
            _number(group.value),
            interval_text((group.low, group.high)),
            style="dim" if group.flagged else None,
        )
    return table


def _remarks(attribute: Attribute) -> Iterator[str]:
    """Yield the lines below the table of an attribute."""
    if attribute.mean is None:
        yield f"no group has {MIN_EXAMPLES} examples that count: no mean, disparity, worst or gap"
    else:
        yield (
            f"mean {attribute.mean:.4f}, disparity {_number(attribute.disparity)}, "
            f"worst {_number(attribute.worst)} ({attribute.worst_group}), "
            f"gap {_number(attribute.gap)}"
        )
    if flagged := sum(group.flagged for group in attribute.groups.values()):
        yield f"* {flagged} groups with under {MIN_EXAMPLES} examples that count: not compared"
    if unweighted := [name for name, group in attribute.groups.items() if group.unweighted]:
        yield f"unweighted means, as all examples have weight 0: {', '.join(unweighted)}"
    if attribute.unknown:
        yield f"{attribute.unknown} examples are in no group: their group is unknown"


def _number(value: float | None) -> str:
    """Return a score with four decimals; `-` if there is none (None or NaN)."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"
