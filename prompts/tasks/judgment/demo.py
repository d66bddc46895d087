"""Invented cases, so that a new user can run the whole pipeline without data or a model.

A small grammar generates them: charges and articles are real, persons and deeds are not. The
penalty follows our own rule from the text (amount, role, record). A score on them shows that the
pipeline works; it says nothing about law.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_write, dump, read_lines

SURNAMES = "张王李赵陈杨黄周吴徐孙马朱胡郭何高林罗郑梁谢宋唐许韩冯邓曹彭曾萧田董袁潘蒋蔡余杜"
GIVEN = ("某", "某某", "某甲", "某乙", "某A", "某B", "某1", "某2")
PLACES = tuple(
    f"{town}{spot}"
    for town in ("东河区", "南山县", "西坪镇", "北桥乡", "新华路", "解放街", "青松村", "滨江新区")
    for spot in ("一小区", "某商铺", "车站附近", "一出租屋", "某酒店", "停车场", "某工地", "菜市场")
)
MONEY = (
    ("价值{n}元，数额较大", (2000, 9000)),
    ("价值{n}元，数额巨大", (40000, 200000)),
    ("价值{n}元，数额特别巨大", (600000, 3000000)),
)
INJURY = (
    ("致{n}人轻伤", (1, 3)),
    ("致{n}人轻伤，情节恶劣", (4, 6)),
    ("致{n}人重伤", (1, 3)),
)
DRUGS = (
    ("净重{n}克，数量较少", (1, 9)),
    ("净重{n}克，数量较大", (11, 48)),
    ("净重{n}克，数量大", (60, 400)),
)
HOURS = (
    ("前后{n}小时", (5, 11)),
    ("前后{n}小时，情节严重", (24, 72)),
    ("前后{n}小时并殴打致伤，情节特别严重", (80, 200)),
)
PEOPLE = (
    ("涉及{n}人，情节较轻", (2, 3)),
    ("涉及{n}人，情节严重", (5, 9)),
    ("涉及{n}人，情节特别严重", (20, 60)),
)


@dataclass(frozen=True)
class Crime:
    """A charge, its article, and texts for its deeds and their three levels of gravity."""

    charge: str
    article: str
    deeds: tuple[str, ...]
    scale: tuple[tuple[str, tuple[int, int]], ...]


CRIMES = (
    Crime("盗窃罪", "264", ("趁夜撬门进入{place}，窃走现金和手机", "在{place}扒窃行人财物"), MONEY),
    Crime(
        "诈骗罪", "266", ("在{place}谎称能代办入学骗取钱款", "在{place}冒充客服骗取他人转账"), MONEY
    ),
    Crime("抢劫罪", "263", ("在{place}持刀威胁路人劫得财物", "在{place}殴打店主后抢走现金"), MONEY),
    Crime(
        "敲诈勒索罪",
        "274",
        ("在{place}以揭发隐私相要挟索要钱款", "在{place}以投诉为由强索钱财"),
        MONEY,
    ),
    Crime(
        "职务侵占罪",
        "271-1",
        ("利用在{place}看管仓库的便利侵吞单位货物", "利用在{place}任出纳之便截留单位货款"),
        MONEY,
    ),
    Crime(
        "故意毁坏财物罪", "275", ("因琐事在{place}砸毁他人车辆", "在{place}纵火烧毁他人货物"), MONEY
    ),
    Crime(
        "掩饰、隐瞒犯罪所得、犯罪所得收益罪",
        "312",
        ("明知是赃物仍在{place}低价收购转卖", "明知是他人犯罪所得仍在{place}代为窝藏"),
        MONEY,
    ),
    Crime(
        "非法吸收公众存款罪",
        "176",
        ("在{place}以高息为诱饵向群众吸收资金", "在{place}开办理财讲座公开吸收存款"),
        MONEY,
    ),
    Crime("故意伤害罪", "234", ("在{place}因口角持木棍殴打他人", "在{place}酒后与人互殴"), INJURY),
    Crime(
        "寻衅滋事罪",
        "293",
        ("在{place}无故追打过路群众", "在{place}强拿硬要并随意殴打他人"),
        INJURY,
    ),
    Crime(
        "走私、贩卖、运输、制造毒品罪",
        "347",
        ("在{place}向吸毒人员出售甲基苯丙胺", "驾车将海洛因运至{place}交给买家"),
        DRUGS,
    ),
    Crime(
        "非法持有毒品罪",
        "348",
        ("在{place}随身藏有冰毒被当场查获", "在{place}住处藏匿麻古被查获"),
        DRUGS,
    ),
    Crime("非法拘禁罪", "238", ("为讨债在{place}将他人关押", "在{place}扣留他人不准离开"), HOURS),
    Crime(
        "开设赌场罪",
        "303-2",
        ("在{place}摆设赌博机供人赌博", "在{place}组织他人以扑克牌赌博并抽头"),
        PEOPLE,
    ),
    Crime(
        "容留他人吸毒罪",
        "354",
        ("在{place}提供房间供他人吸食毒品", "多次在{place}容留他人吸毒"),
        PEOPLE,
    ),
    Crime(
        "组织卖淫罪",
        "358-1",
        ("在{place}招募并管理多名女子卖淫", "在{place}以会所为掩护组织卖淫"),
        PEOPLE,
    ),
)
ROLES = {
    True: ("起主要作用，系主犯", "纠集他人，系主犯"),
    False: ("起次要作用，系从犯", "负责望风，系从犯"),
}
RECORDS = {True: ("有前科，系累犯", "刑满后再犯，系累犯"), False: ("没有前科", "系初犯")}
TERMS = ((1, 6), (7, 9), (10, 12), (13, 24), (25, 36), (37, 60))
"""Months of imprisonment by severity 1-6; severity 0 is detention of 1-6 months."""


def cases(draw: random.Random, fewest: int, most: int) -> Iterator[dict[str, Any]]:
    """Yield cases of `fewest` to `most` defendants without end, in the official format, no `id`."""
    while True:
        names = [
            surname + draw.choice(GIVEN)
            for surname in draw.sample(SURNAMES, draw.randint(fewest, most))
        ]
        yield _case(draw, names)


def _case(draw: random.Random, names: list[str]) -> dict[str, Any]:
    """Write a joint crime, perhaps a crime of one defendant, then each one's role and record."""
    shared, other = draw.sample(CRIMES, 2)
    # In a fifth of the cases (30% of those with one defendant) somebody commits another crime too,
    # or instead.
    loner = draw.choice(names) if draw.random() < (0.3 if len(names) == 1 else 0.2) else None
    commits_both = loner is not None and (len(names) == 1 or draw.random() < 0.5)
    deeds: dict[str, list[tuple[Crime, int]]] = {name: [] for name in names}
    joint = [name for name in names if name != loner or commits_both]
    sentences = ["经审理查明：" + _describe(draw, shared, joint, deeds)]
    if loner:
        sentences.append("另查明：" + _describe(draw, other, [loner], deeds))
    outcomes = []
    for name in names:
        leads, repeats = draw.random() < 0.5, draw.random() < 0.3
        sentences.append(f"{name}{draw.choice(ROLES[leads])}，{draw.choice(RECORDS[repeats])}。")
        outcomes.append(_outcome(draw, name, deeds[name], repeats - (not leads)))
    return {"fact": "".join(sentences), "defendants": names, "outcomes": outcomes}


