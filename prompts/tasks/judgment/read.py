"""Read a case: its facts, its defendants and the sentence of each (official lines of CMDL)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Answer, Example
from panjue.prompts.plumbing.decode import visible
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import located, quoted
from panjue.prompts.task import id_of, text_of
from panjue.prompts.tasks.judgment.penalties import PENALTIES, TERMS, penalty_class
from panjue.prompts.tasks.metrics import by_name, numbered

FIELDS = ("charges", "articles")
"""The two label sets of a judgment."""


def read(row: Mapping[str, Any]) -> Example:
    """Read a case: `fact`, `defendants`, and for a training or gold file `outcomes`.

    Null or an empty list as `outcomes` is none, since every case has a defendant.
    """
    key = id_of(row)
    fact = text_of(row, "fact")
    judgments = None if row.get("outcomes") in (None, []) else _judgments(row["outcomes"])
    given_names: Any = row.get("defendants")
    if given_names is None and judgments is not None:
        given_names = [outcome["name"] for outcome in row["outcomes"]]
    names = _names(given_names)
    notes: list[str] = []
    for given, name in zip(given_names, names, strict=True):
        if given != name:
            notes.append(f"the name {given!r} has invisible characters, left out")
    for name, count in Counter(name for name, _ in numbered(names)).items():
        if count > 1:
            notes.append(f"{count} defendants are called {name!r}: told apart by their place alone")
    answer: Answer | None = None
    if judgments is not None:
        answer = {"judgments": _in_order(names, judgments)}
        notes += _notes_on_fractions(row["outcomes"])
    return Example(
        id=key,
        text=fact,
        names=tuple(names),
        given_names=tuple(given_names),
        inputs={"defendants": "、".join(names)},
        answer=answer,
        groups={"defendants": str(len(names)) if len(names) < 5 else "5+"},
        notes=tuple(notes),
    )


def by_hand(fact: str, names: Sequence[str]) -> Example:
    """Return the example of a case that a user sends to `panjue serve`; it is in no file."""
    return read({"id": 0, "fact": fact, "defendants": list(map(visible, names))})


def _names(given: Any) -> list[str]:
    """Return the defendants' names without invisible characters; refuse a value that is no name."""
    listed = given if isinstance(given, list) else []
    names = [visible(name) for name in listed if isinstance(name, str)]
    names = [name for name in names if name.strip()]
    if not names or len(names) < len(listed):
        raise UserError("'defendants' must list the defendants' names, one or more")
    return names


def _judgments(outcomes: Any) -> list[dict[str, Any]]:
    """Return the judgments in order, each penalty as its class in words."""
    if not isinstance(outcomes, list):
        raise UserError(f"'outcomes' must be a list, found {quoted(outcomes)}")
    judgments = []
    for outcome in outcomes:
        if not isinstance(outcome, dict) or not isinstance(outcome.get("name"), str):
            raise UserError(f"'outcomes' needs the 'name' of each, found {quoted(outcome)}")
        name = visible(outcome["name"])
        with located(f"defendant {name!r}"):
            judgments.append({"name": name, **_judgment(outcome)})
    return judgments


def _in_order(names: list[str], judgments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the judgment of each name; equal names get theirs in the order of the outcomes."""
    if names == [judgment["name"] for judgment in judgments]:
        return judgments
    waiting = by_name(judgments)  # (name, how often it came before) -> its judgment
    keys = numbered(names)
    odd = sorted({name for name, _ in waiting.keys() ^ set(keys)})
    if odd:
        raise UserError(f"{quoted(odd)}: not in both 'defendants' and 'outcomes'")
    return [{**waiting[key], "name": name} for key, name in zip(keys, names, strict=True)]


def _judgment(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the label sets of an outcome, and its penalty as a class: 有期徒刑六个月以下."""
    try:
        sets = {field: _labels_of(field, outcome[field]) for field in FIELDS}
        penalty = outcome["penalty"]
        if not isinstance(penalty, dict):
            raise UserError(f"'penalty' must be an object, found {quoted(penalty)}")
        return {**sets, "penalty": PENALTIES[penalty_class(penalty)]}
    except KeyError as error:
        raise UserError(f"{error} is missing") from None


def _notes_on_fractions(outcomes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note for each term such as 1.5 months: terms may be in years by mistake."""
    for outcome in outcomes:
        for term in TERMS:
            months = outcome["penalty"][term]
            if months % 1:
                yield f"{outcome['name']}: {term} is {months:g} months; are these years?"


def _labels_of(field: str, value: Any) -> list[str]:
    """Return a list of labels without repeated ones; an article may be a number."""
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
