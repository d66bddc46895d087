"""500 judgments in words, with what each of them says. Imports nothing of panjue, on purpose.

The grammar is of how courts and language models write: several crimes, formal numerals, brackets,
suspended terms, earlier sentences, and of what they leave open.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CRIMES = {
    "盗窃罪": "264",
    "诈骗罪": "266",
    "抢劫罪": "263",
    "故意伤害罪": "234-2",
    "开设赌场罪": "303-2",
    "寻衅滋事罪": "293-1",
    "危险驾驶罪": "133.1-1",
    "帮助信息网络犯罪活动罪": "287.2-1",
    "掩饰、隐瞒犯罪所得罪": "312-1",
    "掩饰、隐瞒犯罪所得、犯罪所得收益罪": "312-1",
    "贩卖毒品罪": "347-4",
    "走私、贩卖、运输、制造毒品罪": "347-2",
    "贩卖、运输毒品罪": "347-3",
    "非法持有、私藏枪支、弹药罪": "128-1",
    "非法持有枪支罪": "128-1",
    "引诱、容留、介绍卖淫罪": "359-1",
    "生产、销售有毒、有害食品罪": "144",
    "伪造、变造、买卖国家机关公文、证件、印章罪": "280-1",
    "伪造国家机关证件罪": "280-1",
    "组织、领导、参加黑社会性质组织罪": "294-1",
    "参加黑社会性质组织罪": "294-1",
    "非法捕捞水产品罪": "340",
    "侵犯公民个人信息罪": "253.1-1",
    "组织、领导传销活动罪": "224.1",
    "虚开增值税专用发票、用于骗取出口退税、抵扣税款发票罪": "205",
    "非法制造、买卖、运输、邮寄、储存枪支、弹药、爆炸物罪": "125-1",
    "拐卖妇女、儿童罪": "240-1",
    "运送他人偷越国（边）境罪": "321-1",
    "以危险方法危害公共安全罪": "114",
    "交通肇事罪": "133",
    "窝藏、包庇罪": "310-1",
    "包庇毒品犯罪分子罪": "349-1",
    "拒不支付劳动报酬罪": "276.1",
    "非法吸收公众存款罪": "176-1",
    "受贿罪": "385-1",
    "强奸罪": "236-1",
    "强制猥亵、侮辱罪": "237-1",
}
FAMILY = "张王李赵陈刘杨黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯于董萧程曹袁邓许傅沈曾彭吕"
GIVEN = ["某", "某某", "某甲", "某1", "某A", "和平", "志强", "建国", "某乙", "伟", "与之", "因福"]
FIGURES = "零一二三四五六七八九"
FORMAL = "零壹贰叁肆伍陆柒捌玖"


@dataclass
class Sentence:
    """A judgment, and the outcomes that it states for certain; None: it leaves some open."""

    text: str
    outcomes: list[dict[str, Any]] | None
    traits: list[str] = field(default_factory=list)


def sentences(seed: int = 74, count: int = 500) -> list[Sentence]:
    chance = random.Random(seed)
    kinds = [one_crime, several_crimes, several_persons, reversed_order, plain_words, left_open]
    weights = [30, 22, 20, 8, 10, 10]
    return [chance.choices(kinds, weights)[0](chance) for _ in range(count)]


def chinese(number: int, chance: random.Random) -> str:
    """Write a number below 100 in one of the ways that courts use."""
    way = chance.random()
    if way < 0.25:
        return str(number)
    if way < 0.3:
        return "".join(chr(ord(sign) + 0xFEE0) for sign in str(number))
    figures = FORMAL if way < 0.4 else FIGURES
    ten = "拾" if figures is FORMAL else "十"
    if number < 10:
        return (
            "两"
            if number == 2 and chance.random() < 0.3 and figures is FIGURES
            else figures[number]
        )
    tens, ones = divmod(number, 10)
    return (
        ("" if tens == 1 and figures is FIGURES else figures[tens])
        + ten
        + (figures[ones] if ones else "")
    )


def length(months: int, chance: random.Random) -> str:
    years, rest = divmod(months, 12)
    if years and rest == 6 and chance.random() < 0.15:
        return f"{chinese(years, chance)}年半"
    text = f"{chinese(years, chance)}年" if years else ""
    if rest:
        text += chance.choice(["", "", "零", "又"]) if years else ""
        text += f"{chinese(rest, chance)}{chance.choice(['个月', '个月', '个月', '月'])}"
    return text


NOTHING = {"surveillance": 0, "detention": 0, "imprisonment": 0}
NOTHING |= {"death_penalty": False, "life_imprisonment": False}


def penalty(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a principal penalty in words and in the official fields."""
    kind = chance.random()
    if kind < 0.03:
        words = chance.choice(
            ["死刑", "死刑，缓期二年执行", "死刑缓期二年执行", "死刑，剥夺政治权利终身"]
        )
        return words, {**NOTHING, "death_penalty": True}
    if kind < 0.06:
        return "无期徒刑", {**NOTHING, "life_imprisonment": True}
    if kind < 0.2:
        months = chance.randint(1, 6)
        return f"拘役{length(months, chance)}", {**NOTHING, "detention": months}
    if kind < 0.27:
        months = chance.randint(3, 24)
        return f"管制{length(months, chance)}", {**NOTHING, "surveillance": months}
    months = chance.randint(6, 180)
    return f"有期徒刑{length(months, chance)}", {**NOTHING, "imprisonment": months}


