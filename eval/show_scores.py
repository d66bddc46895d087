"""Scores as people read them: tables on the console, and remarks in English and Chinese."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from panjue.eval.metric_values import Summary
from panjue.eval.reliability import show_reliability
from panjue.eval.score import ScoreResult
from panjue.serve.decoding import never_asked

MAX_GROUP_COLUMNS = 6
"""So many groups, or metrics, have room beside each other in 80 characters."""

MAX_SHOWN_NOTES = 5
"""Notes on gold that are printed; the JSON has all."""


Titles = Mapping[str, tuple[str, str]]


class Remark(NamedTuple):
    """A line for a reader of the scores; what a file or a library says is the same in both."""

    english: str
    chinese: str


def show(scores: ScoreResult, console: Console) -> None:
    # In 80 columns the headings of baselines wrap, and no name or number is cut.
    columns = [Column(name, no_wrap=True) for name in ("metric", "score", "95% interval")]
    table = Table(*columns, *scores.baselines)
    for name, value in scores.total.mean.items():
        low, high = scores.total.interval[name]
        interval = f"{low:.4f} - {high:.4f}"
        baselines = [f"{mean[name]:.4f}" for mean in scores.baselines.values()]
        style = "bold" if name == scores.headline else None
        table.add_row(name, f"{value:.4f}", interval, *baselines, style=style)
    console.print(table)
    for attribute, groups in scores.groups.items():
        console.print(_group_table(attribute, groups, scores.headline))
    if scores.calibration:
        show_reliability(scores.calibration, console)
    for remark in remarks(scores):
        console.print(remark.english, highlight=False, markup=False, soft_wrap=True)


def _group_table(attribute: str, groups: Mapping[str, Summary], headline: str) -> Table:
    """Return a table with a column for each group, or with a row for each of many."""
    metrics = list(next(iter(groups.values())).mean)
    has_rows = len(groups) > MAX_GROUP_COLUMNS
    if has_rows and len(metrics) > MAX_GROUP_COLUMNS:
        metrics = [headline]  # --json has all
    lines = [[f"by {attribute}", "examples", *metrics]]
    for name, summary in groups.items():
        means = [f"{summary.mean[metric]:.4f}" for metric in metrics]
        lines.append([name, str(summary.examples), *means])
    if not has_rows:  # rows become columns
        lines = list(map(list, zip(*lines, strict=True)))
    # Group names come from files: `[/b] 某院` is a name, not rich markup.
    heading, *rows = [map(escape, line) for line in lines]
    table = Table(*[Column(text, overflow="fold") for text in heading])
    table.columns[0].no_wrap = not has_rows  # names of metrics
    for row in rows:
        table.add_row(*row)
    return table


def remarks(scores: ScoreResult, titles: Titles = MappingProxyType({})) -> Iterator[Remark]:
    """Yield what a reader of the numbers should know: for the console, and for the page.

    `titles` are names of metrics and baselines in the two languages.
    """
    total = scores.total.examples
    yield Remark(
        f"{total} examples; {scores.missing} without a row, scored as unanswered",
        f"{total} 个案件；{scores.missing} 个在提交文件里没有对应的行，按未回答计分。",
    )
    if scores.faulty:
        yield Remark(
            f"{scores.faulty} rows have faults; `panjue check` names them",
            f"{scores.faulty} 行有错误；panjue check 逐一列出。",
        )
    yield from _remarks_of_the_contest(scores)
    if scores.total.unweighted:
        yield Remark(
            "every example has weight 0: these are unweighted means",
            "所有案件的权重都是 0，取不加权平均。",
        )
    if asked := scores.never_asked:
        yield Remark(
            never_asked(asked),
            f"{len(asked)} 个案件模型未作答，答案不是模型给出的；编号见 decode.json。",
        )
    if scores.notes:
        yield Remark(
            f"notes on gold: {len(scores.notes)}, scored as far as they can be (--json has all)",
            f"原判有 {len(scores.notes)} 处疑点，已尽量计分；panjue score --json 列出全部。",
        )
        for note in scores.notes[:MAX_SHOWN_NOTES]:
            yield Remark(f"  id {note}", f"编号 {note}")
    if scores.unreadable_rate is not None:
        yield Remark(
            f"unreadable replies: {scores.unreadable_rate:.2%}",
            f"无法解析的输出：{scores.unreadable_rate:.2%}",
        )
    if scores.in_sample:
        yield Remark(
            f"{scores.in_sample}; expect lower scores on other cases",
            "训练用过这些案件，或据此选择了由谁回答：换成其他案件，得分会更低。",
        )
    headline = scores.headline

    def in_chinese(name: str) -> str:
        return titles.get(name, (name, name))[1]

    for name, baseline in scores.baselines.items():
        if scores.total.mean[headline] < baseline[headline]:
            yield Remark(
                f"{headline} is below the baseline '{name}': {baseline[headline]:.4f}",
                f"{in_chinese(headline)}低于对照“{in_chinese(name)}”：{baseline[headline]:.4f}",
            )
    if scores.changed:
        yield Remark(
            f"{scores.changed}; these old answers are scored without baselines of their training",
            f"训练结果已与作答时不同（{scores.changed}）；旧答案照常计分，不含该训练的对照。",
        )
    if scores.classifier_fault:
        yield Remark(
            f"text classifier: unknown, {scores.classifier_fault}",
            f"文本分类器：未知，{scores.classifier_fault}",
        )
    if scores.answered_by:
        yield Remark(scores.answered_by, f"各字段由谁回答：{scores.answered_by}")


def _remarks_of_the_contest(scores: ScoreResult) -> Iterator[Remark]:
    """Yield what the contest makes of these numbers, where that is something else."""
    if scores.ranked_by:
        means = ", ".join(f"{metric} {mean:.4f}" for metric, mean in scores.ranked_by.items())
        over = scores.ranked_groups
        yield Remark(
            f"mean of {' and '.join(over)}, by which the contest ranks: {means}",
            f"比赛按 {'、'.join(over)} 的平均值排名：{means}",
        )
    if scores.void:
        yield Remark(
            f"the contest gives no score to such a file; rows: {scores.void}",
            f"比赛对这样的文件不给分；行：{scores.void}",
        )
    if outside := scores.outside:
        yield Remark(
            f"labels outside the lists: {outside['gold']} in gold, "
            f"{outside['submission']} in the submission; as in the contest, none counts",
            f"清单之外的标签：原判 {outside['gold']} 个，提交文件 {outside['submission']} 个；"
            "与比赛一致，均不计入。",
        )
