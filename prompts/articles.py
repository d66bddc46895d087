"""How people write an article of the Criminal Law -> its id in the label set."""

import re
from collections.abc import Mapping

from panjue.prompts.decode import flatten_forms

DIGITS = {digit: value for value, digit in enumerate("〇一二三四五六七八九")} | {"零": 0, "两": 2}
UNITS = {"十": 10, "百": 100, "千": 1000}
NUMBER = rf"(?:[0-9]{{1,4}}|[{''.join([*DIGITS, *UNITS])}]{{1,9}})"
LAW = r"(?:《?(?:中华人民共和国)?刑法》?)?"
WRITTEN = re.compile(
    rf"(?:根据|依照|依据)?{LAW}第?(?P<article>{NUMBER})(?:\.(?P<point>[0-9]{{1,3}}))?条?"
    rf"(?:之(?P<inserted>{NUMBER}))?条?(?:第?(?P<paragraph>{NUMBER})款|-(?P<hyphen>[0-9]{{1,3}}))?"
    rf"(?:第?{NUMBER}项)?(?:之?规定|\(.*\))?"
)
"""`第二百八十七条之二第一款`, `287之2第1款` or the id itself, `287.2-1`; another law's is none."""


def number(text: str) -> int:
    """Return the value of a number in digits or Chinese numerals: 一百三十三, 一三三 or 133."""
    if text.isdecimal():
        return int(text)
    if not set(text) & set(UNITS):
        return int("".join(str(DIGITS[digit]) for digit in text))
    total, digit = 0, None
    for sign in text:
        if sign in UNITS:
            total += (1 if digit is None else digit) * UNITS[sign]
            digit = None
        else:
            digit = DIGITS[sign]
    return total + (digit or 0)


def article_of(written: str, known: Mapping[str, str]) -> str | None:
    """Return the known article that `written` means, or None.

    条之二 is part of the number (`287.2`), never dropped: article 287 is another crime. A paragraph
    (款) is dropped only where no paragraph of its article is a label.

    Args:
        written: What the model wrote.
        known: `normal(label)` -> label, for every known article.
    """
    found = WRITTEN.fullmatch(re.sub(r"\s+", "", flatten_forms(written)))
    if not found:
        return None
    if found["point"] and found["inserted"]:
        return None
    inserted = found["point"] or found["inserted"]
    article = f"{number(found['article'])}" + (f".{number(inserted)}" if inserted else "")
    paragraph = found["paragraph"] or found["hyphen"]
    if paragraph is None:
        return known.get(article)
    if exact := known.get(f"{article}-{number(paragraph)}"):
        return exact
    has_paragraphs = any(form.startswith(f"{article}-") for form in known)
    return None if has_paragraphs else known.get(article)
