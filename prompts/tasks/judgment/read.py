"""Read a case: its facts, its defendants and the sentence of each (official lines of CMDL)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from panjue.prompts.example import Answer, Example
from panjue.prompts.plumbing.decode import visible
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, located
from panjue.prompts.task import id_of, text_of
from panjue.prompts.tasks.judgment.repair import PENALTIES

MONTHS = ((5, 120), (6, 84), (7, 60), (8, 36), (9, 24), (10, 12), (11, 9), (12, 6), (13, 0))
"""Penalty class, months of imprisonment that it exceeds."""

TERMS = ("surveillance", "detention", "imprisonment")
FIELDS = ("charges", "articles")
"""The two label sets of a judgment."""


def penalty_class(penalty: Mapping[str, Any]) -> int:
    """Return the class 0-14 of a sentence, the first match wins; KeyError: a field is missing."""
    for flag in ("death_penalty", "life_imprisonment"):
        if type(penalty[flag]) is not bool:  # "false" would mean death
            raise UserError(f"{flag!r} must be true or false, found {quoted(penalty[flag])}")
    for term in TERMS:
        months = penalty[term]
        if type(months) not in (int, float) or not 0 <= months < math.inf:
            raise UserError(f"{term!r} must be months, 0 or more, found {quoted(months)}")
    if penalty["death_penalty"]:
        return 0
    if penalty["life_imprisonment"]:
        return 1
    if penalty["detention"] > 0:
        return 2
    if penalty["surveillance"] > 0:
        return 3 if penalty["surveillance"] > 12 else 4
    return next((k for k, months in MONTHS if penalty["imprisonment"] > months), 14)


def quoted(value: Any) -> str:
    """Return a value as JSON, not too long for a message."""
    return f"{dump(value):.40}"


def sentence(**given: Any) -> dict[str, Any]:
    """Return an official `penalty`; what is not given is 0 or false."""
    terms = {"surveillance": 0, "detention": 0, "imprisonment": 0}
    flags = {"death_penalty": False, "life_imprisonment": False}
    return {**terms, **flags, "fine": 0, "fine_without_amount": False, **given}


def read(row: Mapping[str, Any]) -> Example:
    key = id_of(row)
    fact = text_of(row, "fact")
    names = _names(row.get("defendants"))
    notes = []
    for given, name in zip(row["defendants"], names, strict=True):
        if given != name:
            fact = fact.replace(given, name)
            notes.append(f"the name {given!r} has invisible characters, left out")
    answer: Answer | None = None
    if "outcomes" in row:
        judgments = _judgments(row["outcomes"])
        odd = sorted(set(judgments) ^ set(names))
        if odd:
            raise UserError(f"{quoted(odd)}: not in both 'defendants' and 'outcomes'")
        answer = {"judgments": [judgments[name] for name in names]}
    return Example(
        id=key,
        text=fact,
        names=tuple(names),
        inputs={"defendants": "、".join(names)},
        answer=answer,
        groups={"defendants": str(len(names)) if len(names) < 5 else "5+"},
        notes=tuple(notes),
    )


def by_hand(fact: str, names: Sequence[str]) -> Example:
    return read({"id": 0, "fact": fact, "defendants": list(names)})


def _names(given: Any) -> list[str]:
    listed = given if isinstance(given, list) else []
    names = [visible(name) for name in listed if isinstance(name, str)]
    names = [name for name in names if name.strip()]
    if not names or len(set(names)) < len(listed):
        raise UserError("'defendants' must list the defendants' names, one or more, each once")
    return names


def _judgments(outcomes: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(outcomes, list):
        raise UserError(f"'outcomes' must be a list, found {quoted(outcomes)}")
    judgments: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        name = _name_in(outcome)
        if name is None or name in judgments:
            raise UserError(f"'outcomes' needs each name once, found {quoted(outcome)}")
        with located(f"defendant {name!r}"):
            judgments[name] = {"name": name, **_judgment(outcome)}
    return judgments


def _name_in(outcome: Any) -> str | None:
    if isinstance(outcome, dict) and isinstance(outcome.get("name"), str):
        return visible(outcome["name"])
    return None


def _judgment(outcome: Mapping[str, Any]) -> dict[str, Any]:
    try:
        sets = {field: _labels_of(field, outcome[field]) for field in FIELDS}
        penalty = outcome["penalty"]
        if not isinstance(penalty, dict):
            raise UserError(f"'penalty' must be an object, found {quoted(penalty)}")
        return {**sets, "penalty": PENALTIES[penalty_class(penalty)]}
    except KeyError as error:
        raise UserError(f"{error} is missing") from None


def _labels_of(field: str, value: Any) -> list[str]:
    """Return a list of labels, each once; an article may be a number."""
    if not isinstance(value, list):  # a string would be read as a list of its characters
        raise UserError(f"{field!r} must be a list, found {quoted(value)}")
    labels: dict[str, None] = {}
    for given in value:
        is_number = field == "articles" and type(given) is int and given > 0
        label = visible(str(given)).strip()
        if not is_number and not (isinstance(given, str) and label):
            raise UserError(f"{field!r} has {quoted(given)}, which is no label")
        labels[label] = None
    return list(labels)
