"""Read the JSON values of a text one by one, whatever is between them."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from panjue.prompts.plumbing.errors import NotSaid
from panjue.prompts.plumbing.rows import Faulty, object_or_faulty

CHUNK = 2**20
LONGEST_ROW = 2**28
"""Most characters of a row. A longer one is no row, but a text with a bracket that never closes."""

BETWEEN = re.compile(r"(?:[\s,\ufeff\x1e]+|//[^\n]*(?:\n|$))+")
"""Pattern of what may be between two values: white space, commas, byte order marks, comments."""

JSONP = re.compile(
    r"[\s\ufeff]*(?:/\*.*?\*/\s*)?"
    r"(?:(?:export\s+default|(?:var|let|const)\s+[\w$]+\s*=|[\w$.]+(?:\[['\"]?\w+['\"]?\])?\s*=)\s*"
    r"|[\w$.]+\s*\(\s*)(?=[\[{])",
    re.DOTALL,
)
"""Pattern of JavaScript around JSON: `var data = [...]`, `callback([...])`."""

DECODER = json.JSONDecoder(object_pairs_hook=object_or_faulty)
NEAR_END = 16
"""If a value continues in the next chunk, its error is in this number of last characters of the
buffer: `tru`, `"\\u4e`."""


def json_values(read: Callable[[int], str]) -> Iterator[tuple[int | str, Any]]:
    """Yield (place, value) for each row of a text of JSON; in place of an invalid row, `NotSaid`.

    The place is the line. In a list, which may be on one line, it is the number of the row.

    A row is a value at the top of the text, or an item of a list at the top. So the text may have
    lines, an object over several lines, a list, several lists, or joined files. A list of plain
    values such as `[1, 2]` is one row, and no list of rows. Memory holds only the row that is read.
    """
    text = _Text(read)
    if prefix := JSONP.match(text.buffer):
        text.skip_to(prefix.end())
    depth = 0  # number of lists around the row
    number = 0
    while text.skip(BETWEEN):
        sign = text.buffer[text.place]
        if sign == "[" and not LIST_OF_VALUES.match(text.buffer, text.place):
            depth += 1
            text.skip_to(text.place + 1)
        elif sign == "]" and depth:
            depth -= 1
            text.skip_to(text.place + 1)
        elif sign in ");" and not depth:
            text.skip_to(text.place + 1)
        else:
            number += 1
            yield f"row {number}" if depth else text.line, _value(text, in_list=depth > 0)


LIST_OF_VALUES = re.compile(r'\[\s*(?:-?[0-9"tfn])')
"""Pattern of the beginning of a list without rows."""


class _Text:
    """A text of which only a part is in memory."""

    def __init__(self, read: Callable[[int], str]) -> None:
        """Read the first chunk."""
        self._read = read
        self.buffer = ""
        self.place = 0  # position of the next character in the buffer
        self.line = 1  # line of that character
        self._dropped = 0  # number of characters of that line before the buffer
        self.is_whole = False
        self.more(CHUNK)

    def more(self, size: int) -> None:
        """Read more, and drop the part before the position."""
        chunk = self._read(size)
        self.is_whole = not chunk
        self._dropped = self.column
        self.buffer = self.buffer[self.place :] + chunk
        self.place = 0

    @property
    def column(self) -> int:
        """Return how many characters of its line are before the position."""
        start = self.buffer.rfind("\n", 0, self.place) + 1  # 0: the line begins before the buffer
        return self.place - start if start else self._dropped + self.place

    def skip_to(self, place: int) -> None:
        self.line += self.buffer.count("\n", self.place, place)
        self.place = place

    def skip(self, pattern: re.Pattern[str]) -> bool:
        """Skip a match of the pattern here; say whether more text follows."""
        while True:
            found = pattern.match(self.buffer, self.place)
            end = found.end() if found else self.place
            # A match up to the end of the buffer may continue in the next chunk. So may the comment
            # that a `/` there begins: `//` is in the pattern, `/` alone is not.
            if end < len(self.buffer) - 1 or self.is_whole:
                self.skip_to(end)
                return end < len(self.buffer)
            self.more(CHUNK)

    def skip_line(self) -> str:
        """Skip the rest of a line, and return it."""
        while True:
            end = self.buffer.find("\n", self.place)
            if end >= 0 or self.is_whole:
                break
            self.more(CHUNK)
        end = len(self.buffer) if end < 0 else end + 1
        line = self.buffer[self.place : end]
        self.skip_to(end)
        return line


def _value(text: _Text, *, in_list: bool) -> Any:
    """Return the value that begins here; if it is invalid, skip its lines and return the reason."""
    size = CHUNK
    while True:
        try:
            value, end = DECODER.raw_decode(text.buffer, text.place)
        except RecursionError:
            problem = "it is nested too deeply"
        except json.JSONDecodeError as error:
            # The value may be valid, but continue in the next chunk. If the buffer ends within a
            # string, the error says so, and is at the string's start. If it ends within a word
            # (`tru`) or an escape, the error is near the end of the buffer.
            is_open = error.msg.startswith("Unterminated string")
            may_be_cut = is_open or error.pos > len(text.buffer) - NEAR_END
            is_short = len(text.buffer) - text.place < LONGEST_ROW
            if may_be_cut and is_short and not text.is_whole:
                text.more(size)
                size *= 2  # so that a long row is parsed a few times, not once for each chunk
                continue
            problem = error.msg
        else:
            if end == len(text.buffer) and not text.is_whole:  # more digits may follow
                text.more(size)
                continue
            text.skip_to(end)
            # `Faulty`: the decoder's mark for an object with a key twice
            return NotSaid("not JSON", value.reason) if isinstance(value, Faulty) else value
        return _skip_invalid(text, problem, in_list=in_list)


def _skip_invalid(text: _Text, problem: str, *, in_list: bool) -> Any:
    """Skip a row that is no JSON, and return the reason.

    Skip its line, and the following lines that are empty, or begin with more indentation or a
    closing bracket: all three of `{"a": bad,`, `  "b": 1`, `}`. Stop at the `]` of the rows' list.

    If the row is a dictionary of Python, skip its line and return the value: `{'fact': '…'}`, or
    `{"it's": None}`, where Python writes double quotes.
    """
    indent = text.column
    line = text.skip_line()
    if line.startswith(("{'", '{"')):
        try:
            value = ast.literal_eval(line.strip().rstrip(","))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
    while text.place < len(text.buffer) or not text.is_whole:
        start = LINE_START.match(text.buffer, text.place)
        assert start is not None
        if start.end() == len(text.buffer) and not text.is_whole:  # more indentation may follow
            text.more(CHUNK)
            continue
        # A `]` that is indented no more than the row ends the list of rows, not a list in the row.
        is_end_of_list = in_list and start["sign"] == "]" and len(start["indent"]) <= indent
        is_inside = len(start["indent"]) > indent or start["sign"] in CLOSING
        if is_end_of_list or not is_inside:
            break
        text.skip_line()
    rest = ", with the rest of its line" if in_list else ""  # further rows may be on this line
    return NotSaid(f"not JSON{rest}", f"{problem}: {line.strip()}")


LINE_START = re.compile(r"(?P<indent>[ \t]*)(?P<sign>.?)", re.DOTALL)
CLOSING = ("}", "]", ")", "\n", "\r", "")
