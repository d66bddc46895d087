"""Articles and charges as people write them: another spelling of one, or nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.labels import normal, snap
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.articles import article_name, article_of

WIDE = str.maketrans("0123456789.-", "０１２３４５６７８９．－")


def in_digits(article: str) -> str:
    """Write an id out: `287.2-1` is 第287条之2第1款."""
    article, _, paragraph = article.partition("-")
    article, _, inserted = article.partition(".")
    text = f"第{article}条"
    if inserted:
        text += f"之{inserted}"
    if paragraph:
        text += f"第{paragraph}款"
    return text


ARTICLES: dict[str, Callable[[str], str]] = {
    "full width": lambda article: article.translate(WIDE),
    "第…条": in_digits,
    "Chinese numerals": article_name,
    "之 without 第": lambda article: in_digits(article).replace("第", ""),
    "《刑法》": lambda article: f"《中华人民共和国刑法》{article_name(article)}",
    "刑法 and 规定": lambda article: f"根据刑法{in_digits(article)}之规定",
    "spaces": lambda article: " ".join(in_digits(article)),
    "brackets": lambda article: re.sub(r"(之\d+|第\d+款)", r"（\1）", in_digits(article)),
    "a full stop": lambda article: f"{article_name(article)}的规定。",
    "quotes": lambda article: f"“{article}”",
}
CHARGES: dict[str, Callable[[str], str]] = {
    "without 罪": lambda charge: charge.removesuffix("罪"),
    "spaces": " ".join,
    "with commas": lambda charge: charge.replace("、", "，"),
    "in quotes": lambda charge: f"“{charge}”",
    "plain brackets": lambda charge: charge.replace("（", "(").replace("）", ")"),
}


@pytest.fixture(scope="module")
def real(real_data: Path) -> dict[str, dict[str, str]]:
    """Return field -> normal form -> label of the real training file."""
    task = load_task("judgment")
    forms = task.ask.labels(Reader(task).read(real_data / "drdz/train.jsonl")).normal_forms
    assert (len(forms["charges"]), len(forms["articles"])) == (161, 159), "no two are one"
    return forms


@pytest.mark.parametrize("way", ARTICLES)
def test_every_real_article_is_itself_or_where_it_is_unknown_nothing(
    way: str, real: dict[str, dict[str, str]]
) -> None:
    known = real["articles"]
    for form, article in known.items():
        written = ARTICLES[way](article)
        assert article_of(written, known, ()) == article, written
        others = {other: label for other, label in known.items() if other != form}
        # A paragraph of an article whose other paragraphs are no labels is the article; an article
        # of which one paragraph is a label is this one, where training has it with the charge.
        base = article.partition("-")[0]
        siblings = [label for label in others.values() if label.startswith(f"{base}-")]
        whole = base if "-" in article and base in others and not siblings else None
        only = siblings[0] if "-" not in article and len(siblings) == 1 else None
        assert article_of(written, others, ()) == whole, written
        assert article_of(written, others, siblings) == (whole or only), written


@pytest.mark.parametrize("way", CHARGES)
def test_every_real_charge_is_itself_or_where_it_is_unknown_nothing(
    way: str, real: dict[str, dict[str, str]]
) -> None:
    known = real["charges"]
    for form, charge in known.items():
        written = CHARGES[way](charge)
        assert snap(written, known) == charge, written
        others = {other: label for other, label in known.items() if other != form}
        assert snap(written, others) is None, written


LABELS = "133 133.1 264 260 263 26 26-4 287 287.2 303 303-2".split()  # noqa: SIM905
KNOWN = {label: label for label in LABELS}


@pytest.mark.parametrize(
    ("written", "article"),
    [
        ("第一百三十三条之一", "133.1"),
        ("第133条（之一第一款）", "133.1"),
        ("第133条（交通肇事罪）", "133"),
        ("第133条（危险驾驶罪，第133条之一）", None),
        ("133-1", None),  # it may be meant for 133.1
        ("133(1)", None),
        ("133.1之一", None),
        ("第287条之二第一款", "287.2"),  # it has no paragraphs among the labels
        ("第287条之一", None),
        ("二六〇", "260"),
        ("第二六零条", "260"),
        ("第两百六十四条", "264"),
        ("第264条第1款第（二）项", "264"),
        ("第303条第二款", "303-2"),
        ("第303条第1款第2项", None),  # gambling is no running of a gambling house
        ("《刑事诉讼法》第264条", None),
        ("第264条和第287条", None),
        # A number is never parted between article and paragraph.
        ("第264款", None),
        ("第264项", None),
        ("第二百六十三款", None),
        ("26条4款2项", "26-4"),
        ("26第4款", "26-4"),
        # No numbers.
        ("一百四", None),
        ("三三百", None),
        ("9" * 10_000, None),
        ("十" * 10_000, None),
        ("", None),
    ],
)
def test_articles_by_hand(written: str, article: str | None) -> None:
    assert article_of(written, KNOWN, ()) == article


@pytest.mark.parametrize(
    ("written", "article"),
    [
        ("第二百九十二条", "292-1"),
        ("292-2", None),
        ("第303条", None),  # it has two
        ("第177条之一", "177.1-1"),
        ("第177条", None),
        ("第133条", None),
    ],
)
def test_an_article_is_its_only_paragraph_where_training_has_that_with_the_charge(
    written: str, article: str | None
) -> None:
    known = {label: label for label in ("292-1", "303-1", "303-2", "177.1-1", "133.1")}
    assert article_of(written, known, known) == article
    assert article_of(written, known, {"303-1"}) is None


@given(st.integers(1, 999), st.sampled_from(["", ".1", ".22"]), st.integers(0, 30))
def test_the_name_of_an_article_is_read_as_that_article(
    number: int, inserted: str, paragraph: int
) -> None:
    article = f"{number}{inserted}"
    if paragraph:
        article += f"-{paragraph}"
    assert article_of(article_name(article), {normal(article): article}, ()) == article


NAMES = {
    "104": "第一百零四条",
    "287.2": "第二百八十七条之二",
    "320-11": "第三百二十条第十一款",
    "0": "0",
    "刑法": "刑法",
}


def test_names_by_hand() -> None:
    assert {article: article_name(article) for article in NAMES} == NAMES
