"""Read the judgment of a person from an object with fields of any names."""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from panjue.prompts.forms.form import ARTICLES, CHARGES, MONTHS, NAMES_OF_PERSON, TERM, Row, column
from panjue.prompts.plumbing.decode import flatten_forms, visible
from panjue.prompts.plumbing.errors import NotSaid, UserError
from panjue.prompts.tasks.judgment.charges import charges_in, is_article
from panjue.prompts.tasks.judgment.citations import SPACES, Plain, without_citations
from panjue.prompts.tasks.judgment.penalties import (
    FLAGS,
    PENALTY_WORDS,
    TERMS,
    penalty_class,
    sentence,
)
from panjue.prompts.tasks.judgment.terms import penalty_of
from panjue.prompts.tasks.judgment.verdict import Outcome, principal_of


def outcome_of(record: Row) -> Outcome:
    """Return the outcome of a person.

    Raises:
        NotSaid: the object does not say for certain the crimes or the sentence.
    """
    return {
        "name": name_of_person(column(record, NAMES_OF_PERSON)),
        "penalty": penalty_in(record),
        "charges": charge_list(column(record, CHARGES)),
        "articles": article_list(column(record, ARTICLES)),
    }


SEVERAL = "several persons in one field; give each a row"


def name_of_person(value: Any) -> str:
    """Return the name in a field, which may have only one."""
    names = value if isinstance(value, list) else [value]
    if len(names) > 1:
        raise NotSaid(SEVERAL, str(value))
    if not names or not isinstance(names[0], str) or not visible(names[0]).strip():
        raise NotSaid("no person is named", "" if value is None else str(value))
    name = names[0].strip(" \t\u3000:：")  # CAIL2018 has `：王某`
    if re.search("[;；,，、/\n]", name):
        raise NotSaid(SEVERAL, name)
    return name


def items_of_field(value: Any) -> list[Any]:
    """Return the items of a field: of a list, or of a text that is a list in JSON or Python.

    Any other value is the only item, also an object in a text: `'{"name": "张某"}'` -> one dict.
    """
    if isinstance(value, str) and value.strip().startswith(("[", "(", "{")):
        value = literal(value)
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def literal(text: str) -> Any:
    """Return the value of a text in JSON or Python; return the text itself if it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def charge_list(value: Any) -> list[str]:
    """Return the charges in a field: a list of names, or a text such as 盗窃、诈骗罪."""
    charges: dict[str, None] = {}
    for item in items_of_field(value):
        known = charges_in(item) if isinstance(item, str) else None
        if known is None:
            raise NotSaid("an unknown charge", str(item))
        charges.update(dict.fromkeys(known))
    if not charges:
        raise NotSaid("a person without a crime")
    return list(charges)


BETWEEN_ARTICLES = re.compile(r"[、,;/|\s]+")


def article_list(value: Any) -> list[str]:
    """Return the articles in a field: 264, `[264, "133.1"]`, or a text such as 刑法第264条."""
    articles: dict[str, None] = {}
    for item in items_of_field(value):
        articles.update(dict.fromkeys(_articles(item)))
    if not articles:
        raise NotSaid("no article of a crime is named")
    return list(articles)


def _articles(item: Any) -> Iterable[str]:
    """Return the articles of an item: 264 or `"264、133.1"` in numbers, or citations in words."""
    item = without_fraction(item)
    if type(item) is int:
        item = str(item)
    if not isinstance(item, str):
        raise NotSaid("an article that cannot be read", str(item))
    pieces = [piece for piece in BETWEEN_ARTICLES.split(flatten_forms(item)) if piece]
    pieces = [piece.removesuffix(".0") for piece in pieces]
    if pieces and all(map(is_article, pieces)):
        return pieces
    begins_with_number = re.match(r"\s*[0-9一二三四五六七八九]", item)
    text = f"第{item.strip()}" if begins_with_number else item  # 264条 -> 第264条
    rest, cited = without_citations(Plain.of(text).without(SPACES))
    has_other_words = re.search(r"[^、,;。.:和与及以并\s]", rest.text)
    if not cited or has_other_words:
        raise NotSaid("an article that cannot be read, or of another law", item)
    return [article for _, article in cited]


NO_UNIT = "a term without a unit; call it months, or 刑期（月）"


def penalty_in(record: Row) -> dict[str, Any]:
    """Return the official penalty of an object: in words, in months, or in its own fields.

    Words must give the term: 有期徒刑三年, not the class 有期徒刑三年以上五年以下.
    """
    months = column(record, MONTHS)
    term = column(record, TERM)
    if isinstance(term, str) and term.strip().startswith("{"):
        term = literal(term)
    own = {key: record[key] for key in (*TERMS, *FLAGS) if record.get(key) not in (None, "")}
    given = [value for value in (months, term, own or None) if value is not None]
    if not given:
        raise NotSaid("a person without a penalty")
    if len(given) > 1:  # they are in different forms, so even equal ones are not compared
        raise NotSaid("two columns of one meaning differ", "the penalty is there twice")
    if months is not None:
        return sentence(imprisonment=_whole_months(months))
    if own:  # a fine counts only beside them: alone, it does not say the sentence
        fine = {key: record[key] for key in FINES if key in record}
        return _of_fields({**own, **fine})
    if isinstance(term, Mapping):
        return _of_fields(term)
    if not isinstance(term, str) or re.fullmatch(r"[\d.]+", term.strip()):
        raise NotSaid(NO_UNIT, str(term))
    # Some classes are a penalty at the same time: 死刑, 免予刑事处罚.
    if term.strip() in PENALTY_WORDS and penalty_of(term) is None:
        raise NotSaid("a class of penalties in place of a term", term)
    return principal_of(term)


def _of_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the official penalty from some of its fields, such as `{"imprisonment": 36}`.

    The others are 0 or false. A fine alone is not enough: there may be a term that is not given.
    """
    odd = [str(key) for key in fields if key not in (*OFFICIAL, *CHANGES_NOTHING)]
    if odd:  # `imprisonment_years` would be in another unit
        raise NotSaid("a penalty with unknown fields", ", ".join(odd))
    known = {key: _number(value) for key, value in fields.items() if key in OFFICIAL}
    known = {key: value for key, value in known.items() if value is not None}
    penalty = sentence(**known)
    try:
        penalty_class(penalty)
    except UserError as error:
        raise NotSaid("a penalty that cannot be read", str(error)) from None
    if not known.keys() & {*TERMS, *FLAGS}:
        raise NotSaid("a person without a penalty")
    for flag in FLAGS:
        penalty[flag] = bool(penalty[flag])
    return penalty


FINES = ("fine", "fine_without_amount")
OFFICIAL = (*TERMS, *FLAGS, *FINES)
CHANGES_NOTHING = ("probation", "probation_months", "suspended", "缓刑")
"""Fields of a penalty that do not change its class."""

YES_OR_NO = {"true": True, "false": False, "是": True, "否": False}


def _number(value: Any) -> Any:
    """Return a cell of a table as the number, or the yes or no, in it."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text in YES_OR_NO:
        return YES_OR_NO[text]
    if re.fullmatch(r"\d+(\.0+)?", text):
        return int(float(text))
    return None if not text else value


def without_fraction(value: Any) -> Any:
    """Return 7.0 as 7, and any other value as it is: pandas makes floats where cells are empty."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_months(value: Any) -> int:
    """Return a number of months above 0."""
    number = without_fraction(_number(value))
    if type(number) is not int or number < 0:
        raise NotSaid("a term that is no whole number of months", str(value))
    if number == 0:
        raise NotSaid("0 months: a fine, an exemption or nothing", str(value))
    return number
