"""Cases of CAIL2018 as official cases."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_write, check_text, dump, quoted
from panjue.prompts.plumbing.rows import CAIL2018, case_rows
from panjue.prompts.tasks.judgment.articles import ARTICLE_ID
from panjue.prompts.tasks.judgment.inserted import with_inserted
from panjue.prompts.tasks.judgment.penalties import FINE_OR_EXEMPT, FLAGS, sentence
from panjue.prompts.tasks.judgment.read import read

SHORTEST_IMPRISONMENT = 6
"""Months; article 45 of the Criminal Law."""

NO_TERM = (
    "0 months: a fine alone, exemption or a term that was not found, the file does not tell; "
    f"written without a term, penalty class {FINE_OR_EXEMPT}"
)
SHORT_TERM = (
    "1 to 5 months: too short for imprisonment, so detention (拘役) or, rarely, surveillance "
    "(管制), the file does not tell; written as detention"
)

CONTRADICTION = "death or life imprisonment beside months; the months are left out"

FORMS = {
    "criminals": re.compile(
        r"(?!.*[一-龥]\s+[一-龥])[^\s\[\]'\",，、;；](?:[^\[\]'\",，、;；\n]*\S)?"
    ),
    "accusation": re.compile(r"(?:\[[一-龥、]+\]|[一-龥、（）()])+"),
    "relevant_articles": ARTICLE_ID,
}
"""Field of `meta` -> what one of its items looks like."""


def convert(path: Path, out: Path, report: Callable[[str], None]) -> bool:
    """Write the cases of a CAIL2018 file to `out`; say whether every row could be converted.

    A row's number is its id. `report` gets a line for each other row, with its place and the
    reason, then the counts.
    """
    rows = 0
    converted = 0
    noted: dict[str, list[int | str]] = defaultdict(list)  # note -> the places of its rows
    with atomic_write(out) as file:
        for place, load in case_rows(path):
            rows += 1
            try:
                case, notes = from_cail2018(load())
            except (UserError, KeyError) as error:
                reason = f"the row has no {error}" if isinstance(error, KeyError) else str(error)
                report(f"{path}:{place}: not converted: {reason}")
                continue
            converted += 1
            for note in notes:
                noted[note].append(place)
            file.write(dump({"id": rows, **case}) + "\n")
        if not converted:
            raise UserError(f"{path}: has no rows that can be converted")
    for note, places in noted.items():
        report(f"{len(places)} rows, the first is {path}:{places[0]}: {note}")
    report(f"written: {out}, {converted} of {rows} rows")
    return converted == rows


def from_cail2018(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a row as a case without its id, and notes on what the format does not tell."""
    if not row.keys() >= CAIL2018:
        fields = ", ".join(row) or "none"
        raise UserError(f"its fields are {fields}; only CAIL2018 (fact, meta) can be converted")
    meta = _object(row["meta"], "meta")
    term = _object(meta["term_of_imprisonment"], "term_of_imprisonment")
    names = _list(meta, "criminals")
    if len(names) != 1:
        raise UserError(
            f"'criminals' has {len(names)} names, and 'accusation' is not by name; "
            "only a case of one defendant can be converted"
        )
    penalty, notes = _sentence_of_term(term)
    fine = meta.get("punish_of_money")
    if fine is not None:
        penalty["fine"] = _amount(fine, "'punish_of_money' must be yuan")
    charges = [charge_name(charge) for charge in _list(meta, "accusation")]
    articles, missing = with_inserted(charges, _list(meta, "relevant_articles"))
    outcome = {"name": names[0], "penalty": penalty, "charges": charges, "articles": articles}
    case = {"fact": row["fact"], "defendants": names, "outcomes": [outcome]}
    check_text(case)
    read({"id": 0, **case})  # what is written can be read
    return case, notes + missing


def charge_name(accusation: str) -> str:
    """Return a charge as our labels have it: `[走私、贩卖]毒品` -> 走私、贩卖毒品罪."""
    return re.sub(r"[\[\]]", "", accusation).removesuffix("罪") + "罪"


def _sentence_of_term(term: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    flags = {key: term[key] for key in FLAGS}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise UserError(f"{key!r} must be true or false, found {value!r}")
    months = _amount(term["imprisonment"], "'imprisonment' must be months")
    if any(flags.values()):
        is_contradictory = months or all(flags.values())
        return sentence(**flags), [CONTRADICTION] if is_contradictory else []
    if 0 < months < SHORTEST_IMPRISONMENT:
        return sentence(detention=months), [SHORT_TERM]
    return sentence(imprisonment=months), [] if months else [NO_TERM]


def _amount(value: Any, rule: str) -> int | float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise UserError(f"{rule}, 0 or more, found {value!r}")
    amount: int | float = value
    return amount


def _list(meta: Mapping[str, Any], key: str) -> list[str]:
    values = meta[key]
    if not isinstance(values, list):
        raise UserError(f"{key!r} must be a list, found {quoted(values)}")
    items = []
    for value in values:
        item = str(value).strip()
        if type(value) not in (str, int) or not FORMS[key].fullmatch(item):
            raise UserError(f"{key!r} has {quoted(value)}, which is no name, charge or article")
        items.append(item)
    return items


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name!r} must be an object")
    return value
