"""Read a case: its facts, its defendants and the sentence of each (official lines of CMDL)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from panjue.prompts.example import Answer, Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.task import id_of, text_of
from panjue.prompts.tasks.judgment.repair import PENALTIES

MONTHS = ((5, 120), (6, 84), (7, 60), (8, 36), (9, 24), (10, 12), (11, 9), (12, 6), (13, 0))
"""Penalty class, months of imprisonment that it exceeds."""

TERMS = ("surveillance", "detention", "imprisonment")
FIELDS = ("charges", "articles")
"""The two label sets of a judgment."""


def penalty_class(penalty: Mapping[str, Any]) -> int:
    """Return the class 0-14 of a sentence, the first match wins; TypeError: a flag is no bool."""
    if any(type(penalty[flag]) is not bool for flag in ("death_penalty", "life_imprisonment")):
        raise TypeError  # "false" would mean death
    for term in TERMS:
        months = penalty[term]
        if type(months) not in (int, float) or not 0 <= months < math.inf:
            raise UserError(f"'penalty' has {term} {months!r}; it must be months, 0 or more")
    if penalty["death_penalty"]:
        return 0
    if penalty["life_imprisonment"]:
        return 1
    if penalty["detention"] > 0:
        return 2
    if penalty["surveillance"] > 0:
        return 3 if penalty["surveillance"] > 12 else 4
    return next((k for k, months in MONTHS if penalty["imprisonment"] > months), 14)


def sentence(**given: Any) -> dict[str, Any]:
    """Return an official `penalty`; what is not given is 0 or false."""
    terms = {"surveillance": 0, "detention": 0, "imprisonment": 0}
    flags = {"death_penalty": False, "life_imprisonment": False}
    return {**terms, **flags, "fine": 0, "fine_without_amount": False, **given}


def read(row: Mapping[str, Any]) -> Example:
    """Read one case."""
    key, fact = id_of(row), text_of(row, "fact")
    names: Any = row.get("defendants")
    if not _is_names(names):
        raise UserError("'defendants' must list the defendants' names, one or more, each once")
    answer: Answer | None = None
    if "outcomes" in row:
        judgments = _judgments(row["outcomes"])
        if set(judgments) != set(names):
            raise UserError("'outcomes' must have exactly one entry per defendant")
        answer = {"judgments": [judgments[name] for name in names]}
    return Example(
        id=key,
        text=fact,
        names=tuple(names),
        inputs={"defendants": "、".join(names)},
        answer=answer,
        groups={"defendants": str(len(names)) if len(names) < 5 else "5+"},
    )


def by_hand(fact: str, names: Sequence[str]) -> Example:
    """Return the example of a typed case."""
    return read({"id": 0, "fact": fact, "defendants": list(names)})


def _is_names(names: Any) -> bool:
    return (
        isinstance(names, list)
        and bool(names)
        and all(isinstance(name, str) and name.strip() for name in names)
        and len(set(names)) == len(names)
    )


def _judgments(outcomes: Any) -> dict[str, dict[str, Any]]:
    judgments: dict[str, dict[str, Any]] = {}
    rows: list[Any] = outcomes if isinstance(outcomes, list) else [None]
    for outcome in rows:
        try:
            name, penalty = outcome["name"], outcome["penalty"]
            sets = {field: _labels_of(outcome[field]) for field in FIELDS}
            if not isinstance(name, str) or name in judgments:
                raise UserError(f"'outcomes' has {name!r} twice or not as a name")
            label = PENALTIES[penalty_class(penalty)]
            judgments[name] = {"name": name, **sets, "penalty": label}
        except KeyError as error:
            raise UserError(f"'outcomes' lacks {error}") from None
        except TypeError:
            raise UserError(
                "'outcomes' must be a list of {name, penalty, charges, articles}"
            ) from None
    return judgments


def _labels_of(value: Any) -> list[str]:
    if not isinstance(value, list):  # a string would be read as a list of its characters
        raise TypeError
    if not all(isinstance(label, str | int) for label in value):
        raise TypeError
    return list(dict.fromkeys(map(str, value)))
