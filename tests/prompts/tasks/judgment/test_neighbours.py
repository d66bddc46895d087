"""No defendant ever gets a neighbour's values, however the reply is written and wherever it ends.

Everybody has labels that nobody else has, and the labels of the fallback are nobody's.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from panjue.prompts.example import Decoded, Example
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.files import dump
from panjue.prompts.render import neutralize
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.prompts.tasks.judgment.repair import decode

NAMES = ["张某", "张某甲", "张某 甲", "Ａ某", "A某", "a某", "李某", "<b>王", '赵"某', "钱{某}"]
CHARGES = (
    "盗窃罪",
    "诈骗罪",
    "抢劫罪",
    "行贿罪",
    "受贿罪",
    "赌博罪",
    "走私罪",
    "脱逃罪",
    "诬告罪",
    "遗弃罪",
)
ARTICLES = ("2", "26", "264", "26-4", "3", "30", "303", "303-2", "13", "133")
LABELS = collect(
    [
        *(
            {"charges": ["其他罪"], "articles": ["999"], "penalty": [PENALTIES[14]]}
            for _ in range(9)
        ),
        *(
            {"charges": [charge], "articles": [article], "penalty": [penalty]}
            for charge, article, penalty in zip(CHARGES, ARTICLES, PENALTIES, strict=False)
        ),
        {"charges": ["其他罪", "放火罪"], "articles": ["999", "998"], "penalty": [PENALTIES[14]]},
    ]
)
GUESS = {"charges": ["其他罪"], "articles": ["999"], "penalty": PENALTIES[14]}


def judgment(name: str) -> dict[str, Any]:
    number = NAMES.index(name)
    sets = {"charges": [CHARGES[number]], "articles": [ARTICLES[number]]}
    return {"name": neutralize(name), **sets, "penalty": PENALTIES[number]}


def decoded(reply: str, names: Sequence[str]) -> Decoded:
    return decode(reply, Example(id=1, text="事实", names=tuple(names)), LABELS)


def strangers(found: Decoded) -> list[tuple[str, Any]]:
    """Return the values that are neither a defendant's own nor the fallback's."""
    return [
        (row["name"], row[key])
        for row in found.answer["judgments"]
        for key, own in judgment(row["name"]).items()
        if key != "name" and row[key] not in (own, GUESS[key])
    ]


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
    own = dump(judgment("李某"))[1:-1].partition(",")[2]
    found = decoded(reply.replace("OWN", own), ["张某", "李某", "A某", "Ａ某", "张某甲"])
    assert not strangers(found)
    charges = {row["name"]: row["charges"] for row in found.answer["judgments"]}
    assert charges["李某"] == (judgment("李某") if owner else GUESS)["charges"]
    assert found.repairs


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"name":"李某","charges":'])
def test_deep_nesting_falls_back(opening: str) -> None:
    """Python reads some depths that it cannot write: which ones depends on the caller's depth."""
    closing = "]" if opening == "[" else "}"
    for depth in (*range(900, 1000), 3000):
        deep = opening * depth + "1" + closing * depth
        assert not strangers(decoded(f'[{{"name":"李某","charges":{deep}}}]', ["李某", "张某"]))
