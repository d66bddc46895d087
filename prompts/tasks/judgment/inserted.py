"""The articles that amendments have inserted into the Criminal Law (133.1), by their charges.

A file with whole numbers has 133 for them, which is the article of another crime.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

BY_ARTICLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
ARTICLES = {charge: article for article, charges in BY_ARTICLE.items() for charge in charges}
"""Charge -> its article."""


def with_inserted(charges: Sequence[str], articles: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return articles with those inserted for the charges, and notes on charges without theirs.

    133 remains beside 133.1 only where it is the article of another charge.
    """
    of_charges = {charge: ARTICLES.get(charge.replace("账", "帐"), "") for charge in charges}
    inserted = {charge: article for charge, article in of_charges.items() if "." in article}
    result: list[str] = []
    for article in articles:
        here = [one for one in inserted.values() if one.split(".")[0] == article]
        if not here or article in of_charges.values():
            result.append(article)
        result += here
    notes = [
        f"{charge} is article {article}, not among the articles"
        for charge, article in inserted.items()
        if article not in result
    ]
    return list(dict.fromkeys(result)), notes
