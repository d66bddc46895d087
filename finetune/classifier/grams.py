"""The n-grams of many texts at once, as hashes, computed on arrays of characters without a loop.

A token is a Chinese character, a name or a number as one private-use character, or a word of
another script. The hash of a token is the CRC-32 of its bytes in UTF-8. The hash of two neighbors
is the CRC-32 of both with a space between. The position of an item in its list, such as `of 2`, is
added as further tokens without neighbors.

A name comes in as one character: `FIRST_NAME` plus its number in the case. It is hashed as `PERSON`
if the text is about it, else as `OTHER`, so that n-grams do not depend on who has which name.
"""

import math
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint32]

# Private-use characters:
PERSON = 0xE000  # the name that the text is about
OTHER = 0xE001  # any other name
FIRST_NAME = 0xE010  # the first name of a case; the others follow
FIRST_NUMBER = 0xF000  # the number 0; see `magnitude`

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?余?万?")

TOKEN = re.compile(rf"{NUMBER.pattern}|[^\W\d_\u4e00-\u9fff]+|[\u4e00-\u9fff\ue000-\uf8ff]")
"""A token in a text in lower case: a number, a word, or a character that is one."""

END = "\ud800"
"""Separates texts; no token contains it."""


class Text(NamedTuple):
    """A text; characters from `FIRST_NAME` on replace its names."""

    text: str
    names: int = 0  # how many characters are names
    own: int = -1  # the number of the name that the text is about, if any
    position: tuple[str, ...] = ()  # further tokens, without neighbors


@lru_cache(maxsize=100_000)
def magnitude(number: str) -> str:
    """Return the private-use character for the size of a number in a text: `3万` -> U+F017.

    A decade has three characters, so `30,000` and `31000` have the same one. Sizes up to
    about a thousandth are character 1, from about 10**29.5 character 99, and 0 has its own.
    """
    digits = number.rstrip("余万")  # `NUMBER` allows 3余, 3万 and 3余万
    value = float(digits.replace(",", ""))
    if number.endswith("万"):
        value *= 10_000
    if value <= 0:
        return chr(FIRST_NUMBER)
    thirds = round(3 * math.log10(min(value, 1e30)))  # -9 for 0.001
    return chr(FIRST_NUMBER + max(1, min(99, thirds + 10)))


def grams(texts: Sequence[Text]) -> list[Hashes]:
    """Return for each text the hashes of its tokens, of pairs of neighbors, and of its position.

    For example, let 甲偷3万元 be about 甲, and have `FIRST_NAME` in place of 甲. Its tokens are
    `PERSON`, 偷, U+F017 for 30,000, and 元. So it has four hashes of tokens, such as 0x27F5447C of
    偷, and then three of pairs, such as 0x1923942E of `PERSON`, a space and 偷.
    """
    joined = END.join(one.text.replace(END, " ") for one in texts)
    lowered = NUMBER.sub(lambda found: magnitude(found[0]), joined.lower())
    codes = np.frombuffer(lowered.encode("utf-32-le", "surrogatepass"), np.uint32).copy()
    ends = np.flatnonzero(codes == ord(END))  # of all texts but the last, [texts - 1]
    _mask_names(codes, ends, texts)

    is_letter = letters()[codes]  # [characters of all texts], as `codes`
    begins_word = is_letter.copy()
    begins_word[1:] &= ~is_letter[:-1]
    starts = np.flatnonzero(_is_character(codes) | begins_word)  # place of each token, [tokens]
    words = _words(lowered, starts, is_letter)
    tokens, pairs = _hashes_of_tokens(codes[starts], words)

    text_of = np.searchsorted(ends, starts)  # number of each token's text, [tokens]
    is_pair = text_of[:-1] == text_of[1:]  # whether both tokens are of one text, [tokens - 1]
    others = np.arange(1, len(texts))  # numbers of all texts but the first
    # `searchsorted` finds where each of them begins. A pair belongs to the text of its first token.
    tokens_of_texts = np.split(tokens, np.searchsorted(text_of, others))
    pairs_of_texts = np.split(pairs[is_pair], np.searchsorted(text_of[:-1][is_pair], others))
    result = []
    for one, its_tokens, its_pairs in zip(texts, tokens_of_texts, pairs_of_texts, strict=True):
        position = np.array([crc32(token.encode()) for token in one.position], np.uint32)
        result.append(np.concatenate([its_tokens, its_pairs, position]))
    return result


def _hashes_of_tokens(first_codes: Hashes, words: dict[int, bytes]) -> tuple[Hashes, Hashes]:
    """Return the hashes of tokens, [tokens], and of each with the next one, [tokens - 1].

    `first_codes` has the code point of the first character of each token. A token is only this
    character, or it is in `words`: number of the token -> bytes of the word.

    A space and a Chinese character, name or number have 1 + 3 bytes. So the hash of a pair is what
    the hash of its first token contributes (`_before_four_bytes`) XOR that of these four bytes.
    """
    alone, after_space = hashes_of_characters()
    # The tables end at 0xFFFF. Only words begin with higher codes; they get their hashes below.
    codes = np.minimum(first_codes, 0xFFFF)
    tokens = alone[codes]
    for number, word in words.items():
        tokens[number] = crc32(word)
    pairs = _before_four_bytes(tokens[:-1]) ^ after_space[codes[1:]]
    for number, word in words.items():
        if number:  # it is the second of a pair; a space and a word need not be four bytes
            pairs[number - 1] = crc32(b" " + word, int(tokens[number - 1]))
    return tokens, pairs


