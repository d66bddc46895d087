"""Find the places where a text names its persons, but not within longer names or words."""

import re
import unicodedata
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from panjue.prompts.example import Example
from panjue.prompts.plain import Rewritten, plain_text, rewrite

STEMS = "甲乙丙丁戊己庚辛壬癸"
"""The Heavenly Stems. They name persons whose own names are withheld, but also occur in words."""

SUBSTANCE = (
    f"(?:环|异|二)?[{STEMS}][二三四]?"
    "(?:基(?![于本])|[苯醇醚醛酮酸酯烷烯炔胺腈酰酐肼酚氧硫硝氨氯溴氟碘嘧喹哌嗪])"
)
"""Pattern of chemical names: a number of carbon atoms and a group: 甲基苯丙胺, 乙醚, 丙二醇."""

WORDS = """
    甲方 乙方 丙方 己方 甲级 乙级 甲型 乙型 丙型 甲类 乙类 丙类 甲肝 乙肝 丙肝 甲流 乙脑
    甲卡西酮 丙泊酚 丁丙诺啡 戊巴比妥 二甲双胍 甲状腺 甲骨文 甲壳 甲板 甲鱼 甲虫 甲沟炎
    指甲 趾甲 装甲 马甲 铠甲 盔甲 美甲 花甲 穿山甲 龟甲
    丁字 丁香 园丁 壮丁 自己 红颜知己 知己知彼 异己 [执抒]己见 (?<![认以])为己[有用]
    辛苦 艰辛 辛辣 辛勤
""".split()  # noqa: SIM905  # one word a line would be too long
"""Other words with stems, as patterns. In a test on 434,000 places of real names, each replaced by
every stem, 34 places were lost. Of 4,055 stems in words and other names, 151 were still taken for
names."""

AFTER_STEM = """
    类似 类推 类比 类同 方才 级别 型号 板凳 板砖 字迹 字据 字条 香烟 香港 香肠 香蕉 香皂
    肝脏 肝区 肝部 肝叶 肝破裂 肝挫 肝损 流血 流产 流窜 流氓 流出 流下 流入 流动 流泪 流露
    脑部 脑袋 脑震荡 脑出血 脑外伤 脑挫 脑损 脑内 脑后
    酸奶 酸菜 酸痛 酸楚 氧气 硫酸 硫磺 硝铵 硝酸 硝烟 氨水 氨气 氯胺酮 碘酒 碘伏
""".split()  # noqa: SIM905  # one word a line would be too long
"""Words that begin like the end of such a word or substance: in 甲类似 and 丁酸奶, the stem is a
name."""

WITH_STEM = re.compile(
    f"(?![{STEMS}](?:{'|'.join(AFTER_STEM)}))"
    f"(?:{SUBSTANCE}|{'|'.join(WORDS)}|某[{STEMS}]|[{STEMS}]某)"
)
"""Pattern of text with a stem that does not name 甲; 甲某 and 王某甲 are other persons."""

TAKEN = "\ud800"
"""Replaces each character of a word or of a longer name; no text contains it."""


LATIN_PAIR = re.compile("[A-Za-z0-9]{2}")

MIDDLE_DOTS = "·•‧・･∙⋅●"

OTHER_FORMS = dict.fromkeys(map(ord, MIDDLE_DOTS), ".") | {ord("("): "（", ord(")"): "）"}
"""Code point -> the character that replaces it in `folded`: dots between names, brackets,
full-width letters and digits, Chinese characters that Unicode has twice. Punctuation that every
text has is not in it."""
for _code in (*range(0xFF01, 0xFF5F), *range(0x2F00, 0x2FD6), *range(0xF900, 0xFB00)):
    _form = unicodedata.normalize("NFKC", chr(_code))
    if chr(_code) not in "！（），：；？" and len(_form) == 1:
        OTHER_FORMS[_code] = _form

OTHER_FORM = re.compile(f"[{re.escape(''.join(map(chr, OTHER_FORMS)))}]")

LETTER = "[0-9A-Za-zÀ-ÖØ-öø-\u1fff]"
"""A digit, or a letter of a script that has spaces between words."""

ACCENTS = "[\u0300-\u036f\u3099\u309a]"

ACCENT = re.compile(ACCENTS)

SPACE = r"[\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"

