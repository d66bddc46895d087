"""Public data sets of criminal judgments, in their published forms."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.forms.form import Case, Form, Row
from panjue.prompts.forms.record import (
    SEVERAL,
    article_list,
    charge_list,
    items_of_field,
    literal,
    name_of_person,
    without_fraction,
)
from panjue.prompts.plumbing.errors import NotSaid
from panjue.prompts.tasks.judgment.charges import inserted_article
from panjue.prompts.tasks.judgment.citations import FIRST_OF_CRIMES, cited_articles
from panjue.prompts.tasks.judgment.penalties import TERMS, sentence
from panjue.prompts.tasks.judgment.verdict import principal_of, verdict_of

NO_PARAGRAPHS = "articles have no paragraphs here (303, not 303-2): do not mix with such as have"

SHORTEST_CERTAIN = 7
"""In months. A shorter term in a source without kinds may be detention (拘役, up to 6 months)."""


def whole_articles(value: Any, charges: Sequence[str]) -> list[str]:
    """Return the articles of a source that usually writes them as whole numbers.

    The law has inserted articles: 133之一, written `133.1` here, is 危险驾驶罪. A source that drops
    之一 writes 133. If it writes 133.1, there is no doubt.

    Raises:
        NotSaid: 133 is given for a crime of 133之一, and 133.1 is not.
    """
    articles = article_list(value)
    for charge in charges:
        inserted = inserted_article(charge)
        if inserted and inserted not in articles and inserted.split(".")[0] in articles:
            raise NotSaid("an article of which the source drops 之一", f"{charge} {inserted}")
    return articles


def months_alone(months: Any, fine: Any) -> dict[str, Any]:
    """Return the penalty for a source that has months without the kind of penalty."""
    months = without_fraction(months)
    if type(months) is not int or months < 0:
        raise NotSaid("a penalty that cannot be read", str(months))
    amount = fine if isinstance(fine, int | float) and fine > 0 else 0
    if months == 0 and amount:
        return sentence(fine=amount)
    if months == 0:
        raise NotSaid("0 months and no fine: an exemption, or nothing was read")
    if months < SHORTEST_CERTAIN:
        raise NotSaid("1 to 6 months: 拘役 or 有期徒刑, which the source does not say")
    return sentence(imprisonment=months, fine=amount)


def _cail2018(row: Row) -> Iterator[Case]:
    """Yield the case of a row with the judgment of one person under `meta` or beside the facts."""
    meta = row.get("meta", row)
    term = meta.get("term_of_imprisonment", meta)
    if not isinstance(term, Mapping):
        raise NotSaid("a penalty that cannot be read", str(term))
    persons = items_of_field(meta.get("criminals"))
    if len(persons) != 1:
        raise NotSaid("several defendants, whose judgments the source does not tell apart")
    name = name_of_person(persons[0])
    charges = charge_list(meta.get("accusation"))
    fine = meta.get("punish_of_money")
    if term.get("death_penalty") is True:
        penalty = sentence(death_penalty=True)
    elif term.get("life_imprisonment") is True:
        penalty = sentence(life_imprisonment=True)
    else:  # with 0 months, the fine is the whole penalty
        penalty = months_alone(term.get("imprisonment"), fine)
    articles = whole_articles(meta.get("relevant_articles"), charges)
    yield _case(row, [(name, charges, articles, penalty)])


def _multiljp(row: Row) -> Iterator[Case]:
    persons = []
    criminals = row["criminals_info"]
    if not isinstance(criminals, Mapping) or not criminals:
        raise NotSaid("no person is named")
    for name, info in criminals.items():
        if not isinstance(info, Mapping) or not isinstance(info.get("term"), str):
            raise NotSaid("a person without a penalty", name)
        charges = charge_list(info.get("accusations"))
        articles = whole_articles(info.get("laws"), charges)
        persons.append((name_of_person(name), charges, articles, principal_of(info["term"])))
    yield _case(row, persons)


def _multijustice(*rows: Row) -> Iterator[Case]:
    facts = {str(row.get("fact")) for row in rows}
    if len(facts) > 1:
        raise NotSaid("rows of one index with different facts")
    persons = [_multijustice_person(row) for row in rows]
    yield _case({**rows[0], "id": rows[0].get("index")}, persons)


def _multijustice_person(row: Row) -> "Person":
    """Return the judgment of the person of a row.

    The penalty is read from its words in `defendant_judgement`, or without them from the months in
    `imprisonment`. If both are there, they must agree.
    """
    name = name_of_person(_only(items_of_field(row.get("defendant")), SEVERAL))
    charges = charge_list(_of_person(row, "defendant_accusation", name))
    articles = whole_articles(row.get("relevant_article"), charges)
    judged = _of_person(row, "defendant_judgement", name)
    if isinstance(judged, list):
        judged = _only(judged, "several judgments of one person")
    months = row.get("imprisonment")
    if isinstance(months, str) and re.fullmatch(r"\d+(?:\.\d+)?", months.strip()):
        months = float(months)
    if not isinstance(judged, str) or not judged.strip():
        return name, charges, articles, months_alone(months, fine=0)
    penalty = principal_of(judged, name)
    said = max(penalty[term] for term in TERMS)  # only one of them is above 0
    if isinstance(months, float | int) and said and months != said:
        raise NotSaid("two penalties that differ", f"{months:g} months, {judged}")
    return name, charges, articles, penalty


def _of_person(row: Row, column: str, name: str) -> Any:
    """Return the value of a column for a person: 盗窃罪, of the cell `{"张某": "盗窃罪"}`.

    A cell without names is the value itself.
    """
    value = row.get(column)
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        value = literal(value)
    return value.get(name) if isinstance(value, Mapping) else value


def _only(values: Sequence[Any], reason: str) -> Any:
    """Return the only one of some values; NotSaid with the reason if there are none or several."""
    if len(values) != 1:
        raise NotSaid(reason, str(values))
    return values[0]


def _lecard(row: Row) -> Iterator[Case]:
    """Yield the case of a row: `ajjbqk` has the facts, `pjjg` the verdict, `qw` the whole judgment.

    The verdict cites no articles. The sentence before it does: 依照刑法第264条，判决如下.
    """
    verdict, whole = row["pjjg"], row.get("qw")
    if not isinstance(verdict, str) or not isinstance(whole, str):
        raise NotSaid("no verdict, or no text of the judgment")
    before = whole.replace(" ", "").partition("判决如下")[0]
    citing = re.split("[。；]", before)[-1]
    crimes = [
        one for one in cited_articles(citing) if int(re.split("[.-]", one)[0]) >= FIRST_OF_CRIMES
    ]
    if not crimes:
        raise NotSaid("no article of a crime is named")
    outcomes, _ = verdict_of(verdict, "、".join(map(_cited, crimes)))
    case: Case = {"id": row.get("writId") or row.get("ajId")}
    case |= {"fact": row["ajjbqk"], "defendants": [one["name"] for one in outcomes]}
    yield {**case, "outcomes": outcomes}


def _cited(article: str) -> str:
    """Return the citation of an article: `133.1-2` -> 第133条之1第2款."""
    number, _, paragraph = article.partition("-")
    number, _, inserted = number.partition(".")
    name = f"第{number}条" + (f"之{inserted}" if inserted else "")
    return name + (f"第{paragraph}款" if paragraph else "")


Person = tuple[str, list[str], list[str], dict[str, Any]]
"""Name, charges, articles, penalty."""


def _case(row: Row, persons: Sequence[Person]) -> Case:
    """Return the case of a row with `id` and `fact`, which may be missing."""
    outcomes = [
        {"name": name, "penalty": penalty, "charges": charges, "articles": articles}
        for name, charges, articles, penalty in persons
    ]
    names = [name for name, *_ in persons]
    case = {"id": row.get("id"), "fact": row.get("fact"), "defendants": names, "outcomes": outcomes}
    return {key: value for key, value in case.items() if value is not None}


def _is_cail2018(row: Row) -> bool:
    """Say whether a row has the judgment under `meta`, or as on Hugging Face beside the facts."""
    is_nested = isinstance(row.get("meta"), Mapping) and "accusation" in row["meta"]
    return is_nested or {"accusation", "relevant_articles", "imprisonment"} <= row.keys()


CAIL2018 = Form(
    "CAIL2018",
    _is_cail2018,
    _cail2018,
    notes=(
        NO_PARAGRAPHS,
        "a term of 7 months or more counts as imprisonment; 管制 is not told apart",
    ),
)
MULTILJP = Form("MultiLJP", lambda row: "criminals_info" in row, _multiljp, notes=(NO_PARAGRAPHS,))
MULTIJUSTICE = Form(
    "MultiJustice",
    lambda row: {"defendant_accusation", "relevant_article", "fact"} <= row.keys(),
    _multijustice,
    key=lambda row: row.get("index"),
    notes=(NO_PARAGRAPHS,),
)
LECARD = Form(
    "LeCaRD",
    lambda row: {"ajjbqk", "pjjg"} <= row.keys(),
    _lecard,
    notes=("articles of the general part (1-101) are no labels here",),
)
