"""Show scores to people: tables on the console, and remarks in English and Chinese."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from panjue.eval.metric_values import Summary, counted_size
from panjue.eval.score import ScoreResult
from panjue.eval.twins import NEAR, NearTwins
from panjue.prompts.plumbing.errors import printable
from panjue.prompts.plumbing.intervals import interval_text, with_interval
from panjue.serve.tally import without_reply

MAX_GROUP_COLUMNS = 6
"""Number of groups, or metrics, that fit beside each other into 80 characters."""

MAX_SHOWN_NOTES = 5
"""Number of notes on gold that are printed; the JSON has all."""

Titles = Mapping[str, tuple[str, str]]

ANSWERERS_IN_CHINESE = {"model": "模型", "classifier": "分类器", "text classifier": "分类器"}

OF_FIELD = re.compile(r"(\w+): (model|classifier)(?: \((\S+), (model|classifier) (\S+)\))?")
"""Who answers a field, with both scores on held-out cases if these decided it:
`charges: model (.71, classifier .69)`, or only `charges: model`."""

OF_ALL = re.compile(r"answered by the (model|text classifier)(?:, as (\S+) says)?")
"""Who answers all fields: `answered by the model, as answer=model says`, or without the reason."""


class Remark(NamedTuple):
    """A line for readers of the scores. Text of a file or library is the same in both languages."""

    english: str
    chinese: str


def show(scores: ScoreResult, console: Console) -> None:
    """Print the tables of scores, groups and calibration, and then the remarks in English."""
    # In 80 columns, the headings of baselines wrap, but no name or number is cut.
    columns = [Column(name, no_wrap=True) for name in ("metric", "score", "95% interval")]
    table = Table(*columns, *scores.baselines)
    for name, value in scores.total.mean.items():
        interval = interval_text(scores.total.interval[name])
        baselines = [f"{mean[name]:.4f}" for mean in scores.baselines.values()]
        style = "bold" if name == scores.headline else None
        table.add_row(name, f"{value:.4f}", interval, *baselines, style=style)
    console.print(table)
    for attribute, groups in scores.groups.items():
        console.print(_group_table(attribute, groups, scores))
    if scores.calibration:
        table = Table("field", "ECE", "judgments")  # the report has the bins
        for name, result in scores.calibration.items():
            judgments = sum(one.count for one in result.bins)
            table.add_row(name, f"{result.ece:.4f}", str(judgments))
        console.print(table)
    for remark in remarks(scores):
        line = printable(remark.english)
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _group_table(attribute: str, groups: Mapping[str, Summary], scores: ScoreResult) -> Table:
    """Return a table with a column for each group, or with a row for each if there are many.

    A group that does not count in the total has a star.
    """
    metrics = list(next(iter(groups.values())).mean)
    has_rows = len(groups) > MAX_GROUP_COLUMNS
    if has_rows and len(metrics) > MAX_GROUP_COLUMNS:
        metrics = [scores.headline]  # --json has all
    lines = [[printable(f"by {attribute}"), "examples", *metrics]]
    for name, summary in groups.items():
        means = [f"{summary.mean[metric]:.4f}" for metric in metrics]
        star = "*" if summary.counted == 0 else ""
        size = counted_size(summary.examples, summary.counted)
        lines.append([printable(f"{name}{star}"), size, *means])
    if not has_rows:  # rows become columns
        lines = list(map(list, zip(*lines, strict=True)))
    # Names of groups come from files: `[/b] 某院` is a name and no markup of rich.
    heading, *rows = [map(escape, line) for line in lines]
    table = Table(*[Column(text, overflow="fold") for text in heading])
    table.columns[0].no_wrap = not has_rows  # names of metrics
    for row in rows:
        table.add_row(*row)
    return table


def remarks(scores: ScoreResult, titles: Titles = MappingProxyType({})) -> Iterator[Remark]:
    """Yield remarks on the scores, for the console (English) and for the page (both languages).

    `titles` has the names of metrics, baselines and gold in both languages. The console needs none.
    """
    yield from _remarks_on_numbers(scores)
    if scores.faulty:
        yield Remark(
            f"{scores.faulty} rows have faults; `panjue check` names them",
            f"{scores.faulty} 行有错误；panjue check 逐一列出。",
        )

    def in_chinese(name: str) -> str:
        return titles.get(name, (name, name))[1]

    yield from _remarks_of_the_contest(scores, in_chinese("gold"))
    if asked := scores.never_asked:
        yield Remark(
            without_reply(asked),
            f"{len(asked)} 个案件没有模型的答案，由其他来源补全；编号见 decode.json。",
        )
    if scores.notes:
        yield Remark(
            f"notes on gold: {len(scores.notes)}, scored as far as they can be (--json has all)",
            f"{in_chinese('gold')}有 {len(scores.notes)} 处疑点，已尽量计分；"
            "panjue score --json 列出全部。",
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
            "训练用过这些案件，或用这些案件选择了由谁回答。换成其他案件，得分会更低。",
        )
    if scores.twins:
        yield _remark_on_twins(scores, scores.twins)
    headline = scores.headline
    for name, baseline in scores.baselines.items():
        if scores.total.mean[headline] < baseline[headline]:
            yield Remark(
                f"{headline} is below the baseline '{name}': {baseline[headline]:.4f}",
                f"{in_chinese(headline)}低于基线“{in_chinese(name)}”：{baseline[headline]:.4f}",
            )
    yield from _remarks_on_changes(scores)
    if scores.answered_by:
        chinese = answered_in_chinese(scores.answered_by, in_chinese)
        yield Remark(scores.answered_by, f"各字段由谁回答：{chinese}")


def answered_in_chinese(line: str, in_chinese: Callable[[str], str]) -> str:
    """Return the line on who answered (`Tally.answered_by`) in Chinese.

    `in_chinese` gives the name of a field: `"charges: model (.71, classifier .69)" -> "罪名：模型
    （0.71，分类器 0.69）"`. A line of another form stays as it is.
    """
    if found := OF_ALL.fullmatch(line):
        who, setting = found.groups()
        return ANSWERERS_IN_CHINESE[who] + (f"（{setting}）" if setting else "")
    fields = line.removesuffix(", as decoded before")
    shown = []
    for part in fields.split("; "):
        found = OF_FIELD.fullmatch(part)
        if found is None:
            return line
        name, who, score, other, score_of_other = found.groups()
        of_field = f"{in_chinese(name)}：{ANSWERERS_IN_CHINESE[who]}"
        if other:
            of_other = f"{ANSWERERS_IN_CHINESE[other]} {with_zero(score_of_other)}"
            of_field += f"（{with_zero(score)}，{of_other}）"
        shown.append(of_field)
    return "；".join(shown) + ("（与以前解析时相同）" if fields != line else "")


def with_zero(score: str) -> str:
    """Return a score such as `.97` or `-.24` with the zero before its point."""
    return re.sub(r"^(-?)\.", r"\g<1>0.", score)


def _remarks_on_changes(scores: ScoreResult) -> Iterator[Remark]:
    """Yield remarks on files that have changed since the cases were answered."""
    if scores.changed:
        yield Remark(
            f"{scores.changed}; these old answers are scored without baselines of their training",
            f"训练结果与回答时不同（{scores.changed}）；旧答案照常计分，不含该训练的基线。",
        )
    if scores.edited:
        yield Remark(
            scores.edited, f"提交文件在解析后被改动过，无法得知由谁回答（{scores.edited}）。"
        )
    if scores.classifier_fault:
        yield Remark(
            f"text classifier: unknown, {scores.classifier_fault}",
            f"文本分类器：未知，{scores.classifier_fault}",
        )


def _remark_on_twins(scores: ScoreResult, twins: NearTwins) -> Remark:
    """Return a remark on how many examples have near twins, and on the score without them."""
    if twins.unknown:
        return Remark(
            f"near twins in training: unknown, {twins.unknown}",
            f"训练数据中有无几乎相同的案件：未知，{twins.unknown}",
        )
    if not twins.examples:
        return Remark("no example has a near twin in training", "训练数据中没有几乎相同的案件。")
    count = f"{twins.examples} of {scores.total.examples}"
    said = f"{count} examples have a near twin in training ({NEAR:.0%} of the n-grams)"
    in_chinese = f"{count} 个案件在训练数据中有几乎相同的案件（{NEAR:.0%} 的 n 元组相同）"
    if twins.without is None:
        return Remark(said, f"{in_chinese}。")
    of_others = twins.without
    mean = with_interval(of_others.mean[scores.headline], of_others.interval[scores.headline])
    score = f"{scores.headline} {mean}"
    return Remark(f"{said}; without them {score}", f"{in_chinese}；不计这些案件：{score}。")


def _remarks_on_numbers(scores: ScoreResult) -> Iterator[Remark]:
    """Yield remarks on the number of examples, missing rows, names not in facts, and weight 0."""
    total = scores.total
    count = f"{total.examples} examples"
    in_chinese = f"{total.examples} 个案件"
    if total.counted < total.examples:
        count += f", {total.counted} of which count (weight above 0)"
        in_chinese += f"，其中 {total.counted} 个计分（权重大于 0）"
    yield Remark(
        f"{count}; {scores.missing} without a row, scored as unanswered",
        f"{in_chinese}；{scores.missing} 个在提交文件里没有对应的行，按未回答计分。",
    )
    for line in scores.names.lines():
        count = f"{scores.names.names} 个姓名中有 {scores.names.missing} 个"
        yield Remark(line, f"{count}在案件事实中找不到，第一个：{scores.names.first}")
    of_groups = chain.from_iterable(groups.values() for groups in scores.groups.values())
    if any(summary.counted == 0 for summary in of_groups):
        yield Remark(
            "* a group whose examples all have weight 0: its means are unweighted",
            "* 该组案件的权重都是 0，不计入总分，此处为不加权平均。",
        )
    if total.unweighted:
        yield Remark(
            "every example has weight 0: these are unweighted means",
            "所有案件的权重都是 0，取不加权平均。",
        )


def _remarks_of_the_contest(scores: ScoreResult, gold_in_chinese: str) -> Iterator[Remark]:
    """Yield remarks on how the contest ranks, why it gives no score, and which labels it ignores.

    Tasks differ in the Chinese word for gold, such as 原判 for judgments.
    """
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
            f"列表以外的标签：{gold_in_chinese} {outside['gold']} 个，"
            f"提交文件 {outside['submission']} 个；与比赛一致，均不计入。",
        )
