"""The definition of a form of files, and how to find a column in its rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from panjue.prompts.plumbing.decode import flatten_forms
from panjue.prompts.plumbing.errors import NotSaid

Row = Mapping[str, Any]
Case = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """A form of files: how to recognize its rows, and how to make cases from them."""

    title: str
    fits: Callable[[Row], bool]
    """Whether a row has columns that only this form has."""
    cases: Callable[..., Iterator[Case | NotSaid]]
    """The cases of a row, `cases(row)`, or with a `key` of all rows of a case: `cases(*rows)`. `id`
    may be missing."""
    key: Callable[[Row], object] | None = None
    """What the rows of one case have in common."""
    notes: tuple[str, ...] = ()
    """Notes for the user about every file of this form."""


NAMES_OF_PERSON = (
    *("name", "defendant", "defendants", "criminal", "criminals", "person"),
    *("被告人", "姓名", "被告", "被告人姓名", "当事人"),
)
FACT = (
    *("fact", "facts", "text", "content", "case", "description", "input"),
    *("案情", "事实", "案件事实", "犯罪事实", "案情描述", "案件描述", "案件", "正文", "内容"),
)
CHARGES = (
    *("charges", "charge", "accusation", "accusations", "crime", "crimes"),
    *("罪名", "所犯罪名", "定罪", "罪名列表"),
)
ARTICLES = (
    *("articles", "article", "laws", "law", "relevant_articles", "relevant_article"),
    *("法条", "相关法条", "适用法条", "法律条文", "适用法律", "法律依据", "刑法条文"),
)
MONTHS = ("months", "term_months", "imprisonment_months", "刑期(月)", "刑期月", "刑期_月", "月数")
TERM = (
    *("penalty", "term", "sentence", "punishment", "judgement", "judgment"),
    *("刑期", "刑罚", "判决", "判决结果", "判处刑罚", "主刑", "量刑", "宣告刑", "判处"),
)
VERDICT = ("verdict", "output", "reply", "answer", "response", "判决主文", "判决书", "裁判结果")
ID = ("id", "case_id", "caseid", "uid", "index", "编号", "序号", "案号", "案件编号")


def column(row: Row, names: Iterable[str]) -> Any:
    """Return the value of a row under one of these names, in any case of letters; None without any.

    Raises:
        NotSaid: the row has two of them with different values.
    """
    wanted = set(names)
    found = {key: value for key, value in row.items() if _plain(key) in wanted}
    values = [value for value in found.values() if value not in (None, "", [])]
    if any(value != values[0] for value in values):
        raise NotSaid("two columns of one meaning differ", ", ".join(found))
    return values[0] if values else None


def has(row: Row, names: Iterable[str]) -> bool:
    """Say whether a row has a column with one of these names, in any case of letters."""
    return not set(names).isdisjoint(map(_plain, row))


def _plain(key: object) -> str:
    """Return the name of a column as it is in the lists above: `刑期（月）` -> `刑期(月)`."""
    return flatten_forms(str(key)).strip().lower().replace(" ", "_")