def token_places(text: str) -> list[tuple[int, int]]:
    """Return where each token of a text starts and ends, in the order of its hashes in `grams`."""
    spans = [found.span() for found in TOKEN.finditer(text.lower())]
    # In lower case, İ is two characters. For each of them, its place in the text:
    place_of = [place for place, one in enumerate(text) for _ in one.lower()]
    return [(place_of[start], place_of[end - 1] + 1) for start, end in spans]


def places_among(
    ascending: NDArray[Any], wanted: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the place of each wanted value among ascending ones, and whether it is there."""
    if not len(ascending):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    return places, ascending[places] == wanted


def _words(text: str, starts: NDArray[Any], is_letter: NDArray[np.bool_]) -> dict[int, bytes]:
    """Return the tokens that are words: index in `starts` -> bytes of the word."""
    ends_word = is_letter.copy()
    ends_word[:-1] &= ~is_letter[1:]
    ends = (np.flatnonzero(ends_word) + 1).tolist()  # [words]
    numbers = np.flatnonzero(is_letter[starts])  # [words]
    places = zip(numbers.tolist(), starts[numbers].tolist(), ends, strict=True)
    return {number: text[start:end].encode() for number, start, end in places}


def _mask_names(codes: Hashes, ends: NDArray[Any], texts: Sequence[Text]) -> None:
    """Replace each name in the code points of all texts by `PERSON` or `OTHER`, in place.

    `PERSON` is the name that the text is about. Characters above that of the text's last name are
    no names, but were in the case, and stay. `ends` has the places between the texts.
    """
    places = np.flatnonzero((codes >= FIRST_NAME) & (codes < FIRST_NUMBER))  # [candidates]
    numbers = codes[places].astype(np.int64) - FIRST_NAME
    text_of = np.searchsorted(ends, places)
    is_name = numbers < np.array([one.names for one in texts])[text_of]
    is_person = numbers == np.array([one.own for one in texts])[text_of]
    codes[places] = np.where(is_name, np.where(is_person, PERSON, OTHER), codes[places])


def _is_character(codes: Hashes) -> NDArray[np.bool_]:
    """Say which characters are tokens: Chinese ones, names and numbers."""
    is_chinese = (codes >= 0x4E00) & (codes <= 0x9FFF)
    return is_chinese | ((codes >= 0xE000) & (codes <= 0xF8FF))


@cache
def letters() -> NDArray[np.bool_]:
    """Return which code points are letters of words."""
    everything = np.arange(0x110000, dtype=np.uint32)
    text = everything.tobytes().decode("utf-32-le", "surrogatepass")
    result = np.zeros(len(everything), bool)
    for run in re.finditer(r"[^\W\d_]+", text):
        result[run.start() : run.end()] = True
    return result & ~_is_character(everything)


@cache
def hashes_of_characters() -> tuple[Hashes, Hashes]:
    """Return the hashes of characters that are tokens, alone and after a space, [code points]."""
    single = np.zeros(0x10000, np.uint32)
    after_space = np.zeros(0x10000, np.uint32)
    for code in np.flatnonzero(_is_character(np.arange(0x10000, dtype=np.uint32))).tolist():
        character = chr(code).encode()
        single[code] = crc32(character)
        after_space[code] = crc32(b" " + character)
    return single, after_space


@cache
def _table_for_four_more() -> Hashes:
    """Return a table to compute the checksum of a text with four more bytes, [4, 256].

    Only the checksum of the text is needed for it, and not the text. The table has what each byte
    of this checksum contributes, by its place (the lowest byte first) and value. The contributions
    of its four bytes are combined by XOR.
    """
    zeros = bytes(4)
    table = np.zeros((4, 256), np.uint32)
    for place in range(4):
        for byte in range(256):
            # crc32(zeros) is the effect of CRC's initial and final inversions alone.
            table[place, byte] = crc32(zeros, byte << 8 * place) ^ crc32(zeros)
    return table


def _before_four_bytes(checksums: Hashes) -> Hashes:
    """Return what the checksums of texts contribute to those of the texts with four more bytes.

    CRC is linear: `crc32(text + four) == _before_four_bytes(crc32(text)) ^ crc32(four)`. So the
    hash of two tokens follows from the hashes of each, if the second one and the space before it
    have four bytes.
    """
    table = _table_for_four_more()
    result: Hashes = table[0][checksums & 255]
    result ^= table[1][checksums >> 8 & 255]
    result ^= table[2][checksums >> 16 & 255]
    result ^= table[3][checksums >> 24]
    return result