def accessory(chance: random.Random) -> str:
    """Return what may follow a principal penalty without changing it."""
    options = [
        "",
        "",
        "，并处罚金人民币五千元",
        "，并处罚金人民币5,000元",
        "，并处罚金人民币壹万元（已缴纳）",
        "，缓刑二年",
        "，宣告缓刑三年，并处罚金人民币2万元",
        "，剥夺政治权利一年，并处没收个人财产人民币三万元",
        "，并处罚金一千五百元（限本判决生效后十日内缴纳）",
        "（刑期从判决执行之日起计算。判决执行以前先行羁押的，羁押一日折抵刑期一日，即自2018年3月1日起至2019年8月31日止）",
        "，并处罚金人民币三千元（缓刑考验期限，从判决确定之日起计算）",
        "并处罚金人民币六千元",
    ]
    return chance.choice(options)


def name(chance: random.Random, taken: set[str]) -> str:
    while True:
        found = chance.choice(FAMILY) + chance.choice(GIVEN)
        if found not in taken and found + "某" not in taken and found[:-1] not in taken:
            taken.add(found)
            return found


def article(number: str, chance: random.Random) -> str:
    """Cite an article such as 133.1-1."""
    main, _, paragraph = number.partition("-")
    main, _, inserted = main.partition(".")
    if chance.random() < 0.5:
        hundreds, rest = divmod(int(main), 100)
        tens, ones = divmod(rest, 10)
        text = f"{FIGURES[hundreds]}百"
        if tens:
            text += f"{FIGURES[tens]}十" + (FIGURES[ones] if ones else "")
        elif ones:
            text += f"零{FIGURES[ones]}"
        part = FIGURES
    else:
        text, part = main, "0123456789"
    cited = f"第{text}条"
    cited += f"之{FIGURES[int(inserted)]}" if inserted else ""
    return cited + (f"第{part[int(paragraph)]}款" if paragraph else "")


def citation(numbers: list[str], chance: random.Random) -> str:
    book = chance.choice(["《中华人民共和国刑法》", "《刑法》", "刑法", "《中华人民共和国刑法》"])
    listed = "、".join(article(number, chance) for number in numbers)
    other = chance.choice(
        [
            "",
            "",
            "、《中华人民共和国刑事诉讼法》第二百零一条",
            "及《最高人民法院关于适用〈中华人民共和国刑事诉讼法〉的解释》第三百五十五条",
        ]
    )
    end = chance.choice(["之规定", "的规定", "之规定"])
    return f"{chance.choice(['依照', '根据', '依据'])}{book}{listed}{other}{end}"


