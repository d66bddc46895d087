"""Articles and charges as people write them: another spelling of one, or nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.plumbing.decode import normal, snap
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.articles import article_name, article_of, numeral

WIDE = str.maketrans("0123456789.-", "０１２３４５６７８９．－")


def parts(article: str) -> tuple[str, str, str]:
    """Return number, insertion and paragraph of an id: `177.1-1` is 177, 1, 1."""
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?(?:-(\d+))?", article)
    assert found, article
    return found[1], found[2] or "", found[3] or ""


def spelled(write: Callable[[int], str]) -> Callable[[str], str]:
    """Return what writes an article out in words with such numbers."""

    def of(article: str) -> str:
        base, inserted, paragraph = parts(article)
        text = f"第{write(int(base))}条" + (f"之{write(int(inserted))}" if inserted else "")
        return text + (f"第{write(int(paragraph))}款" if paragraph else "")

    return of


ARTICLES: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "full width": lambda a: a.translate(WIDE),
    "第…条": spelled(str),
    "Chinese numerals": spelled(numeral),
    "之 without 第": lambda a: spelled(str)(a).replace("第", ""),
    "《刑法》": lambda a: f"《中华人民共和国刑法》{spelled(numeral)(a)}",
    "刑法 and 规定": lambda a: f"根据刑法{spelled(str)(a)}之规定",
    "spaces": lambda a: " ".join(spelled(str)(a)),
    "brackets": lambda a: re.sub(r"(之\d+|第\d+款)", r"（\1）", spelled(str)(a)),
    "a full stop": lambda a: f"{spelled(numeral)(a)}的规定。",
    "quotes": lambda a: f"“{a}”",
}
CHARGES: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "without 罪": lambda c: c.removesuffix("罪"),
    "spaces": " ".join,
    "full-width spaces": lambda c: f"　{c}　",
    "without 、": lambda c: c.replace("、", ""),
    "with commas": lambda c: c.replace("、", "，"),
    "in quotes": lambda c: f"“{c}”",
    "plain brackets": lambda c: c.replace("（", "(").replace("）", ")"),
}


@pytest.fixture(scope="module")
def real(shared: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return normal form -> label of all charges and articles of the real training file."""
    task = load_task("judgment")
    labels = task.ask.labels(Reader(task).read(shared / "drdz/train.jsonl"))
    forms = labels.normal_forms
    assert (len(forms["charges"]), len(forms["articles"])) == (161, 159), "no two are one"
    return forms["charges"], forms["articles"]


@pytest.mark.parametrize("way", ARTICLES)
def test_every_real_article_is_itself_or_where_it_is_unknown_nothing(
    way: str, real: tuple[dict[str, str], dict[str, str]]
) -> None:
    _, known = real
    for form, article in known.items():
        written = ARTICLES[way](article)
        assert article_of(written, known, ()) == article, written
        others = {other: label for other, label in known.items() if other != form}
        hidden = article_of(written, others, ())
        # A paragraph of an article whose other paragraphs are no labels is the article; an article
        # of which one paragraph is a label is this one, where training has it with the charge.
        base = article.partition("-")[0]
        siblings = [label for label in others.values() if label.startswith(f"{base}-")]
        whole = base if "-" in article and base in others and not siblings else None
        only = siblings[0] if "-" not in article and len(siblings) == 1 else None
        assert hidden == whole, written
        assert article_of(written, others, siblings) == (whole or only), written


@pytest.mark.parametrize("way", CHARGES)
def test_every_real_charge_is_itself_or_where_it_is_unknown_nothing(
    way: str, real: tuple[dict[str, str], dict[str, str]]
) -> None:
    known, _ = real
    for form, charge in known.items():
        written = CHARGES[way](charge)
        assert snap(written, known) == charge, written
        others = {other: label for other, label in known.items() if other != form}
        assert snap(written, others) is None, written


KNOWN = {form: form for form in ("133", "133.1", "264", "287", "287.2", "303", "303-2")}


@pytest.mark.parametrize(
    ("written", "article"),
    [
        ("第133条之一", "133.1"),
        ("第一百三十三条之一", "133.1"),
        ("133条之1", "133.1"),
        ("第287条之二第一款", "287.2"),  # it has no paragraphs among the labels
        ("第287条之一", None),
        ("第二百六十四条", "264"),
        ("二六四", "264"),
        ("第264条第1款第2项", "264"),
        ("第303条第二款", "303-2"),
        ("第303条第1款", None),  # gambling is no running of a gambling house
        ("第303条第1款第2项", None),
        ("《刑事诉讼法》第264条", None),
        ("第264条和第287条", None),
        ("第133条（之一）", "133.1"),
        ("第一百三十三条(之一)", "133.1"),
        ("第133条（之一第一款）", "133.1"),
        ("第133条（危险驾驶罪，第133条之一）", None),
        ("第133条（交通肇事罪）", "133"),
        ("133(1)", None),
        ("133-1", None),  # it may be meant for 133.1
        ("一百四", None),
        ("二百六", None),
        ("三三百", None),
        ("百百百", None),
        ("第264条第1款第（二）项", "264"),
        ("2640", None),
        ("9" * 10_000, None),
        ("十" * 10_000, None),
        ("", None),
    ],
)
def test_articles_by_hand(written: str, article: str | None) -> None:
    assert article_of(written, KNOWN, ()) == article


def test_an_article_is_its_only_paragraph_where_training_has_that_with_the_charge() -> None:
    known = {label: label for label in ("292-1", "303-1", "303-2", "177.1-1", "133.1")}
    for written, article in {
        "第二百九十二条": "292-1", "292": "292-1", "292-2": None, "第303条": None,
        "第177条之一": "177.1-1", "第177条": None, "第133条": None,
    }.items():  # fmt: skip
        assert article_of(written, known, known) == article, written
        without = article if written == article else None
        assert article_of(written, known, {"303-1", "264"}) == without, written


@pytest.mark.parametrize(
    ("written", "article"),
    [
        ("第264款", None),
        ("第264项", None),
        ("第二百六十三款", None),
        ("26条4款", "26-4"),
        ("26第4款", "26-4"),
        ("26条4款2项", "26-4"),
    ],
)
def test_a_number_is_never_parted_between_article_and_paragraph(
    written: str, article: str | None
) -> None:
    known = {label: label for label in ("26", "26-4", "260", "264", "263")}
    assert article_of(written, known, ()) == article


@given(st.integers(1, 999), st.integers(0, 30), st.integers(0, 30))
def test_the_name_of_an_article_is_read_as_that_article(
    article: int, inserted: int, paragraph: int
) -> None:
    label = f"{article}{f'.{inserted}' * bool(inserted)}{f'-{paragraph}' * bool(paragraph)}"
    assert article_of(article_name(label), {normal(label): label}, ()) == label
