"""What a terminal gets to read: ids and names of a file are shown, and never acted on."""

from unicodedata import category

from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.plumbing.errors import printable


@given(st.text())
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    line = printable(text)
    assert not [one for one in line if category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert line.isprintable() or any(category(one) in ("Zs", "Co", "Cn") for one in line)


def test_what_people_read_stays_as_it_is() -> None:
    text = "被告人张某A,\u3000盗窃 3,000 元 “…” 😀"
    assert printable(text) == text
    assert printable("\x1b[2J\x9b31m甲\u202e") == r"\x1b[2J\x9b31m甲\u202e"
