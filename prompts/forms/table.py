"""Tables with one row for each person, or with a judgment in words in a column.

A case without a judgment may have all its persons in one row.
"""

import re
from collections.abc import Iterator
from typing import Any

from panjue.prompts.forms.chat import case_of
from panjue.prompts.forms.form import (
    ARTICLES,
    CHARGES,
    FACT,
    ID,
    MONTHS,
    NAMES_OF_PERSON,
    TERM,
    VERDICT,
    Case,
    Form,
    Row,
    column,
    has,
)
from panjue.prompts.forms.record import (
    SEVERAL,
    items_of_field,
    name_of_person,
    outcome_of,
    without_fraction,
)
from panjue.prompts.names import names_not_in
from panjue.prompts.plumbing.errors import NotSaid
from panjue.prompts.tasks.judgment.penalties import TERMS

LABEL_COLUMNS = (*CHARGES, *ARTICLES, *MONTHS, *TERM, *TERMS)


def is_table_row(row: Row) -> bool:
    return has(row, FACT) and (has(row, NAMES_OF_PERSON) or has(row, VERDICT))


def key_of_case(row: Row) -> object:
    """Return what the rows of a case have in common: the id, or the facts without an id.

    Raises:
        NotSaid: it is empty, as below a merged cell. The row may belong to the case above.
    """
    names = ID if has(row, ID) else FACT
    found = column(row, names)
    if found is None:
        raise NotSaid(f"a row without {'an id' if names is ID else 'facts'}; fill merged cells in")
    return str(found)


def table_cases(*rows: Row) -> Iterator[Case]:
    """Yield the case of the rows with one id.

    Each row has the judgment of one person, or a single row has the judgment of all in prose.
    Without columns of a judgment, each row has one person, or a single row has all.
    """
    facts = {str(column(row, FACT) or "") for row in rows}
    if len(facts) > 1:
        raise NotSaid("rows of one id with different facts")
    [fact] = facts
    if not fact.strip():
        raise NotSaid("no facts")
    number = _id(column(rows[0], ID))
    case: Case = {} if number is None else {"id": number}
    if has(rows[0], VERDICT) and not has(rows[0], CHARGES):
        if len(rows) > 1:
            raise NotSaid("several rows of one case, each with a judgment in words")
        words = column(rows[0], VERDICT)
        if not isinstance(words, str):
            raise NotSaid("no judgment in words", str(words))
        yield {**case, **case_of(fact, words)}
        return
    case["fact"] = fact
    if any(has(row, LABEL_COLUMNS) for row in rows):
        if not any(map(_has_label, rows)):
            raise NotSaid("empty columns of the judgment; remove them if there are no answers")
        outcomes = [outcome_of(row) for row in rows]
        yield {**case, "defendants": [one["name"] for one in outcomes], "outcomes": outcomes}
    elif len(rows) == 1:
        yield {**case, "defendants": _all_names(column(rows[0], NAMES_OF_PERSON), fact)}
    else:
        names = [name_of_person(column(row, NAMES_OF_PERSON)) for row in rows]
        yield {**case, "defendants": names}


def _has_label(row: Row) -> bool:
    """Say whether a column of the judgment is not empty."""
    filled = {key: value for key, value in row.items() if value not in (None, "", [])}
    return has(filled, LABEL_COLUMNS)


AND_OTHERS = re.compile(r"等(?:[0-9一二两三四五六七八九十]*人)?$")


def _all_names(value: Any, fact: str) -> list[str]:
    """Return all persons of a case without a judgment: of a list, or of a text: `张某、王某`.

    Raises:
        NotSaid: there is none; or it is not certain that a text names all, and nothing else:
            `张某等三人`, `张某，男，汉族`, `张某和王某`, or a part that is no name in the facts.
    """
    names = items_of_field(value)
    if not names:
        raise NotSaid("no person is named")
    if len(names) == 1 and isinstance(names[0], str):
        [text] = names
        if AND_OTHERS.search(text) or _has_and(text, fact):
            raise NotSaid(SEVERAL, text)
        parts = [part.strip() for part in re.split("[、;；\n]", text)]
        missing = names_not_in(fact, parts)
        if all(parts) and not missing:
            names = parts
        elif all(parts) and len(parts) > 1:
            told = "several persons in one field, and not all of them in the facts"
            raise NotSaid(told, "、".join(missing))
    return [name_of_person(name) for name in names]


def _has_and(text: str, fact: str) -> bool:
    """Say whether 和, 与 or 及 stands between names of the facts, and not within one: 张和平."""
    for sign in "和与及":
        parts = text.split(sign)
        may_be_names = len(parts) > 1 and min(map(len, parts)) > 1
        if may_be_names and not names_not_in(fact, parts):
            return True
    return False


def _id(value: object) -> object:
    """Return an id as a number, as in JSON: the text `"7"` of a CSV, or 7.0 of Parquet, as 7."""
    if isinstance(value, str) and value.isdecimal() and str(int(value)) == value:
        return int(value)
    return without_fraction(value)


TABLE = Form("rows of persons", is_table_row, table_cases, key=key_of_case)
