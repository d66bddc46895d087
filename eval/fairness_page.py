"""The fairness report for people: tables on the terminal, a page that stands alone."""

import math
from collections.abc import Iterator
from html import escape

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table
from rich.text import Text

from panjue.eval.fairness import Attribute, Group, Report

COLUMNS = ("n", "{metric}", "95% interval", "train", "shift", "worst class", "ECE")

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;color:#1d2733}
table{border-collapse:collapse;margin:1em 0}th,td{padding:.25em .8em;text-align:right}
th:first-child,td:first-child{text-align:left}thead{border-bottom:2px solid #1d2733}
tr.flagged{color:#8894a0}svg{display:block;max-width:100%;height:auto}
text{font:13px system-ui,sans-serif;fill:#1d2733}.note{color:#5b6875}
@media(prefers-color-scheme:dark){body{background:#14191f;color:#dde3ea}text{fill:#dde3ea}
thead{border-color:#dde3ea}}
"""

WIDTH, ROW = 900, 26


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
    if report.missing or report.foreign:
        yield (
            f"{report.missing} examples have no row and count as unanswered; "
            f"{report.foreign} rows are of no example: is this the right file?"
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
    title = f"{report.task}: {report.metric} by group"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>",
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p class=note>{escape(line)}</p>" for line in heads(report)),
        *(part for name in report.attributes for part in _section(report, name)),
    ]
    if report.cross:
        parts += _cross_table(report)
    return "\n".join(parts) + "\n"


def _section(report: Report, name: str) -> Iterator[str]:
    attribute = report.attributes[name]
    yield f"<h2>by {escape(name)}</h2>"
    yield _plot(report, attribute)
    names = "".join(f"<th>{escape(c.format(metric=report.metric))}</th>" for c in COLUMNS)
    yield f"<table><thead><tr><th></th>{names}</tr></thead>"
    for group, found in attribute.groups.items():
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells(found))
        kind = " class=flagged" if found.flagged else ""
        yield f"<tr{kind}><td>{escape(group)}{'*' if found.flagged else ''}</td>{row}</tr>"
    yield "</table>"
    yield from (f"<p class=note>{escape(line)}</p>" for line in remarks(report, attribute))


def _plot(report: Report, attribute: Attribute) -> str:
    """Return a bar with its interval for every group, and a line at the metric over all."""
    height = ROW * len(attribute.groups) + 24
    label_width = 20 + 13 * max(map(len, attribute.groups), default=0)
    across = WIDTH - label_width - 80

    def x(value: float) -> float:
        return round(label_width + across * min(max(0.0, value), 1.0), 1)  # NaN: 0

    shapes = []
    for i, (name, group) in enumerate(attribute.groups.items()):
        y = ROW * i + 4
        colour = "#b8c2cc" if group.flagged else "#3a7ca5"
        shapes += [
            f"<text x={label_width - 8} y={y + 14} text-anchor=end>{escape(name)}</text>",
            f"<rect x={label_width} y={y} width={x(group.value) - label_width:.1f} "
            f"height=18 fill='{colour}'/>",
            f"<line x1={x(group.low)} x2={x(group.high)} y1={y + 9} y2={y + 9} stroke='#e07a3f' "
            "stroke-width=3 />",
            f"<text x={WIDTH - 72} y={y + 14}>{_number(group.value)}</text>",
        ]
    shapes.append(
        f"<line x1={x(report.total)} x2={x(report.total)} y1=0 y2={height - 20} stroke='#888' "
        "stroke-dasharray='4 3'/>"
    )
    label = f"{report.metric} by group with 95% intervals; dashed: over all"
    return (
        f"<svg viewBox='0 0 {WIDTH} {height}' role=img aria-label='{escape(label, quote=True)}'>"
        + "".join(shapes)
        + f"<text x={label_width} y={height - 4} class=note>{escape(label)}</text></svg>"
    )


def _cross_table(report: Report) -> Iterator[str]:
    head, columns, rows = cross_rows(report)
    yield f"<h2>{escape(head)}</h2><p class=note>{escape(report.metric)} (examples)</p>"
    names = "".join(f"<th>{escape(column)}</th>" for column in columns)
    yield f"<table><thead><tr><th></th>{names}</tr></thead>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"
