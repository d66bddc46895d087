"""Turn what the facts of a Chinese criminal case say for or against a person into numbers."""

import math
import re
from collections import defaultdict

UNIT = r"(元|美元|克|kg|千克|公斤|g)"

SPACE = r"[ \u00a0\u2009\u202f\u3000]"

AMOUNT = re.compile(
    rf"(\d(?<!\d\d)(?<!\d[,，]\d)(?:\d{{0,2}}(?:{SPACE}\d{{3}}){{1,4}}+(?!\d)|[\d,，]*+)(?:[.．]\d++)?+)"
    rf"\s*+余?\s*+([万千百亿])?\s*+余?\s*+多?\s*+{UNIT}"
)
"""Pattern of an amount. It reads a number only from its start, and white space only once; otherwise
120 spaces took 11 seconds. It begins with what it looks for, which takes a third of the time."""

GROUPS = re.compile(f"[,，]|{SPACE}")

DIGITS = {sign: value for value, sign in enumerate("零一二三四五六七八九")}
DIGITS |= {sign: value for value, sign in enumerate("〇壹贰叁肆伍陆柒捌玖")}
DIGITS |= {"○": 0, "两": 2, "貳": 2, "參": 3, "陸": 6}

UNITS = {"十": 10, "百": 100, "千": 1000, "拾": 10, "佰": 100, "仟": 1000}

ALL_DIGITS = "".join(DIGITS)
FIRST_NUMERALS = "".join(sign for sign in DIGITS if DIGITS[sign]) + "十拾"
NUMERALS = f"{ALL_DIGITS}{''.join(UNITS)}万萬亿点"

WRITTEN_AMOUNT = re.compile(
    rf"([{FIRST_NUMERALS}](?<![数几.．\d{NUMERALS}].)"
    rf"(?:[{NUMERALS}]++|(?=余?克|千克|公斤)))(?:[余多]([万亿]))?余?多?{UNIT}"
)
"""Pattern of an amount in Chinese numerals: 三千元, 二十余万元, 叁拾克; not 数十万元, not
三元里."""

TIMES = {"": 1, "百": 1e2, "千": 1e3, "万": 1e4, "亿": 1e8}
GRAMS = {"克": 1, "g": 1, "kg": 1e3, "千克": 1e3, "公斤": 1e3}
MAX_AMOUNT = 1e15
ACTS = "起次"  # counters of acts, as in 盗窃三起
YEAR_AND_MONTH = re.compile(r"年(?<=\d年)\d+月")  # a date, mostly of an act

WORDS = """
    主犯 从犯 胁从 次要作用 主要作用
    自首 投案 坦白 如实供述 累犯 前科 曾因 刑满释放 未遂 中止 预备
    退赃 退赔 谅解 赔偿 认罪认罚 未成年 未满十八 立功
    望风 组织 领导 首要分子 积极参加
    轻伤一级 轻伤二级 轻伤 重伤一级 重伤二级 重伤 轻微伤 死亡 致死
    持刀 枪 入户
    毒品 海洛因 冰毒 甲基苯丙胺 传销 赌博 赌场 网站 诈骗 抢劫 强奸 未成年人 幼女
    数额较大 数额巨大 数额特别巨大 情节严重 情节特别严重 多次
    酒后 逃离 在逃 另案处理 取保候审 缓刑
    公司 经理 老板 股东 员工 受雇 帮忙 司机 工资 提成 分得 获利 介绍 提供
""".split()  # noqa: SIM905  # one word a line would be too long
"""Words of judgments for roles, conduct before and after, means, injuries, drugs and posts."""

BY_FIRST_CHARACTER: dict[str, list[int]] = defaultdict(list)
"""First character -> positions in `WORDS` of the words that begin with it."""
for _number, _word in enumerate(WORDS):
    BY_FIRST_CHARACTER[_word[0]].append(_number)


def evidence(text: str) -> list[float]:
    """Return the sizes of amounts of money and grams, and the numbers of acts, dates and words."""
    money = []
    grams = []
    amounts = []
    for number, times, unit in AMOUNT.findall(text):
        amounts.append((float(GROUPS.sub("", number).replace("．", ".")) * TIMES[times], unit))
    for numeral, times, unit in WRITTEN_AMOUNT.findall(text):
        amounts.append((written_number(numeral) * TIMES[times], unit))
    for amount, unit in amounts:
        value = min(amount, MAX_AMOUNT)
        if unit in GRAMS:
            grams.append(value * GRAMS[unit])
        else:
            money.append(value)
    acts = sum(map(text.count, ACTS))
    dates = len(YEAR_AND_MONTH.findall(text))
    words = [0] * len(WORDS)  # how often the text has each of `WORDS`
    for character, positions in BY_FIRST_CHARACTER.items():
        if character in text:  # saves time: most texts lack most of these characters
            for position in positions:
                words[position] = text.count(WORDS[position])
    return [*_sizes(money), *_sizes(grams), acts, dates, *words]


NUMERAL_PARTS = re.compile(
    f"(?P<whole>[{ALL_DIGITS}]*+)点(?P<decimals>[{ALL_DIGITS}]*)"
    f"|(?P<digits>[{ALL_DIGITS}]+)|(?P<unit>.)"
)


def written_number(numeral: str) -> float:
    """Return the value of Chinese numerals: 十二万五千, 一点五, 二〇〇.

    三四千 means three or four thousand and counts as 四千. So two digits in a row are a range: 三四
    is 4, not 34. Three or more, before 点, or with a zero behind the first, they are the digits of
    one number: 一二三, 二〇, 二〇五万, 一五点二.
    """
    total = 0.0  # the part that 万 or 亿 ends
    section = 0.0
    number = 0.0  # before the next unit
    for part in NUMERAL_PARTS.finditer(numeral):
        unit = part["unit"]
        if part["digits"]:
            number = _of_digits(part["digits"])
        elif unit is None:
            number += float(f"{_arabic(part['whole'])}.{_arabic(part['decimals'])}0")
        elif unit in UNITS:
            section += (number or 1) * UNITS[unit]
            number = 0
        else:
            ended = section + number
            total = (total + ended) * 1e8 if unit == "亿" else total + ended * 1e4
            section = number = 0
    return total + section + number


def _of_digits(digits: str) -> float:
    """Return the number of digits in a row, or the higher one of a range such as 三四."""
    arabic = _arabic(digits)
    is_range = len(arabic) == 2 and "0" not in arabic
    return float(arabic[-1] if is_range else arabic)


def _arabic(digits: str) -> str:
    return "".join(str(DIGITS[sign]) for sign in digits)


def _sizes(amounts: list[float]) -> list[float]:
    """Return three features of the amounts in a text: log10 of the largest, of all, how many."""
    largest = max(amounts, default=0)
    return [math.log10(largest + 1), math.log10(sum(amounts) + 1), len(amounts)]
