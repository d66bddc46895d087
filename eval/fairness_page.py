"""The fairness report for people: tables on the terminal, a page that stands alone."""

import math
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table
from rich.text import Text

from panjue.eval.fairness import Report
from panjue.eval.group_measures import Attribute, Group

COLUMNS = ("n", "{metric}", "95% interval", "train", "shift", "worst class", "ECE")


def show(report: Report, console: Console) -> None:
    """Print the tables."""
    for line in heads(report):
        console.print(line, highlight=False, markup=False)
    for name, attribute in report.attributes.items():
        table = Table(
            escape_markup(f"by {name}"), *(c.format(metric=report.metric) for c in COLUMNS)
        )
        for group, found in attribute.groups.items():
            style = "dim" if found.flagged else None
            row = (group + ("*" if found.flagged else ""), *cells(found))
            table.add_row(*map(Text, row), style=style)
        console.print(table)
        for line in remarks(report, attribute):
            console.print(line, highlight=False, markup=False)
    if report.cross:
        head, columns, rows = cross_rows(report)
        table = Table(*map(escape_markup, (head, *columns)))
        for cells_of_row in rows:
            table.add_row(*map(Text, cells_of_row))
        console.print(table)


def cross_rows(report: Report) -> tuple[str, list[str], list[list[str]]]:
    """Return heading, columns and rows of the table of two attributes, the longer one downwards."""
    first, second = list(report.attributes)[:2]
    found = {(a, b): cell for a, row in report.cross.items() for b, cell in row.items()}
    if len({a for a, _ in found}) < len({b for _, b in found}):
        first, second = second, first
        found = {(b, a): cell for (a, b), cell in found.items()}
    columns = sorted({b for _, b in found})
    rows = [
        [a, *(_cross_cell(found.get((a, b)), report.min_n) for b in columns)]
        for a in sorted({a for a, _ in found})
    ]
    return f"{first} by {second}", columns, rows


def cells(group: Group) -> tuple[str, ...]:
    """Return a group's row of the table; a dash where something is not known."""
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


def heads(report: Report) -> Iterator[str]:
    """Yield what is said first: the metric over all, and what the numbers rest on."""
    yield f"{report.metric} {_number(report.total)} over all {report.examples} examples"
    if report.compared_by:
        yield f"texts compared by {report.compared_by}"
    if report.missing or report.extra_rows:
        yield (
            f"{report.missing} examples have no row and count as unanswered; "
            f"{report.extra_rows} rows are of no example: is this the right file?"
        )
    told = f"counted in {report.train}" if report.train else "not known: say --train FILE"
    yield f"training examples and shifts: {told}"


def remarks(report: Report, attribute: Attribute) -> Iterator[str]:
    """Yield what is said below an attribute's table."""
    if attribute.mean is None:
        yield f"no group has {report.min_n} examples: no mean, disparity, worst or gap"
    else:
        yield (
            f"mean {attribute.mean:.4f}, disparity {_number(attribute.disparity)}, "
            f"worst {_number(attribute.worst)} ({attribute.worst_group}), "
            f"gap {_number(attribute.gap)}"
        )
    if attribute.recall_gap is not None:
        gap, which = attribute.recall_gap, attribute.recall_class
        yield f"recalls of {which} lie {gap:.4f} apart, those of no other class further"
    flagged = sum(group.flagged for group in attribute.groups.values())
    if flagged:
        yield f"* {flagged} groups of fewer than {report.min_n} examples count for none of these"
    if any(group.unweighted for group in attribute.groups.values()):
        yield "where all examples of a group have weight 0, its value is the plain mean"
    if attribute.unknown:
        yield f"{attribute.unknown} examples are in no group: nobody knows theirs"
    if attribute.absent:
        yield f"in training, and not here: {', '.join(attribute.absent)}"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def _cross_cell(found: tuple[int, float] | None, min_n: int) -> str:
    if found is None:
        return "-"
    n, value = found
    return f"{_number(value)} ({n}){'*' if n < min_n else ''}"


def page(report: Report) -> str:
    """Return the report as an HTML page that needs nothing else."""
    from panjue.eval import figures  # here, since the tables need neither jinja nor matplotlib
    from panjue.eval.report_page import FOLDER, templates

    return (
        templates()
        .get_template("fairness.html")
        .render(
            title=f"{report.task}: {report.metric} by group",
            report=report,
            heads=list(heads(report)),
            remarks=remarks,
            columns=[column.format(metric=report.metric) for column in COLUMNS],
            cells=cells,
            cross=cross_rows(report) if report.cross else None,
            style=(FOLDER / "report.css").read_text("utf-8"),
            figures={name: figures.fairness(report, name) for name in report.attributes},
        )
    )
