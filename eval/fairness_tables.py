"""The fairness report as tables on the terminal."""

import math
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table
from rich.text import Text

from panjue.eval.fairness import Fairness
from panjue.eval.group_measures import Attribute, Group

COLUMNS = ("n", "{metric}", "95% interval", "train", "shift", "worst class", "ECE")


def show(report: Fairness, console: Console) -> None:
    """Print the tables."""
    for line in header_lines(report):
        console.print(line, highlight=False, markup=False)
    for name, attribute in report.attributes.items():
        table = Table(
            escape_markup(f"by {name}"), *(c.format(metric=report.metric) for c in COLUMNS)
        )
        for group_name, group in attribute.groups.items():
            style = "dim" if group.flagged else None
            row = (group_name + ("*" if group.flagged else ""), *cells(group))
            table.add_row(*map(Text, row), style=style)
        console.print(table)
        for line in remarks(report, attribute):
            console.print(line, highlight=False, markup=False)


def cells(group: Group) -> tuple[str, ...]:
    """Return the cells of a group's row; a dash for an unknown value."""
    worst = group.worst_class
    return (
        str(group.n),
        _number(group.value),
        f"{_number(group.low)} - {_number(group.high)}",
        "-" if group.train is None else str(group.train),
        _number(group.shift),
        "-" if worst is None else f"{worst} ({group.worst_class_share:.0%})",
        _number(group.error),
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
    source = f"counted in {report.train}" if report.train else "unknown; give --train FILE"
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
    if attribute.recall_gap is not None:
        yield f"largest recall gap {attribute.recall_gap:.4f}, of class {attribute.recall_class}"
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
