"""Tables with one row for each person, or with a judgment in words in a column.

A case without a judgment may have all its persons in one row.
"""

from collections.abc import Iterator

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
    BETWEEN_NAMES,
    items_of_field,
    name_of_person,
    outcome_of,
    without_fraction,
)
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

    Each row has the judgment of one person. Or a single row has the judgment of all in prose.
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
        outcomes = [outcome_of(row) for row in rows]
        yield {**case, "defendants": [one["name"] for one in outcomes], "outcomes": outcomes}
    else:
        yield {**case, "defendants": [name for row in rows for name in _names(row, fact)]}


def _names(row: Row, fact: str) -> list[str]:
    """Return the persons in a row without a judgment: one name, a list, or names divided by 、.

    Raises:
        NotSaid: there is none, or not all parts of a text are in the facts: `张某、李某等三人`.
    """
    value = column(row, NAMES_OF_PERSON)
    items = items_of_field(value) or [value]
    if len(items) == 1 and isinstance(items[0], str):
        parts = [part.strip() for part in BETWEEN_NAMES.split(items[0])]
        if all(part and part in fact for part in parts):
            items = parts
    return [name_of_person(item) for item in items]


def _id(value: object) -> object:
    """Return an id as a number, as in JSON: the text `"7"` of a CSV, or 7.0 of Parquet, as 7."""
    if isinstance(value, str) and value.isdecimal() and str(int(value)) == value:
        return int(value)
    return without_fraction(value)


TABLE = Form("rows of persons", is_table_row, table_cases, key=key_of_case)
