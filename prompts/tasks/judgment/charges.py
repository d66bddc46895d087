"""The names of the crimes in the Criminal Law, and the crimes that a text lists.

charges.txt has one name on each line. `[窝藏、包庇]罪` has a choice of parts: a judgment names one
or more of them, such as 窝藏罪. A line has an article only if it is an inserted one (之一):
`287.2 帮助信息网络犯罪活动罪`.
"""

import re
from functools import cache, lru_cache
from pathlib import Path

from panjue.prompts.plumbing.decode import flatten_forms
from panjue.prompts.tasks.judgment.articles import ARTICLE_ID

CRIME = "罪"
JOIN = "、"

LINE = re.compile(r"(?m)^(?:(?P<article>[0-9]+\.[0-9]+) )?(?P<name>\S+罪)$")
"""Pattern of a line of charges.txt, but not of its comments."""

CHOICE = re.compile(r"\[([^\]]+)\]")
"""Pattern of the parts of a name from which a judgment chooses: `[窝藏、包庇]罪`."""

BETWEEN = re.compile(f"(?<={CRIME})(?:[、,;/|]|以及|和|与|及)+|[;/|]+")
"""Pattern of separators of whole names. A word such as 及 may be part of a name, except after
罪."""


def charge_of(written: str) -> str | None:
    """Return the crime that a text names, as the law spells it: 盗窃 -> 盗窃罪; else None.

    `[走私、贩卖、运输、制造]毒品`, as CAIL2018 writes it, is the whole name. A name with some of
    its parts, such as 贩卖毒品罪, stays as it is, because the judgment names this crime.
    """
    text = (
        re.sub(r"[\s\[\]]+", "", flatten_forms(written))
        .replace(",", JOIN)
        .replace("帐", "账")
        .strip("。.;:\"'“”")
    )
    if not text:
        return None
    text = text if text.endswith(CRIME) else text + CRIME
    whole = _whole_names()
    if text in whole:
        return whole[text]
    return text if _partial_names().fullmatch(text) else None


@lru_cache(maxsize=4096)
def charges_in(written: str) -> tuple[str, ...] | None:
    """Return the crimes that a text lists, in order; None if it is uncertain which they are.

    掩饰、隐瞒犯罪所得罪 is one crime and 盗窃、诈骗罪 are two, by the names in the law.
    """
    text = flatten_forms(written).strip().strip("。.;,、 ")
    charges: dict[str, None] = {}
    for part in BETWEEN.split(text):
        if not part.strip():
            continue
        one = charge_of(part)
        several = (one,) if one else _only_split(part)
        if several is None:
            return None
        charges.update(dict.fromkeys(several))
    return tuple(charges) or None


def _only_split(text: str) -> tuple[str, ...] | None:
    """Return the only way to read a text as crimes between 、 or commas: 盗窃、诈骗 -> both crimes.

    The name of a crime may contain 、 itself. So every run of pieces that is a name counts as a
    crime. None if no way reads the whole text, or several do.
    """
    pieces = re.split("[、,]", text)
    if len(pieces) > MAX_PIECES:
        return None
    # Number of the first pieces -> the ways to read them. Two ways show that it is uncertain, so
    # that a third one is not kept.
    ways: list[list[tuple[str, ...]]] = [[()]]
    for end in range(1, len(pieces) + 1):
        found: list[tuple[str, ...]] = []
        for start in range(end):
            charge = charge_of(JOIN.join(pieces[start:end]))
            if charge:
                found += [(*way, charge) for way in ways[start]]
        ways.append(found[:2])
    return ways[-1][0] if len(ways[-1]) == 1 else None


MAX_PIECES = 40
"""Most texts between 、 that are tried; every beginning is tried with every end."""


WITHOUT_CRIME = ("17.1", "37.1")
"""Inserted articles of the general part, which define no crime, so that charges.txt lacks them."""

LAST_ARTICLE = 452


def is_article(article: str) -> bool:
    """Say whether the Criminal Law has an article, whatever its paragraph: 264, 303-2, 287.2."""
    parts = ARTICLE_ID.fullmatch(article)
    if not parts or not 1 <= int(parts[1]) <= LAST_ARTICLE:
        return False
    # It has 287.2, but no 287.3.
    return not parts[2] or f"{parts[1]}.{parts[2]}" in _inserted_articles()


@cache
def _inserted_articles() -> set[str]:
    """Return all articles that amendments have inserted after others (之一): 133.1, 287.2."""
    of_crimes = {article for _, article in _lines() if article}
    return of_crimes.union(WITHOUT_CRIME)


@lru_cache(maxsize=1024)
def inserted_article(charge: str) -> str | None:
    """Return the article of a crime if it is an inserted one, such as 287.2; else None."""
    for name, article in _lines():
        if article and re.fullmatch(_pattern(name), flatten_forms(charge)):
            return article
    return None


@cache
def _lines() -> tuple[tuple[str, str | None], ...]:
    """Return the crimes of charges.txt: ("虚假诉讼罪", "307.1"), ("[窝藏、包庇]罪", None)."""
    text = Path(__file__).with_name("charges.txt").read_text("utf-8")
    return tuple((line["name"], line["article"]) for line in LINE.finditer(text))


@cache
def _whole_names() -> dict[str, str]:
    """Return flattened form -> name with all parts: 窝藏、包庇罪 for the line `[窝藏、包庇]罪`."""
    names = [re.sub(r"[\[\]]", "", name) for name, _ in _lines()]
    return {flatten_forms(name): name for name in names}


@cache
def _partial_names() -> re.Pattern[str]:
    """Return a pattern of the names with some or all parts: `[窝藏、包庇]罪` is also 窝藏罪."""
    return re.compile("|".join(_pattern(name) for name, _ in _lines() if "[" in name))


def _pattern(name: str) -> str:
    """Return a regex for a name: `[窝藏、包庇]罪` -> `(?:窝藏|包庇)(?:、(?:窝藏|包庇))*罪`."""
    pieces = CHOICE.split(name)  # every second part is a choice
    pattern = ""
    for number, piece in enumerate(pieces):
        if number % 2:
            part = "|".join(map(re.escape, piece.split(JOIN)))
            pattern += f"(?:{part})(?:{JOIN}(?:{part}))*"
        else:
            pattern += re.escape(flatten_forms(piece))
    return pattern
