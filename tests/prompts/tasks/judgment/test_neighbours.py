"""No defendant ever gets a neighbour's values, however the reply is written and wherever it ends.

Everybody has labels that nobody else has, and the labels of the fallback are nobody's.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from panjue.prompts.example import Decoded, Example
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.files import dump
from panjue.prompts.render import neutralize
from panjue.prompts.tasks.judgment.repair import PENALTIES
from panjue.prompts.tasks.judgment.task import decode

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


def written(row: dict[str, Any], draw: random.Random) -> str:
    """Write a judgment as models do: keys in any order, trailing commas, remarks, numbers."""
    keys = draw.sample(list(row), len(row))
    values = {key: dump(row[key]) for key in keys}
    if draw.random() < 0.3:
        values["penalty"] = str(PENALTIES.index(row["penalty"]))
    if draw.random() < 0.3 and "-" not in values["articles"]:
        values["articles"] = values["articles"].replace('"', "")
    if draw.random() < 0.3:
        values["charges"] = values["charges"].replace("]", ",]")
    if draw.random() < 0.2:
        values["name"] = json.dumps(row["name"])
    remark = draw.choice(["", "", " // 见“第三段”\n", " /* 从犯, {轻} */ "])
    space = draw.choice(["", " ", "\n  "])
    inner = f",{remark}{space}".join(f'"{key}":{space}{values[key]}' for key in keys)
    return "{" + space + inner + draw.choice(["", "", ",", remark]) + space + "}"


def reply_of(rows: Sequence[str], draw: random.Random) -> str:
    form = draw.randrange(6)
    if form == 0:
        return "\n".join(rows)
    if form == 1:
        return "\n".join(f"```json\n{row}\n```" for row in rows)
    between = draw.choice([",", ",\n", "\n", ", // 下一名\n", "，另外："])
    listed = f"[{between.join(rows)}{draw.choice(['', ','])}]"
    if form == 2:
        return f"法条 [264]、{{见下}}：{listed}"
    before = draw.choice(["", "好的：", "[264]\n"])
    return f'{before}{{"judgments":{listed}}}'


def test_values_stay_with_their_owner_in_every_form_and_at_every_cut() -> None:
    draw = random.Random(0)
    for _ in range(40):
        names = draw.sample(NAMES, draw.randint(1, 4))
        answered = draw.sample(names, draw.randint(1, len(names)))
        reply = reply_of([written(judgment(name), draw) for name in answered], draw)
        whole = decoded(reply, names)
        for row in whole.answer["judgments"]:
            expected = judgment(row["name"]) if row["name"] in answered else GUESS
            assert row == {**expected, "name": row["name"]}, reply
        data = reply.encode()
        for cut in range(len(data)):
            found = decoded(data[:cut].decode("utf-8", "ignore"), names)
            assert not strangers(found), data[:cut].decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("reply", "owner"),
    [
        # The closing brace, or a quotation mark, of the first person is missing.
        ('[{"name":"李某",OWN,{"charges":["盗窃罪"],"name":"张某"}]', "李某"),
        ('[{"name":"李某","charges":["走私罪"],{"articles":["2"],"penalty":"死刑"', "李某"),
        ('[{"name":"李某","charges":["走私罪],"x":1},{"articles":["2"],"name":"张某"}]', ""),
        ('[{"name":"李某","charges":["走私罪"]},{"articles":["2"],"penalty":"死刑"}]', "李某"),
        (
            '[{"name":"李某","charges":["走私罪"] // 从犯 },{"name":"张某",\n"articles":["2"]}]',
            "李某",
        ),
        # Another person is mentioned inside.
        ('{"name":"李某","with":[{"name":"张某","charges":["盗窃罪"]}],OWN}', "李某"),
        ('{"name":"案件","charges":["其他罪"],"judgments":[{"name":"李某",OWN}]}', "李某"),
        ('{"name":"李某","judgments":[{"name":"李某",OWN}]}', "李某"),
        ('{"name":"李某","judgment":{OWN}}', "李某"),
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
