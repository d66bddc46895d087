"""The tables with which `panjue chat` shows an answer in the terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from panjue.prompts.tasks.judgment.articles import article_name

BAR_WIDTH = 10

DEMO = (
    "演示用的小模型在回答：它只用虚构案件从零训练，回答没有法律意义。\n"
    "A tiny demo model answers. It was trained from scratch on invented cases: its answers have no "
    "legal meaning."
)
CONFIDENCE = (
    "百分比是模型对自己回答的估计，不是答对的概率。\n"
    "Percentages are the model's own estimate, not the probability that it is right."
)
NOTICE = "这是统计推测，不是判决。/ A statistical guess, not a judgment."


def tables(result: Mapping[str, Any], *, demo: bool) -> Iterator[Any]:
    """Yield one table per defendant, then the repairs, what confidences mean, and a disclaimer.

    `demo` says that the demo's tiny model answered, which comes first.
    """
    if demo:
        yield Text(DEMO, style="bold yellow")
    confidences = result.get("confidence")
    judgments = result["answer"]["judgments"]
    for judgment, confidence in zip(judgments, confidences or [{}] * len(judgments), strict=True):
        yield judgment_table(judgment, confidence)
    if result["repairs"]:
        yield Text("repaired: " + "; ".join(result["repairs"]), style="dim")
    if confidences:
        yield Text(CONFIDENCE, style="dim")
    yield Text(NOTICE, style="dim")


def judgment_table(judgment: Mapping[str, Any], confidence: Mapping[str, float]) -> Table:
    """Return the table of one defendant; without `confidence` it has no such column."""
    table = Table(title=Text(judgment["name"], style="bold"), title_justify="left")
    for column in ("", "", "模型自估 confidence") if confidence else ("", ""):
        table.add_column(column, overflow="fold")
    cells = {
        "罪名 charges": "、".join(judgment["charges"]),
        "法条 articles": "\n".join(map(article_name, judgment["articles"])),
        "刑罚 penalty": judgment["penalty"],
    }
    for title, value in cells.items():
        bars = [Text(bar(confidence[title.split()[1]]))] if confidence else []
        table.add_row(title, Text(value), *bars)
    return table


def bar(share: float) -> str:
    """Return a share (0 to 1) as a bar of ten blocks and a percentage; a guess is never certain."""
    full = round(share * BAR_WIDTH)
    percentage = ">99%" if share > 0.99 else f"{share:4.0%}"
    return f"{'█' * full}{'░' * (BAR_WIDTH - full)} {percentage}"
