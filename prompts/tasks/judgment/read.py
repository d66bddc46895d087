"""Read a case: its facts, its defendants and the sentence of each (official lines of CMDL)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Answer, Example
from panjue.prompts.plumbing.decode import visible
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import located, quoted
from panjue.prompts.task import id_of, text_of
from panjue.prompts.tasks.judgment.penalties import PENALTIES, TERMS, penalty_class

FIELDS = ("charges", "articles")
"""The two label sets of a judgment."""


def read(row: Mapping[str, Any]) -> Example:
    key = id_of(row)
    fact = visible(text_of(row, "fact"))
    names = _names(row.get("defendants"))
    notes: list[str] = []
    for given, name in zip(row["defendants"], names, strict=True):
        if given != name:
            notes.append(f"the name {given!r} has invisible characters, left out")
    answer: Answer | None = None
    if row.get("outcomes") is not None:
        judgments = _judgments(row["outcomes"])
        odd = sorted(set(judgments) ^ set(names))
        if odd:
            raise UserError(f"{quoted(odd)}: not in both 'defendants' and 'outcomes'")
        answer = {"judgments": [judgments[name] for name in names]}
        notes += _fractions(row["outcomes"])
    return Example(
        id=key,
        text=fact,
        names=tuple(names),
        given_names=tuple(row["defendants"]),
        inputs={"defendants": "、".join(names)},
        answer=answer,
        groups={"defendants": str(len(names)) if len(names) < 5 else "5+"},
        notes=tuple(notes),
    )


def by_hand(fact: str, names: Sequence[str]) -> Example:
    return read({"id": 0, "fact": fact, "defendants": list(map(visible, names))})


def _names(given: Any) -> list[str]:
    """Return the defendants' names without invisible characters; refuse what is no name."""
    listed = given if isinstance(given, list) else []
    names = [visible(name) for name in listed if isinstance(name, str)]
    names = [name for name in names if name.strip()]
    if not names or len(set(names)) < len(listed):
        raise UserError("'defendants' must list the defendants' names, one or more, each once")
    return names


def _judgments(outcomes: Any) -> dict[str, dict[str, Any]]:
    """Return name -> judgment, the penalty as its class in words."""
    if not isinstance(outcomes, list):
        raise UserError(f"'outcomes' must be a list, found {quoted(outcomes)}")
    judgments: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        name = None
        if isinstance(outcome, dict) and isinstance(outcome.get("name"), str):
            name = visible(outcome["name"])
        if name is None or name in judgments:
            raise UserError(f"'outcomes' needs each name once, found {quoted(outcome)}")
        with located(f"defendant {name!r}"):
            judgments[name] = {"name": name, **_judgment(outcome)}
    return judgments


def _judgment(outcome: Mapping[str, Any]) -> dict[str, Any]:
    try:
        sets = {field: _labels_of(field, outcome[field]) for field in FIELDS}
        penalty = outcome["penalty"]
        if not isinstance(penalty, dict):
            raise UserError(f"'penalty' must be an object, found {quoted(penalty)}")
        return {**sets, "penalty": PENALTIES[penalty_class(penalty)]}
    except KeyError as error:
        raise UserError(f"{error} is missing") from None


def _fractions(outcomes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note for each term that is no whole number of months: it may be one of years."""
    for outcome in outcomes:
        for term in TERMS:
            months = outcome["penalty"][term]
            if months % 1:
                yield f"{outcome['name']}: {term} is {months:g} months; are these years?"


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
