"""The penalty classes 0-14: their words, their order, the class of an official sentence (CMDL)."""

import math
from collections.abc import Mapping
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import quoted

PENALTIES = (
    "死刑",
    "无期徒刑",
    "拘役",
    "管制一年以上",
    "管制一年以下",
    "有期徒刑十年以上",
    "有期徒刑七年以上十年以下",
    "有期徒刑五年以上七年以下",
    "有期徒刑三年以上五年以下",
    "有期徒刑二年以上三年以下",
    "有期徒刑一年以上二年以下",
    "有期徒刑九个月以上一年以下",
    "有期徒刑六个月以上九个月以下",
    "有期徒刑六个月以下",
    "单处罚金或免予刑事处罚",
)
"""The penalty classes 0-14 in words. The upper limit of a class belongs to it.

They are words, because a base model knows their meaning; it would have to learn that of a bare 10.
"""

DEATH = 0
LIFE = 1
DETENTION = 2
LONG_SURVEILLANCE = 3
SHORT_SURVEILLANCE = 4
FINE_OR_EXEMPT = 14

MONTHS = {5: 120, 6: 84, 7: 60, 8: 36, 9: 24, 10: 12, 11: 9, 12: 6, 13: 0}
"""Class of imprisonment -> number of months that its terms exceed."""

OVER_36_MONTHS = (DEATH, LIFE, *(number for number, over in MONTHS.items() if over >= 36))

GUESSED = 10
"""Class if neither the reply nor the training gives one: one to two years."""

PENALTY_WORDS = {word: word for word in PENALTIES}
PENALTY_WORDS["单处罚金"] = PENALTIES[FINE_OR_EXEMPT]
PENALTY_WORDS["免予刑事处罚"] = PENALTIES[FINE_OR_EXEMPT]
"""Another wording of a penalty class in replies -> the class."""

GRAVEST_FIRST = (DEATH, LIFE, *MONTHS, DETENTION, LONG_SURVEILLANCE, SHORT_SURVEILLANCE)
BY_SEVERITY = tuple(PENALTIES[number] for number in (*GRAVEST_FIRST, FINE_OR_EXEMPT))
"""The classes from the gravest on, by the principal punishments of article 33 of the Criminal Law.
The official numbers put detention (拘役) and surveillance (管制) before imprisonment."""

FLAGS = ("death_penalty", "life_imprisonment")
TERMS = ("surveillance", "detention", "imprisonment")


def sentence(**given: Any) -> dict[str, Any]:
    """Return an official `penalty`; values that are not given are 0 or false."""
    nothing = {**dict.fromkeys(TERMS, 0), **dict.fromkeys(FLAGS, False)}
    return {**nothing, "fine": 0, "fine_without_amount": False, **given}


def penalty_class(penalty: Mapping[str, Any]) -> int:
    """Return the class 0-14 of a sentence, the first that matches; KeyError: a field is missing."""
    for flag in FLAGS:
        if not isinstance(penalty[flag], int | float) or penalty[flag] not in (0, 1):
            # "false", as a text, would mean death.
            raise UserError(f"{flag!r} must be true or false, found {quoted(penalty[flag])}")
    for term in TERMS:
        months = penalty[term]
        if type(months) not in (int, float) or not 0 <= months < math.inf:
            raise UserError(f"{term!r} must be months, 0 or more, found {quoted(months)}")
    if penalty["death_penalty"]:
        return DEATH
    if penalty["life_imprisonment"]:
        return LIFE
    if penalty["detention"] > 0:
        return DETENTION
    if penalty["surveillance"] > 0:
        return LONG_SURVEILLANCE if penalty["surveillance"] > 12 else SHORT_SURVEILLANCE
    for number, over in MONTHS.items():
        if penalty["imprisonment"] > over:
            return number
    return FINE_OR_EXEMPT
