"""Find the articles that a text cites, and cut the citations out of the text.

A citation has several parts, which are found one by one: a law, articles, paragraphs (款), words
such as 依照. A bare article has no 第: 267条 in 第264条、267条.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from panjue.prompts.plumbing.decode import INVISIBLE
from panjue.prompts.plumbing.errors import NotSaid
from panjue.prompts.tasks.judgment.articles import WRITTEN_NUMBER, number
from panjue.prompts.tasks.judgment.charges import is_article


def cited_articles(text: str) -> list[str]:
    """Return the articles of the Criminal Law that a text cites, each once: 264, 303-2, 287.2.

    Raises:
        NotSaid: the text cites a range, or an article that is not in the law.
    """
    _, cited = without_citations(Plain.of(text).without(SPACES))
    return list(dict.fromkeys(article for _, article in cited))


@dataclass(frozen=True)
class Plain:
    """A text with plain characters, and for each of them its place in the original text."""

    text: str
    places: tuple[int, ...]
    given: str

    @classmethod
    def of(cls, given: str) -> "Plain":
        """Make full-width characters plain, and drop invisible ones: `２６４` -> `264`."""
        characters = []
        places = []
        for place, character in enumerate(given):
            flat = unicodedata.normalize("NFKC", character)
            if INVISIBLE.match(character):
                continue
            characters.append(flat if len(flat) == 1 else character)
            places.append(place)
        return cls("".join(characters), tuple(places), given)

    def without(self, pattern: re.Pattern[str]) -> "Plain":
        """Return the text without the matches of a pattern."""
        return self.without_spans([match.span() for match in pattern.finditer(self.text)])

    def without_spans(self, spans: Sequence[tuple[int, int]]) -> "Plain":
        """Return the text without the parts from each start to each end, which are in order."""
        characters = []
        places: list[int] = []
        end = 0
        for start, after in spans:
            characters.append(self.text[end:start])
            places += self.places[end:start]
            end = after
        characters.append(self.text[end:])
        places += self.places[end:]
        return Plain("".join(characters), tuple(places), self.given)

    def as_given(self, start: int, end: int) -> str:
        """Return a part of the plain text in its original characters."""
        return self.given[self.places[start] : self.places[end - 1] + 1]


SPACES = re.compile(r"(?<![A-Za-z])[^\S\n]+|[^\S\n]+(?![A-Za-z])")

ARTICLE = (
    rf"(?P<article>{WRITTEN_NUMBER})"
    rf"(?:条之(?P<inserted>{WRITTEN_NUMBER})|之(?P<inserted_before>{WRITTEN_NUMBER})条|条)"
    rf"(?:第(?P<paragraph>{WRITTEN_NUMBER})款)?"
)
CITATION = re.compile(
    r"《(?P<book>[^《》]{1,80})》"
    r"|(?P<law>(?:中华人民共和国)?(?:刑法典|刑法))(?!修正案|解释)"
    r"|(?P<other>[\u4e00-\u9fff]{2,24}?(?:(?<!刑)法|解释|规定|条例|意见|办法|决定|修正案)(?=第))"
    rf"|第{ARTICLE}|"
    + ARTICLE.replace("?P<", "?P<bare_")
    + rf"|第(?P<next_paragraph>{WRITTEN_NUMBER})款"
    rf"|(?P<item>第?{WRITTEN_NUMBER}项)"
    r"|(?P<words>根据|依照|依据|按照|适用|违反了?|触犯了?(?=第|《|刑法)|参照|该法|同法"
    r"|的?相关规定|之规定|的规定)"
)
"""Pattern of a part of a citation."""

JOINING = re.compile(r"[、,\s]*(?:和|与|及|以及|并)?[、,\s]*")
CRIMINAL_LAW = re.compile(r"(?:中华人民共和国)?刑法(?:典)?(?:\([^()]*\))?")
FIRST_OF_CRIMES = 102
"""Earlier articles are the general part and define no crime."""

Cited = list[tuple[int, str]]
"""The cited articles: place in the text without citations, article."""


def without_citations(plain: Plain) -> tuple[Plain, Cited]:
    """Cut the citations out of a text; return the rest, and the articles of the Criminal Law.

    What is between the parts of a citation stays, here 、: `依照《刑法》第264条、第67条第3款之规定,
    判处罚金` -> `、,判处罚金`, with 264 and 67-3.
    """
    cited: Cited = []
    spans = []
    is_criminal = True  # an article without the name of a law is of the Criminal Law
    article = ""  # the last one cited, to which a 第二款 that follows belongs
    end = 0  # end of the last part of a citation
    removed = 0  # characters cut out before it
    for token in CITATION.finditer(plain.text):
        between = plain.text[end : token.start()]
        continues = end > 0 and JOINING.fullmatch(between) is not None
        if token["bare_article"] and not continues:
            continue  # 三条 without 第 may be three cartons of cigarettes
        if token["next_paragraph"] and not (continues and article):
            continue  # only 第三款 of 第264条第二款、第三款 is the next paragraph of an article
        if between in ("至", "到") and article:
            raise NotSaid("a range of articles", plain.text[max(0, end - 8) : token.end()])
        law = token["book"] or token["law"] or token["other"]
        if law:
            is_criminal = CRIMINAL_LAW.fullmatch(law) is not None
            article = ""
        bare = "bare_" if token["bare_article"] else ""
        written = token[f"{bare}article"]
        if written:
            # the 一 of 第133条之一, or of 第133之一条
            inserted = token[f"{bare}inserted"] or token[f"{bare}inserted_before"]
            article = str(number(written)) + (f".{number(inserted)}" if inserted else "")
            if is_criminal and not is_article(article):
                raise NotSaid("an article that the Criminal Law does not have", token[0])
        if is_criminal and (written or token["next_paragraph"]):
            paragraph = token["next_paragraph"] or token[f"{bare}paragraph"]
            with_paragraph = f"{article}-{number(paragraph)}" if paragraph else article
            cited.append((token.start() - removed, with_paragraph))
        spans.append((token.start(), token.end()))
        removed += token.end() - token.start()
        end = token.end()
    return plain.without_spans(spans), cited


def articles_by_person(
    starts: Sequence[int], cited: Cited, *, is_one_crime: bool
) -> tuple[list[list[str]], tuple[str, ...]]:
    """Return the articles of each person, and articles that belong to nobody for certain.

    A citation belongs to the last person who is named before it, if everybody has one in this way,
    and no citation comes before all persons. Otherwise, the articles are cited for all together.
    Then the article of the crime is everybody's, if it is the only one and all are convicted of the
    same crime. Articles of the general part, such as 67-3 for a confession, are nobody's.

    `starts` has the place at which each person is named first, in order. `is_one_crime` says
    whether all are convicted of the same crime.
    """
    every = list(dict.fromkeys(article for _, article in cited))
    of_crimes = [
        article for article in every if int(re.split("[.-]", article)[0]) >= FIRST_OF_CRIMES
    ]
    if not of_crimes:
        raise NotSaid("no article of a crime is named")
    if len(starts) == 1:
        return [every], ()
    own: list[list[str]] = [[] for _ in starts]
    is_for_all = False
    for place, article in cited:
        named_before = bisect_right(starts, place)  # number of persons
        if not named_before:
            is_for_all = True
        elif article not in own[named_before - 1]:
            own[named_before - 1].append(article)
    if all(own) and not is_for_all:
        return own, ()
    if len(of_crimes) > 1 or not is_one_crime:
        raise NotSaid("articles of several persons together", "、".join(every))
    general = tuple(article for article in every if article not in of_crimes)
    return [of_crimes] * len(starts), general
