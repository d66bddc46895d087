"""Read an article of the Criminal Law in any usual spelling, and return its id in the labels."""

import re
from collections.abc import Container, Mapping

from panjue.prompts.plumbing.decode import flatten_forms

DIGITS = "〇一二三四五六七八九"
VALUES = {sign: value for value, sign in enumerate(DIGITS)} | {"零": 0, "两": 2}
UNITS = {"十": 10, "百": 100}
DIGIT = "[一二三四五六七八九两]"
WRITTEN_NUMBER = (
    rf"(?:[0-9]{{1,4}}|{DIGIT}百(?:[零〇]{DIGIT}|{DIGIT}?十{DIGIT}?)?|{DIGIT}?十{DIGIT}?"
    r"|[〇零一二三四五六七八九]{1,4})"
)
"""Pattern of 133, 一百三十三 or 一三三, but not of 一百四, which means 140 in spoken Chinese."""

PARTS = "0-9〇零一二三四五六七八九十百两第条之款项"
IN_BRACKETS = re.compile(rf"\(((?:之|第)[{PARTS}]+|[{PARTS}]+(?=\)[款项]))\)")
"""Pattern of a part of the number in brackets: 第133条(之一), 第(二)项."""

WRITTEN = re.compile(
    r"(?:根据|依照|依据)?(?:《?(?:中华人民共和国)?刑法典?》?)?"
    rf"第?(?P<article>{WRITTEN_NUMBER})(?:\.(?P<point>[0-9]{{1,3}}))?条?(?:之(?P<inserted>{WRITTEN_NUMBER}))?条?"
    rf"(?:(?:第|(?<=条)|(?(inserted)|(?!)))(?P<paragraph>{WRITTEN_NUMBER})款|-(?P<hyphen>[0-9]{{1,3}}))?"
    rf"(?:(?:第|(?<=[条款])){WRITTEN_NUMBER}项)?"
    rf"(?:[之的]?规定|\([^(){PARTS}]*\))?"
)
"""Pattern of `第二百八十七条之二第一款`, `287之2第1款` or the id `287.2-1`; no article of another
law.

The number of a paragraph must follow a 第, a 条 or a 之N: 第264款 is not 26条4款."""


def number(text: str) -> int:
    """Return the value of a `WRITTEN_NUMBER`: 133, 一三三 and 一百三十三 are all 133."""
    if text.isdecimal():
        return int(text)
    if set(text).isdisjoint(UNITS):
        return int("".join(str(VALUES[character]) for character in text))
    total = 0
    digit = 0
    for character in text:
        if character in UNITS:
            total += (digit or 1) * UNITS[character]
            digit = 0
        else:
            digit = VALUES[character]
    return total + digit


def numeral(value: int) -> str:
    """Return a number from 1 to 999 as Chinese law writes it: 一百零四, 二十."""
    text = ""
    if value >= 100:
        text = f"{DIGITS[value // 100]}百"
        if 0 < value % 100 < 10:
            text += "零"
    if value % 100 >= 10:
        tens = value // 10 % 10
        text += "十" if value < 20 else f"{DIGITS[tens]}十"
    return text + (DIGITS[value % 10] if value % 10 else "")


ARTICLE_ID = re.compile(r"([0-9]{1,3})(?:\.([0-9]{1,2}))?(?:-([0-9]{1,2}))?")
"""Pattern of an article's id: its number, after `.` that of 之二, after `-` its paragraph (款)."""


def article_name(article: str) -> str:
    """Return an article's id as people read it: 第二百八十七条之二, 第三百五十八条第一款."""
    parts = ARTICLE_ID.fullmatch(article)
    if not parts or int(parts[1]) == 0:
        return article
    name = f"第{numeral(int(parts[1]))}条"
    if parts[2]:
        name += f"之{numeral(int(parts[2]))}"
    if parts[3]:
        name += f"第{numeral(int(parts[3]))}款"
    return name


def article_of(written: str, known: Mapping[str, str], with_charge: Container[str]) -> str | None:
    """Return the label that an article of a reply means; None if that is not certain.

    `known` has `normal(label)` -> label. `with_charge` has the articles of those training answers
    that share a charge with the reply. 287.2 never becomes 287, which is another crime. A paragraph
    (款) may be another crime, too:

    - `第264条第1款` -> `264`, if no label is a paragraph of 264.
    - `第303条第3款` -> None, if only `303-1` and `303-2` are labels.
    - `第303条` -> `303-1`, if it is the only label of 303, and the charge confirms it: it is in
      `with_charge`.
    """
    text = re.sub(r"\s+", "", flatten_forms(written)).strip("。.,、;:\"'“”‘’*")
    parts = WRITTEN.fullmatch(IN_BRACKETS.sub(r"\1", text))
    if not parts or (parts["point"] and parts["inserted"]):
        return None  # no article, or one such as 133.1之一, whose .1 and 之一 say the same twice
    article = str(number(parts["article"]))
    inserted = parts["point"] or parts["inserted"]  # the 2 of 287.2 or 第287条之二
    if inserted:
        article += f".{number(inserted)}"
    paragraph = parts["hyphen"] or parts["paragraph"]  # the 1 of 303-1 or 第303条第一款
    with_paragraph = [label for form, label in known.items() if form.startswith(f"{article}-")]
    if paragraph is None:
        if article in known:
            return known[article]
        is_certain = len(with_paragraph) == 1 and with_paragraph[0] in with_charge
        return with_paragraph[0] if is_certain else None
    if with_paragraph:
        return known.get(f"{article}-{number(paragraph)}")
    if parts["hyphen"] and not inserted and f"{article}.{number(paragraph)}" in known:
        return None  # 133-1 may mean 133.1
    return known.get(article)
