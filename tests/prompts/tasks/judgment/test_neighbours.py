"""No defendant ever gets a neighbour's values, however the reply is written and wherever it ends.

Everybody has labels that nobody else has, and the labels of the fallback are nobody's.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from panjue.prompts.example import Decoded, Example
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.files import dump
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.prompts.tasks.judgment.repair import decode

PEOPLE = {
    "张某": ("盗窃罪", "2"),
    "李某": ("走私罪", "303"),
    "A某": ("受贿罪", "3"),
    "Ａ某": ("行贿罪", "26-4"),
    "张某甲": ("诈骗罪", "26"),
    '赵"某': ("赌博罪", "30"),
    "钱{某}": ("脱逃罪", "13"),
}
OWN: dict[str, dict[str, Any]] = {}
for number, (name, (charge, article)) in enumerate(PEOPLE.items()):
    OWN[name] = {"charges": [charge], "articles": [article], "penalty": PENALTIES[number]}
GUESS: dict[str, Any] = {"charges": ["其他罪"], "articles": ["999"], "penalty": PENALTIES[14]}
TWO: dict[str, Any] = {
    "charges": ["其他罪", "放火罪"],
    "articles": ["999", "998"],
    "penalty": PENALTIES[14],
}
TRAINING = [*[GUESS] * 9, *OWN.values(), TWO]
LABELS = collect({**answer, "penalty": [answer["penalty"]]} for answer in TRAINING)


def decoded(reply: str, names: Sequence[str]) -> Decoded:
    """Decode a reply; all values are the defendants' own, or the fallback's."""
    found = decode(reply, Example(id=1, text="事实", names=tuple(names)), LABELS)
    for judgment in found.answer["judgments"]:
        for field, own in OWN[judgment["name"]].items():
            assert judgment[field] in (own, GUESS[field]), reply
    return found


@pytest.mark.parametrize(
    ("reply", "owner"),
    [
        # The closing brace, or a quotation mark, of the first person is missing.
        ('[{"name":"李某",OWN,{"charges":["盗窃罪"],"name":"张某"}]', ""),
        ('[{"name":"李某","charges":["走私罪],"x":1},{"articles":["2"],"name":"张某"}]', ""),
        ('[{"name":"李某","charges":["走私罪"],},{"name":"张某","articles":["2"]}]', ""),
        ('[{"name":"李某","charges":["走私罪"]},{"articles":["2"],"penalty":"死刑"', "李某"),
        # Another person is mentioned inside.
        ('{"name":"李某","with":[{"name":"张某","charges":["盗窃罪"]}],OWN}', "李某"),
        ('{"name":"案件","charges":["其他罪"],"judgments":[{"name":"李某",OWN}]}', "李某"),
        ('{"name":"李某","judgments":[{"name":"李某",OWN}]}', "李某"),
        ('{"name":"李某","judgment":{OWN}}', ""),
        # Two people in one object: nobody can say whose the values are.
        ('{"name":"李某",OWN,"name":"张某"}', ""),
        ('{"name":"李某","charges":["走私罪"],"charges":["盗窃罪"]}', ""),
        ("{OWN}", ""),
        # A name that is cut may be another one; so may a number.
        ('{"charges":["诈骗罪"],"name":"张某', ""),
        ('{"name":"李某","articles":[26', ""),
        ('{"name":"李某","penalty":1', ""),
        # A name in one of two spellings that the case has both of.
        ('{"name":"Ａ 某","charges":["行贿罪"]}', ""),
        ('{"name":"李 某",OWN}', "李某"),
        ('{"name":"李某 ",OWN}{"name":"李某",OWN}', "李某"),
    ],
)
def test_what_has_no_owner_answers_nobody(reply: str, owner: str) -> None:
    own = dump(OWN["李某"])[1:-1]
    found = decoded(reply.replace("OWN", own), list(PEOPLE))
    charges = {row["name"]: row["charges"] for row in found.answer["judgments"]}
    assert charges["李某"] == (OWN["李某"] if owner else GUESS)["charges"]
    assert found.repairs


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"name":"李某","charges":'])
def test_deep_nesting_falls_back(opening: str) -> None:
    """Python reads some depths that it cannot write: which ones depends on the caller's depth."""
    closing = "]" if opening == "[" else "}"
    for depth in (*range(900, 1000), 3000):
        deep = opening * depth + "1" + closing * depth
        decoded(f'[{{"name":"李某","charges":{deep}}}]', ["李某", "张某"])