def framed(verdict: str, numbers: list[str], chance: random.Random) -> str:
    """Put the citation before the verdict or after it."""
    cited = citation(numbers, chance)
    if chance.random() < 0.75:
        return f"{cited}，判决如下：{chance.choice(['', chr(10)])}{verdict}"
    return f"{verdict}{chr(10)}{cited}。"


def outcome(
    who: str, crimes: list[str], numbers: list[str], served: dict[str, Any]
) -> dict[str, Any]:
    return {"name": who, "charges": crimes, "articles": numbers, "penalty": served}


def one_crime(chance: random.Random) -> Sentence:
    who = name(chance, set())
    crime = chance.choice(list(CRIMES))
    words, served = penalty(chance)
    title = chance.choice(["被告人", "被告人", "被告人", "上诉人（原审被告人）", ""])
    alias = chance.choice(["", "", "", "（绰号“三哥”）", "（又名张大）"])
    verb = chance.choice(["犯", "犯", "犯", "犯有", "的行为构成", "其行为已构成"])
    comma = chance.choice(["，", "，", "，", ",", ""])
    note = chance.choice(["", "", "", "（未遂）"])
    verdict = f"{title}{who}{alias}{verb}{crime}{note}{comma}判处{words}{accessory(chance)}。"
    numbers = [CRIMES[crime]]
    return Sentence(framed(verdict, numbers, chance), [outcome(who, [crime], numbers, served)])


def several_crimes(chance: random.Random) -> Sentence:
    """One person with several crimes: what is decided together counts."""
    who = name(chance, set())
    crimes = chance.sample(list(CRIMES), chance.randint(2, 3))
    numbers = list(dict.fromkeys(CRIMES[crime] for crime in crimes))
    words, served = penalty(chance)
    shape = chance.random()
    if shape < 0.7:
        parts = []
        for number, crime in enumerate(crimes):
            own, _ = penalty(chance)
            subject = f"被告人{who}犯" if not number else chance.choice(["犯", "犯", "又犯"])
            own = own.replace("，剥夺政治权利终身", "")
            parts.append(
                f"{subject}{crime}，判处{own}{chance.choice(['', '，并处罚金人民币一万元'])}"
            )
        joint = chance.choice(["", "数罪并罚，", "总和刑期十年二个月，", "实行数罪并罚，"])
        decided = chance.choice(["决定执行", "决定合并执行", "决定执行", "最终决定执行"])
        verdict = "；".join(parts) + f"；{joint}{decided}{words}{accessory(chance)}。"
    elif shape < 0.85:
        listed = (
            chance.choice(["、", "、", "和", "，"]).join(crimes)
            if len(crimes) == 2
            else "、".join(crimes)
        )
        listed = listed.replace("，", "、")
        verdict = f"被告人{who}犯{listed}，数罪并罚，判处{words}{accessory(chance)}。"
    else:
        earlier = "撤销某某区人民法院（2015）某刑初字第12号刑事判决中对被告人宣告缓刑的部分"
        own, _ = penalty(chance)
        crimes, numbers = crimes[:1], [CRIMES[crimes[0]]]
        verdict = (
            f"{earlier}；被告人{who}犯{crimes[0]}，判处{own.replace('，剥夺政治权利终身', '')}，"
            f"与前罪判处的刑罚并罚，决定执行{words}。"
        )
    return Sentence(framed(verdict, numbers, chance), [outcome(who, crimes, numbers, served)])


def several_persons(chance: random.Random) -> Sentence:
    taken: set[str] = set()
    persons = [name(chance, taken) for _ in range(chance.randint(2, 4))]
    crime = chance.choice(list(CRIMES))
    numbers = [CRIMES[crime]]
    if chance.random() < 0.2:
        words, served = penalty(chance)
        verdict = f"被告人{'、'.join(persons)}犯{crime}，均判处{words}。"
        outcomes = [outcome(who, [crime], numbers, served) for who in persons]
        return Sentence(framed(verdict, numbers, chance), outcomes)
    ordinal = chance.choice(["一二三四", "1234", "", ""])
    lines, outcomes = [], []
    for number, who in enumerate(persons):
        words, served = penalty(chance)
        head = f"{ordinal[number]}、" if ordinal else ""
        lines.append(f"{head}被告人{who}犯{crime}，判处{words}{accessory(chance)}")
        outcomes.append(outcome(who, [crime], numbers, served))
    tail = chance.choice(
        ["", "", "作案工具手机一部予以没收；", "继续追缴各被告人违法所得，返还被害人。"]
    )
    joined = chance.choice(["；", "。\n", "；\n"]).join(lines)
    return Sentence(framed(f"{joined}。{tail}", numbers, chance), outcomes)


