"""Read a penalty or an amount of money in words: 有期徒刑三年六个月, 拘役3个月, 1.5万元."""

import re
from typing import Any

from panjue.prompts.plumbing.decode import flatten_forms
from panjue.prompts.tasks.judgment.articles import DIGIT, VALUES, number
from panjue.prompts.tasks.judgment.penalties import sentence

FORMAL = str.maketrans("壹贰叁肆伍陆柒捌玖拾佰仟貳參陸萬○", "一二三四五六七八九十百千二三六万零")
"""Formal numerals -> the usual ones."""

COUNT = rf"(?:[0-9]{{1,3}}|{DIGIT}百(?:零?{DIGIT}|{DIGIT}?十{DIGIT}?)?|{DIGIT}?十{DIGIT}?|{DIGIT})"
"""Pattern of a number of years or months, but not of 一二, which may be twelve, or one or two."""

LENGTH = (
    rf"(?:(?:(?P<years>{COUNT})年(?P<half>半)?|(?P<half_year>半年))整?"
    rf"(?:[零又另加]?(?P<months_more>{COUNT})个?月)?|(?P<months>{COUNT})个?月)整?"
)
"""Pattern of 三年, 三年六个月, 一年半, 半年 or 六个月."""

KIND = "(?P<kind>有期徒刑|拘役|管制)"
TERMS = (
    re.compile(f"{KIND}(?:刑期)?(?:为|:)?{LENGTH}"),
    re.compile(f"{LENGTH}的?{KIND}"),
)
FIELD_OF_KIND = {"有期徒刑": "imprisonment", "拘役": "detention", "管制": "surveillance"}
LONGEST = {"imprisonment": 300, "detention": 12, "surveillance": 36}
"""Longest term in months that the law allows for several crimes together (article 69)."""

DEATH_WORDS = re.compile("死刑(?:立即执行|缓期[二两2]年执行|缓期执行)?|死缓")
LIFE_WORDS = re.compile("无期徒刑")
EXEMPT = re.compile("(?:免予|免于|免除)(?:刑事)?(?:处罚|处分)|(?:免予|免于|免除)刑罚")


def penalty_of(written: str) -> dict[str, Any] | None:
    """Return the principal penalty in a text, in months; None if it is not exactly one."""
    text = re.sub(r"\s", "", flatten_forms(written)).translate(FORMAL).strip(",.。;:")
    if DEATH_WORDS.fullmatch(text.replace(",", "")):
        return sentence(death_penalty=True)
    if LIFE_WORDS.fullmatch(text):
        return sentence(life_imprisonment=True)
    if EXEMPT.fullmatch(text):
        return sentence()
    for pattern in TERMS:
        if match := pattern.fullmatch(text):
            return _term(match)
    return None


def _term(match: re.Match[str]) -> dict[str, Any] | None:
    """Return the penalty of a match of `TERMS`; None if the law does not allow its length.

    有期徒刑三年六个月 -> 42 months of imprisonment. Its 六 is `months_more`, but that of 拘役六个月
    is `months`. 一年半 has a `half`, and 半年 is a `half_year`.
    """
    years = number(match["years"] or "零")
    months_more = number(match["months_more"] or "零")
    half_year = 6 if match["half"] or match["half_year"] else 0
    if months_more and (half_year or months_more > 11):
        return None  # 一年半三个月, 一年十八个月: a writing error
    months = 12 * years + half_year + months_more + number(match["months"] or "零")
    kind = FIELD_OF_KIND[match["kind"]]
    return sentence(**{kind: months}) if 0 < months <= LONGEST[kind] else None


AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?|[零一二三四五六七八九两十百千万亿]+)(万|千|百)?余?元整?")
SCALES = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}


def money_of(text: str) -> float | None:
    """Return the first amount in a text, in yuan: 五千元, 1.5万元; None if there is none."""
    found = AMOUNT.search(text.translate(FORMAL))
    if not found:
        return None
    scale = SCALES[found[2]] if found[2] else 1
    if found[1][0].isdecimal():
        amount = float(found[1]) * scale
        return int(amount) if amount.is_integer() else amount
    total = section = digit = 0  # 十二万五千: total 120000, section 5000
    for sign in found[1]:
        value = SCALES.get(sign, 0)
        if value >= SCALES["万"]:
            total = (total + section + digit) * value
            section = digit = 0
        elif value:
            section += (digit or 1) * value
            digit = 0
        else:
            digit = VALUES[sign]
    return (total + section + digit) * scale
