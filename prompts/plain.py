"""The plain text of a case: what a person reads, without what a page or a file adds.

Names, sentences and clauses are found in the plain text (`names.py`). Every place in it has a place
in the original text of the case, which prompts show.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape
from html.entities import html5

ENDS = "。！？；!?;"
"""Characters that always end a sentence."""

CLOSERS = "”’」』）)"
"""Characters that belong to the sentence that ends before them."""


@dataclass(frozen=True)
class Edit:
    """The place of a replaced part in the new text, and in the old text; either may be empty."""

    start: int
    end: int
    old_start: int
    old_end: int


@dataclass(frozen=True)
class Rewritten:
    """A text with some parts replaced, and the places of these parts."""

    text: str
    edits: tuple[Edit, ...] = ()  # the edits, in order

    def old_start(self, place: int) -> int:
        """Return where the character that begins at `place` of the new text begins in the old one.

        If `甲&amp;乙` became `甲&乙`: 1 -> 1, and 2 -> 6.
        """
        number = bisect_right(self.edits, place, key=lambda edit: edit.end)
        if number < len(self.edits) and self.edits[number].start <= place:
            return self.edits[number].old_start
        if number == 0:
            return place
        last = self.edits[number - 1]  # that ends before `place`
        return place - last.end + last.old_end

    def old_end(self, place: int) -> int:
        """Return where the character that ends at `place` of the new text ends in the old one.

        If `甲&amp;乙` became `甲&乙`: 1 -> 1, and 2 -> 6. 0 stays 0.
        """
        if place == 0:
            return 0
        number = bisect_right(self.edits, place - 1, key=lambda edit: edit.end)
        if number < len(self.edits) and self.edits[number].start < place:
            return self.edits[number].old_end
        return self.old_start(place - 1) + 1


def rewrite(
    text: str, pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str]
) -> Rewritten:
    """Replace the matches of a pattern, and remember their places."""
    pieces = []
    edits = []
    old_end = 0
    length = 0
    for found in pattern.finditer(text):
        new = replacement(found)
        if new == found[0]:
            continue
        pieces += [text[old_end : found.start()], new]
        length += found.start() - old_end
        edits.append(Edit(length, length + len(new), *found.span()))
        length += len(new)
        old_end = found.end()
    if not edits:
        return Rewritten(text)
    return Rewritten("".join([*pieces, text[old_end:]]), tuple(edits))


LINE_ENDS = r"\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029"

BREAK = rf"(?:\r\n|[{LINE_ENDS}])"

BLANK = rf"[^\S{LINE_ENDS}]"
"""Pattern of white space within a line."""

ENTITY = r"[&＆](?:amp[;；])*(?:[^\W_]{2,8}|[#＃][^\W_]{1,7})[;；]"
"""Pattern of an HTML entity, also escaped twice or full-width: `&times;`, `&amp;#215;`."""

BREAK_OR_AMPERSAND = re.compile(f"[&＆{LINE_ENDS}]")
"""Pattern of anything that makes a text differ from its plain text."""

BREAKS_OR_ENTITY = re.compile(rf"(?<!{BLANK})(?:{BLANK}*+{BREAK})+{BLANK}*+|{ENTITY}")
"""Matches white space with breaks only from its start; else 40,000 spaces take six seconds."""

LINE_NUMBER = rf"{BLANK}*+(?P<number>\d{{1,5}})(?:[:：|]|(?=\s|$)){BLANK}*+"

NUMBER_BREAKS_OR_ENTITY = re.compile(
    rf"\A{LINE_NUMBER}|{ENTITY}"
    rf"|(?<!{BLANK})(?:{BLANK}*+{BREAK}(?:{LINE_NUMBER.replace('P<number>', ':')})?)+{BLANK}*+"
)

BREAKS = re.compile(BREAK)

AFTER_END = re.compile(rf"(?:[{ENDS}]|(?P<digit>\d)?\.)[{CLOSERS}]*$")
"""Pattern of the end of a sentence, after which a line breaks: `。`, `！”`, or `3.` of `3.\\n5`."""

ITEM = re.compile(
    r"[一二三四五六七八九十]{1,3}、(?![一二三四五六七八九十])|\d{1,3}[、.．](?!\d)"
    r"|[(（][一二三四五六七八九十\d]{1,2}[)）]|\[\d{1,4}\]|[①-⑳•●*-]\s*+(?=\D)"
)
"""Pattern of the number of a list item. A line that begins with it does not continue a sentence."""

CHINESE = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


def plain_text(text: str) -> Rewritten:
    """Return a text with its lines joined, without line numbers, and with characters for entities.

    A single line break within a sentence (see `_joins_lines`) is removed, or becomes a space if the
    text has no Chinese character. Other breaks stay: those after the end of a sentence, before a
    blank line, before an item of a list, at the start or end of the text, and all breaks of a text
    in which nothing else ends sentences. Line numbers are removed if every line has one and each is
    one more than the last; a page may begin at 1 again.
    """
    if not BREAK_OR_AMPERSAND.search(text):  # nearly all texts
        return Rewritten(text)
    has_sentences = any(end in text for end in (*ENDS, "."))
    is_chinese = bool(CHINESE.search(text))
    has_numbers = _has_line_numbers(text)

    def replacement(found: re.Match[str]) -> str:
        replaced = found[0]  # an entity, or breaks with the white space and line number around them
        if replaced[0] in "&＆":
            return _character(replaced)
        n_breaks = len(BREAKS.findall(replaced))
        if not n_breaks:  # the first line's number
            return ""
        start, end = found.span()
        is_inside = start > 0 and end < len(text)
        is_single = n_breaks == 1 and is_inside and not ITEM.match(text, end)
        if has_sentences and is_single and _joins_lines(text, start, end, is_chinese=is_chinese):
            return "" if is_chinese else " "
        return "\n" if has_numbers else BREAKS.sub("\n", replaced)

    return rewrite(text, NUMBER_BREAKS_OR_ENTITY if has_numbers else BREAKS_OR_ENTITY, replacement)


def _joins_lines(text: str, start: int, end: int, *, is_chinese: bool) -> bool:
    """Say whether the line break `text[start:end]` is within a sentence, so that it is removed.

    In a Chinese text, a break is also removed within a number (`1.` and `5万元` on two lines), and
    after a sentence that ends with a quote or bracket: `shorten.SENTENCE` would take a break after
    `。”` for a sentence of its own.
    """
    ended = AFTER_END.search(text, max(0, start - 5), start)  # 5: a stop and its closers
    if not ended:
        return True
    if not is_chinese:
        return False
    is_in_number = ended["digit"] and text[end].isdecimal()
    return bool(is_in_number) or ended[0][-1] in CLOSERS


def _character(entity: str) -> str:
    """Return the character of an `ENTITY`: `&amp;#215;` -> `×`; an unknown one stays."""
    half_width = unicodedata.normalize("NFKC", entity)  # ＆ｔｉｍｅｓ； -> &times;
    escaped_once = re.sub("&(?:amp;)+(?=.)", "&", half_width)  # `&amp;` itself stays
    if escaped_once[1] == "#":
        return unescape(escaped_once)
    # `unescape` would also replace the beginning of an unknown entity: `&notes;` -> `¬es;`.
    return html5.get(escaped_once[1:], entity)


def _has_line_numbers(text: str) -> bool:
    """Say whether every line begins with a number, one more than the last or 1 for a new page."""
    last = 0
    n_lines = 0
    for line in BREAKS.split(text):
        if not line.strip():
            continue
        found = re.match(LINE_NUMBER, line)
        if not found:
            return False
        number = int(found["number"])
        if n_lines and number not in (last + 1, 1):
            return False
        last = number
        n_lines += 1
    return n_lines > 1