SPACES = re.compile(SPACE)
"""Pattern of the white space of `\\s`; it takes a fifth of the time."""

SPACES_AND_ACCENTS = re.compile(rf"{SPACE}|\w{ACCENTS}+")
"""Pattern of white space, or of a letter with separate accents."""

TWO_LETTERS = re.compile(f"{LETTER}{{2}}")

ROLE = (
    "(?:原审|一审|二审|再审|同案|未成年|附带民事诉讼)*"
    "(?:被告(?:人|单位)?|上诉人|上诉单位|申诉人|罪犯)"
)

ROLES = re.compile(
    rf"(?>(?:(?:{ROLE}|犯罪嫌疑人|被上诉人|被申诉人)(?:（[^（）]*{ROLE}[^（）]*）)?[:：、]?)+)(?=.)"
)
"""Pattern of what a judgment writes before a name: 上诉人（原审被告人）."""

ALIAS = (
    "(?:绰号|外号|诨名|又名|又称|亦名|曾用名|曾名|原名|本名|真名|化名|别名|别称|小名|乳名|自报|自称|"
    "网名|昵称|微信名|艺名|人称|英文名|中文名|译名|音译)"
)

IN_BRACKETS = "[（\\[【〔](?P<aside>[^（）\\[\\]【】〔〕]*)[）\\]】〕]"

ASIDE = re.compile(rf"(?<=.)(?:{IN_BRACKETS}|[，,、；;（]?{ALIAS}.*)$")
"""Pattern of what follows a name in a list: （绰号“三哥”）, （女）, or 又名李某."""

TELLS_APART = re.compile("[^男女]|[0-9A-Za-z]{1,3}")
"""Pattern of an aside that may be part of a name: 张某（甲）."""


class Place(NamedTuple):
    """A place where a text names a person."""

    start: int
    end: int
    number: int  # index of the name


@lru_cache(maxsize=100_000)
def name_key(name: str) -> str:
    """Return the common form of all spellings of a name, without roles and asides.

    `被告人 张 某（女）` -> `张某`. An aside that tells two persons apart stays: `张某（甲）`.
    """
    key = folded(plain_text(name).text.strip()).text
    roles = ROLES.match(key)
    key = key[roles.end() :] if roles else key
    while aside := ASIDE.search(key):
        in_brackets = aside["aside"] or ""
        if TELLS_APART.fullmatch(in_brackets):
            break
        key = key[: aside.start()]
    return key


def folded(text: str, characters: Container[str] | None = None) -> Rewritten:
    """Return a text in which every name has one form, whatever its white space, width and dots.

    `characters` are those of the names that are searched for. White space beside any other
    character is in no name and stays. None: the text is itself a name.
    """
    text = OTHER_FORM.sub(lambda found: OTHER_FORMS[ord(found[0])], text)  # of the same length

    def replacement(found: re.Match[str]) -> str:
        if not found[0].isspace():  # a letter with its accents
            return unicodedata.normalize("NFC", found[0])
        start, end = found.span()
        if start == 0 or end == len(text):
            return found[0]
        before, after = text[start - 1], text[end]
        if characters is not None and (before not in characters or after not in characters):
            return found[0]
        return _folded_space(text, start, end)

    return rewrite(text, SPACES_AND_ACCENTS if ACCENT.search(text) else SPACES, replacement)


def _folded_space(text: str, start: int, end: int) -> str:
    """Return what the white space `text[start:end]` becomes: a space between words, else nothing.

    `张 某` -> `张某`; `A B` -> `AB`, initials; `John Smith` and `J Smith` stay. U+3000 separates no
    words, since it pads Chinese names. The white space must not begin or end `text`. TWO_LETTERS
    matches two digits or letters of a script with spaces, such as Latin.
    """
    is_padding = "\u3000" in text[start:end]
    if is_padding or not TWO_LETTERS.match(text[start - 1] + text[end]):
        return ""
    ends_word = TWO_LETTERS.match(text, max(0, start - 2))  # John before it, and not the initial A
    begins_word = TWO_LETTERS.match(text, end)  # Smith after it
    return " " if ends_word or begins_word else ""


