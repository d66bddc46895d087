"""The report's figures, drawn by matplotlib as SVG that a page can hold; text stays text."""

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
from panjue.eval.fairness import Report as Fairness
from panjue.eval.report import Report
from panjue.eval.score import Scores

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # the reader's own fonts: no Chinese font need be at hand here
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "panjue",  # equal reports are equal byte for byte
    "text.parse_math": False,  # a $ in a name is a $
}
LARGEST = 40
"""Classes up to which a confusion is drawn; beyond, nobody can read it."""
BLUE, ORANGE, GRAY = "#3a7ca5", "#e07a3f", "#9aa5b1"


def drawn(draw: Callable[..., Figure | None]) -> Callable[..., str]:
    """Let a function that draws a figure return it as SVG; nothing where it drew none."""

    @wraps(draw)
    def svg(*given: Any) -> str:
        with mpl.rc_context(STYLE), catch_warnings():
            filterwarnings("ignore", "Glyph .* missing from")  # the page has the reader's fonts
            figure = draw(*given)
            if figure is None:
                return ""
            out = StringIO()
            figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
        text = out.getvalue()
        # Its own texts would be read out one by one; the numbers stand in a table beside it.
        named = f'<svg role="img" aria-label="{escape(str(figure.get_label()))}"'
        return text[text.index("<svg") :].replace("<svg", named, 1)

    return svg


@drawn
def metrics(scores: Scores) -> Figure:
    """Draw every metric with its interval, and the baselines as lines across."""
    names = list(scores.total.mean)
    figure = Figure(figsize=(7, 0.45 * len(names) + 1))
    axes = figure.subplots()
    for place, name in enumerate(names):
        low, high = scores.total.interval[name]
        axes.barh(place, scores.total.mean[name], color=BLUE, height=0.6)
        axes.plot([low, high], [place, place], color=ORANGE, linewidth=2)
    baselines = {name: mean for name, mean in scores.baselines.items() if mean}
    for mark, (baseline, mean) in zip(cycle("osD^vX*P"), baselines.items(), strict=False):
        [marks] = axes.plot([mean[n] for n in names], range(len(names)), mark, label=baseline)
        marks.set(color="black", markeredgecolor="white", markersize=7)
    if baselines:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.set_label("metrics with intervals and baselines · 得分、区间与对照")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    return figure


@drawn
def by_group(scores: Scores, attribute: str) -> Figure | None:
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
    told = [f"{name} ({summary.examples})" for name, summary in groups.items()]
    axes.set_yticks(range(len(groups)), told)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(last)
    figure.set_label(f"{last} by {attribute}")
    return figure


@drawn
def fairness(found: Fairness, attribute: str) -> Figure:
    """Draw the metric of every group of an attribute with its interval, and that over all."""
    groups = found.attributes[attribute].groups
    figure = Figure(figsize=(7, 0.3 * len(groups) + 1))
    axes = figure.subplots()
    for place, group in enumerate(groups.values()):
        axes.barh(place, group.value, color=GRAY if group.flagged else BLUE, height=0.7)
        axes.plot([group.low, group.high], [place, place], color=ORANGE, linewidth=2)
    axes.axvline(found.total, color=GRAY, linestyle="--")
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(found.metric)
    figure.set_label(f"{found.metric} by {attribute} with 95% intervals; dashed: over all")
    return figure


@drawn
def confusion(found: Report, field: str) -> Figure | None:
    """Draw how often each gold value was predicted as each, rows by gold, in their order."""
    order, cells = found.orders[field], found.confusion[field]
    if len(order) > LARGEST:
        return None
    counts = np.array([[cells[gold, told] for told in order] for gold in order])
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = 0.42 * len(order) + 1.5
    figure = Figure(figsize=(size, size))
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, j in np.argwhere(counts).tolist():
        ink = "white" if shares[i, j] > 0.5 else "black"
        axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=ink, fontsize=8)
    axes.set_xticks(range(len(order)), order, rotation=90)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("predicted / 预测")
    axes.set_ylabel("gold / 正确")
    figure.set_label(f"{field}: gold and predicted · 正确与预测")
    return figure


@drawn
def reliability(fields: Mapping[str, Calibration]) -> Figure:
    """Draw how often judgments of each confidence are right."""
    figure = Figure(figsize=(5, 4))
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GRAY, linestyle="--")
    for name, found in fields.items():
        sure = [one.confidence for one in found.bins]
        right = [one.accuracy for one in found.bins]
        axes.plot(sure, right, marker="o", label=f"{name}: ECE {found.error:.3f}")
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("confidence / 置信度")
    axes.set_ylabel("right / 正确率")
    figure.set_label("calibration · 校准")
    return figure


@drawn
def curve(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> Figure | None:
    """Draw what the training's log has under these names, over steps."""
    lines = {name: [(r["step"], r[name]) for r in rows if name in r] for name in names}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return None
    figure = Figure(figsize=(7, 3))
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 40 else None)
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("step / 步")
    figure.set_label(f"{', '.join(lines)} over steps")
    return figure
