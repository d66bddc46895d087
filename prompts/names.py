"""Where a text names its persons: not within a longer name, and not within a word."""

import re
from collections.abc import Sequence
from typing import NamedTuple

STEMS = "甲乙丙丁戊己庚辛壬癸"
"""The Heavenly Stems, names of persons whose own names are withheld. In words, too, they count."""

SUBSTANCE = (
    f"(?:环|异|二)?[{STEMS}][二三四]?"
    "(?:基(?![于本])|[苯醇醚醛酮酸酯烷烯炔胺腈酰酐肼酚氧硫硝氨氯溴氟碘嘧喹哌嗪])"
)
"""The number of carbon atoms, and a group of atoms: 甲基苯丙胺, 乙醚, 丙二醇."""

WORDS = """
    甲方 乙方 丙方 己方 甲级 乙级 甲型 乙型 丙型 甲类 乙类 丙类 甲肝 乙肝 丙肝 甲流 乙脑
    甲卡西酮 丙泊酚 丁丙诺啡 戊巴比妥 二甲双胍 甲状腺 甲骨文 甲壳 甲板 甲鱼 甲虫 甲沟炎
    指甲 趾甲 装甲 马甲 铠甲 盔甲 美甲 花甲 穿山甲 龟甲
    丁字 丁香 园丁 壮丁 自己 知己 异己 己见 己有 辛苦 艰辛 辛辣 辛勤
""".split()  # noqa: SIM905  # one word a line would be too long
"""Other words. On 62,000 places of real names, each changed to a stem, 78 are lost, and of 8,400
stems in words and other names 430 are left."""

WITH_STEM = re.compile(f"{SUBSTANCE}|{'|'.join(WORDS)}|某[{STEMS}]|[{STEMS}]某")
"""What has a stem that names nobody; 甲某 and 王某甲 are other persons than 甲."""

TAKEN = "\ud800"
"""Stands for each character that is part of a word or of a longer name; no text has it."""


LATIN_PAIR = re.compile("[A-Za-z0-9]{2}")


class Place(NamedTuple):
    """A place where a text names a person."""

    start: int
    end: int
    number: int  # the index of the name


def name_places(text: str, names: Sequence[str]) -> list[Place]:
    """Return the places of names in a text, in order. 张某甲 does not name 张某."""
    has_stems = not set(STEMS).isdisjoint(names)
    places = []
    for number in sorted(range(len(names)), key=lambda number: -len(names[number])):
        name = names[number]
        if not name:
            continue
        if has_stems and len(name) == 1:  # after the longer names: 丁某 may be one
            text = WITH_STEM.sub(_taken, text)
            has_stems = False
        start = text.find(name)
        while start >= 0:
            end = start + len(name)
            if not (name.isascii() and _within_word(text, start, end)):
                places.append(Place(start, end, number))
            start = text.find(name, end)
        text = text.replace(name, TAKEN * len(name))
    return sorted(places)


def _taken(found: re.Match[str]) -> str:
    return TAKEN * len(found[0])


def _within_word(text: str, start: int, end: int) -> bool:
    """Say whether a word of Latin letters or a number crosses an end: A is not named in ATM."""
    ends = (text[start - 1 : start + 1], text[end - 1 : end + 1])
    return any(map(LATIN_PAIR.fullmatch, ends))


def split_at_names(text: str, names: Sequence[str]) -> list[tuple[str, int | None]]:
    """Split a text into (piece, index of the name that it is, or None); no piece is empty."""
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