def _describe(
    draw: random.Random, crime: Crime, names: list[str], deeds: dict[str, list[tuple[Crime, int]]]
) -> str:
    """Describe one crime of `names`, and add it with its level 0-2 to their `deeds`."""
    level = draw.randrange(3)
    measure, (low, high) = crime.scale[level]
    for name in names:
        deeds[name].append((crime, level))
    who = "、".join(names) + ("共同" if len(names) > 1 else "")
    date = f"{draw.randint(2010, 2023)}年{draw.randint(1, 12)}月{draw.randint(1, 28)}日"
    deed = draw.choice(crime.deeds).format(place=draw.choice(PLACES))
    return f"{date}，被告人{who}{deed}，{measure.format(n=draw.randint(low, high))}。"


def _outcome(
    draw: random.Random, name: str, deeds: list[tuple[Crime, int]], shift: int
) -> dict[str, Any]:
    """Sentence by our rule: two steps per level of the gravest deed, one for role and record."""
    severity = 1 + 2 * max(level for _, level in deeds) + shift
    penalty = {
        "surveillance": 0,
        "detention": draw.randint(1, 6) if severity == 0 else 0,
        "imprisonment": draw.randint(*TERMS[severity - 1]) if severity else 0,
        "death_penalty": False,
        "life_imprisonment": False,
        "fine": 0,
        "fine_without_amount": False,
    }
    return {
        "name": name,
        "penalty": penalty,
        "charges": [crime.charge for crime, _ in deeds],
        "articles": [crime.article for crime, _ in deeds],
    }


def write_demo(folder: Path, sizes: Mapping[str, int], seed: int = 0) -> None:
    """Write `<name>.jsonl` with the number of cases in `sizes`; always the same for a seed.

    `base` gets cases of one or two defendants, the others of two to five. No fact occurs twice.

    Raises:
        UserError: A file of that name exists that has other cases.
    """
    for name in sizes:
        _check_is_invented(folder / f"{name}.jsonl", next(_stream(name, seed)))
    seen: set[str] = set()
    for name, size in sizes.items():
        fresh = _unseen(_stream(name, seed), seen)
        with atomic_write(folder / f"{name}.jsonl") as out:
            for number, case in enumerate(islice(fresh, size)):
                out.write(dump({"id": number, **case}) + "\n")


def _stream(name: str, seed: int) -> Iterator[dict[str, Any]]:
    fewest, most = (1, 2) if name == "base" else (2, 5)
    return cases(random.Random(f"{seed}/{name}"), fewest, most)


def _check_is_invented(path: Path, first: Mapping[str, Any]) -> None:
    """Refuse to overwrite a file unless its first case is the invented one `first`."""
    if not path.exists():
        return
    with suppress(UserError):
        row = next((row for _, row in read_lines(path)), first)
        if row.get("fact") == first["fact"]:
            return
    raise UserError(f"{path}: has other cases than the invented ones; choose another folder")


def _unseen(stream: Iterator[dict[str, Any]], seen: set[str]) -> Iterator[dict[str, Any]]:
    for case in stream:
        if case["fact"] not in seen:
            seen.add(case["fact"])
            yield case
