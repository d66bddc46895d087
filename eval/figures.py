"""The figures of the reports: SVG for the page, drawn by matplotlib; text stays text."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from html import escape
from io import StringIO
from itertools import cycle
from typing import Any
from warnings import catch_warnings, filterwarnings

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from panjue.eval.calibration import Calibration
from panjue.eval.report import Report
from panjue.eval.score import Scores

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # the browser's fonts: this machine may have no Chinese font
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "panjue",  # the same report gives the same bytes
    "text.parse_math": False,  # a $ in a name is a $
}
MAX_CONFUSION_CLASSES = 40
"""A confusion of more classes is not drawn: it would be unreadable."""
BLUE, ORANGE, GRAY = "#3a7ca5", "#e07a3f", "#9aa5b1"


def as_svg(draw: Callable[..., Figure | None]) -> Callable[..., str]:
    """Make a function return its figure as SVG text; empty if it drew no figure."""

    @wraps(draw)
    def svg(*arguments: Any) -> str:
        with mpl.rc_context(STYLE), catch_warnings():
            filterwarnings("ignore", "Glyph .* missing from")  # the page uses the browser's fonts
            figure = draw(*arguments)
            if figure is None:
                return ""
            out = StringIO()
            figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
        text = out.getvalue()
        # A screen reader would read all texts of the figure; the page has the numbers in a table.
        labelled = f'<svg role="img" aria-label="{escape(str(figure.get_label()))}"'
        return text[text.index("<svg") :].replace("<svg", labelled, 1)

    return svg


Label = Callable[[str], str]
"""Name of a metric, field or baseline -> what it is called in a figure."""


@as_svg
def metrics(scores: Scores, label: Label) -> Figure:
    """Draw every metric as a bar with its interval, and the baselines as marks."""
    names = list(scores.total.mean)
    figure = Figure(figsize=(7, 0.45 * len(names) + 1))
    axes = figure.subplots()
    for y, name in enumerate(names):
        low, high = scores.total.interval[name]
        axes.barh(y, scores.total.mean[name], color=BLUE, height=0.6)
        axes.plot([low, high], [y, y], color=ORANGE, linewidth=2)
    baselines = {name: mean for name, mean in scores.baselines.items() if mean}
    for mark, (baseline, mean) in zip(cycle("osD^vX*P"), baselines.items(), strict=False):
        [marks] = axes.plot(
            [mean[n] for n in names], range(len(names)), mark, label=label(baseline)
        )
        marks.set(color="black", markeredgecolor="white", markersize=7)
    if baselines:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.set_label("metrics with intervals and baselines · 得分、区间与对照")
    axes.set_yticks(range(len(names)), map(label, names))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    return figure


@as_svg
def by_group(scores: Scores, attribute: str, label: Label) -> Figure | None:
    """Draw the headline metric of every group of an attribute."""
    groups = scores.groups[attribute]
    if len(groups) < 2:
        return None
    last = list(scores.total.mean)[-1]
    figure = Figure(figsize=(7, 0.3 * len(groups) + 1))
    axes = figure.subplots()
    values = [summary.mean[last] for summary in groups.values()]
    axes.barh(range(len(groups)), values, color=BLUE, height=0.7)
    axes.axvline(scores.total.mean[last], color=GRAY, linestyle="--")
    labels = [f"{name} ({summary.examples})" for name, summary in groups.items()]
    axes.set_yticks(range(len(groups)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(label(last))
    figure.set_label(f"{last} by {attribute}")
    return figure


@as_svg
def confusion(report: Report, field: str) -> Figure | None:
    """Draw the confusion matrix of a field: a row per gold value, a column per predicted one."""
    order, cells = report.orders[field], report.confusion[field]
    if len(order) > MAX_CONFUSION_CLASSES:
        return None
    counts = np.array([[cells[gold, predicted] for predicted in order] for gold in order])
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = 0.42 * len(order) + 1.5
    figure = Figure(figsize=(size, size))
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, j in np.argwhere(counts).tolist():
        color = "white" if shares[i, j] > 0.5 else "black"
        axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(order)), order, rotation=90)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("predicted / 预测")
    axes.set_ylabel("gold / 正确")
    figure.set_label(f"{field}: gold and predicted · 正确与预测")
    return figure


@as_svg
def reliability(fields: Mapping[str, Calibration], label: Label) -> Figure:
    """Draw the accuracy of judgments over their confidence."""
    figure = Figure(figsize=(5, 4))
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GRAY, linestyle="--")
    for name, result in fields.items():
        confidences = [b.confidence for b in result.bins]
        accuracies = [b.accuracy for b in result.bins]
        axes.plot(
            confidences, accuracies, marker="o", label=f"{label(name)}: ECE {result.error:.3f}"
        )
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("confidence / 置信度")
    axes.set_ylabel("right / 正确率")
    figure.set_label("calibration · 校准")
    return figure


@as_svg
def curve(rows: Sequence[Mapping[str, float]], names: Sequence[str], label: Label) -> Figure | None:
    """Draw the values of these names in the training log, over steps."""
    lines = {n: points for n in names if (points := [(r["step"], r[n]) for r in rows if n in r])}
    if not lines:
        return None
    figure = Figure(figsize=(7, 3))
    axes = figure.subplots()
    for name, points in lines.items():
        marker = "." if len(points) < 40 else None
        axes.plot(*zip(*points, strict=True), label=label(name), marker=marker)
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("step / 步")
    figure.set_label(f"{', '.join(lines)} over steps")
    return figure