def reversed_order(chance: random.Random) -> Sentence:
    who = name(chance, set())
    crime = chance.choice(list(CRIMES))
    words, served = penalty(chance)
    numbers = [CRIMES[crime]]
    verdict = chance.choice(
        [
            f"以{crime}判处被告人{who}{words}{accessory(chance)}。",
            f"对被告人{who}以{crime}判处{words}{accessory(chance)}。",
        ]
    )
    return Sentence(framed(verdict, numbers, chance), [outcome(who, [crime], numbers, served)])


def plain_words(chance: random.Random) -> Sentence:
    """A language model's way of writing."""
    who = name(chance, set())
    crime = chance.choice(list(CRIMES))
    words, served = penalty(chance)
    number = CRIMES[crime]
    cited = (
        f"{chance.choice(['《刑法》', '刑法', '《中华人民共和国刑法》'])}{article(number, chance)}"
    )
    months = served["imprisonment"]
    if months and chance.random() < 0.5:
        words = f"{length(months, chance)}有期徒刑"
    text = chance.choice(
        [
            f"被告人：{who}\n罪名：{crime}\n法条：{cited}\n刑期：{words}",
            f"根据{cited}，被告人{who}犯{crime}，应当判处{words}。".replace("应当", ""),
            f"被告人{who}的行为已构成{crime}，根据{cited}的规定，判处{words}。",
        ]
    )
    return Sentence(text, [outcome(who, [crime], [number], served)])


def left_open(chance: random.Random) -> Sentence:
    """A judgment that does not say for certain what counts."""
    who = name(chance, set())
    other = name(chance, {who})
    one, two = chance.sample(list(CRIMES), 2)
    words, _ = penalty(chance)
    texts = {
        "no decision": f"被告人{who}犯{one}，判处有期徒刑三年；犯{two}，判处有期徒刑一年。",
        "a range": f"被告人{who}犯{one}，判处有期徒刑三年以上七年以下。",
        "acquitted": f"被告人{who}无罪。",
        "no crime": f"判处被告人{who}有期徒刑三年。",
        "unknown crime": f"被告人{who}犯破坏风景罪，判处{words}。",
        "days": f"被告人{who}犯{one}，判处拘役一个月十五日。",
        "no penalty": f"被告人{who}犯{one}。",
        "divided": f"被告人{who}、{other}犯{one}，分别判处有期徒刑三年、二年。",
        "one for two": f"被告人{who}、{other}犯{one}，判处有期徒刑三年。",
        "nobody": f"犯{one}，判处{words}。",
        "proposal": f"公诉机关建议对被告人{who}犯{one}判处有期徒刑三年。",
        "appeal": f"驳回上诉人{who}的上诉，维持原判。被告人{who}犯{one}，判处有期徒刑三年。",
        "too long": f"被告人{who}犯{one}，判处有期徒刑三十六年。",
        "broken number": f"被告人{who}犯{one}，判处有期徒刑三十十年。",
        "other law": "",
        "earlier": f"被告人{who}曾因犯{two}被判处有期徒刑二年，现犯{one}。",
    }
    trait = chance.choice(list(texts))
    if trait == "other law":
        law = "《中华人民共和国治安管理处罚法》第二十三条"
        return Sentence(f"根据{law}，被告人{who}犯{one}，判处{words}。", None, [trait])
    return Sentence(framed(texts[trait], [CRIMES[one]], chance), None, [trait])


def alpaca(made: list[Sentence]) -> Iterator[dict[str, str]]:
    for number, sentence in enumerate(made):
        fact = f"经审理查明，第{number}号案件的事实。"
        yield {"instruction": "判决", "input": fact, "output": sentence.text}