def name_places(text: str, names: Sequence[str]) -> list[Place]:
    """Return the places of names in a text, in order. 张某甲 does not name 张某.

    A name has the places of all its spellings. If several names have the same key, the first one
    has the places.
    """
    if not names:
        return []
    plain = plain_text(text)
    places = []
    for start, end, number in places_in_plain(plain.text, names):
        places.append(Place(plain.old_start(start), plain.old_end(end), number))
    return places


def places_in_plain(plain: str, names: Sequence[str]) -> list[Place]:
    """Do what `name_places` does, for a text that is already plain text.

    The longest names are searched for first. Each place is then blanked, so that 张某 is not found
    within 张某甲. A name may be a single one of the `STEMS`, such as 甲, which also stand in words.
    So before names of one character, words such as 甲基 and other names such as 甲某 are blanked.
    """
    keys = list(map(name_key, names))
    in_plain = folded(plain, set("".join(keys)))
    text = in_plain.text
    keys = [key_in_text(text, key) for key in keys]  # 张某（甲） -> 张某, if the text has only that
    has_stems = not set(STEMS).isdisjoint(keys)
    places = []
    for number in sorted(range(len(keys)), key=lambda number: -len(keys[number])):
        key = keys[number]
        if not key:
            continue
        if len(key) == 1 and has_stems:  # once, before the first single character
            # If 甲某 is itself one of the names, it is longer and was found before.
            text = WITH_STEM.sub(lambda found: TAKEN * len(found[0]), text)
            has_stems = False
        found = text.find(key)
        while found >= 0:
            end_found = found + len(key)
            start = in_plain.old_start(found)
            end = in_plain.old_end(end_found)
            if not (key.isascii() and _within_word(plain, start, end)):
                places.append(Place(start, end, number))
            found = text.find(key, end_found)
        text = text.replace(key, TAKEN * len(key))
    return sorted(places)


def key_in_text(text: str, key: str) -> str:
    """Return what to search for: `张某（甲）`, or `张某` if only that can be in the text."""
    aside = ASIDE.search(key)
    return key[: aside.start()] if aside and key not in text else key


def _within_word(text: str, start: int, end: int) -> bool:
    """Say whether a Latin word or a number continues beyond a match: ATM does not name A."""
    around_start = text[max(0, start - 1) : start + 1]
    around_end = text[end - 1 : end + 1]
    return bool(LATIN_PAIR.fullmatch(around_start) or LATIN_PAIR.fullmatch(around_end))


def split_at_names(text: str, names: Sequence[str]) -> list[tuple[str, int | None]]:
    """Split a text into (piece, index of the name or None); no piece is empty."""
    pieces: list[tuple[str, int | None]] = []
    end_of_last = 0
    for start, end, number in name_places(text, names):
        if start > end_of_last:
            pieces.append((text[end_of_last:start], None))
        pieces.append((text[start:end], number))
        end_of_last = end
    if end_of_last < len(text):
        pieces.append((text[end_of_last:], None))
    return pieces


def names_not_in(text: str, names: Sequence[str]) -> list[str]:
    """Return the names that a text does not contain."""
    together = "\n".join(names)
    # Nearly always each name is in the text, in none of the other names, and cannot be a part of a
    # word, as 甲 of 甲基 or the ASCII name A of ATM can. Then no places have to be found, which
    # takes ten times as long.
    if all(
        len(name) > 1 and not name.isascii() and name in text and together.count(name) == 1
        for name in names
    ):
        return []
    found = {name_key(names[place.number]) for place in name_places(text, names)}
    return [name for name in names if name_key(name) not in found]


@dataclass
class NameCount:
    """Counts names that the texts of examples do not contain."""

    names: int = 0
    missing: int = 0
    first: str = ""

    def add(self, example: Example) -> None:
        """Count the names of an example, and those that its text lacks."""
        missing = names_not_in(example.text, example.names)
        if missing and not self.missing:
            self.first = f"id {example.id}, {missing[0]}"
        self.names += len(example.names)
        self.missing += len(missing)

    def of(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Yield the examples, and count their names."""
        for example in examples:
            self.add(example)
            yield example

    def lines(self) -> Iterator[str]:
        """Yield a line if there are such names."""
        if self.missing:
            count = f"{self.missing} of {self.names} names"
            do = "does" if self.missing == 1 else "do"
            yield f"{count} {do} not occur in their facts, first: {self.first}"
