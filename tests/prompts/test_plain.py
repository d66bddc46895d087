"""Lines, line numbers and entities are no part of names, sentences and clauses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.finetune.classifier.features import marked
from panjue.prompts.example import Example
from panjue.prompts.names import name_places
from panjue.prompts.plain import plain_text
from panjue.prompts.shorten import shorten, split_sentences
from panjue.prompts.task import load_task

CASES = Path(__file__).parents[3] / "shared/cases/01_lines_that_break_names"

NAMES = ("林某2", "许某丙", "古力克孜·某")
TEXT = (
    "经审理查明：2010年11月17日，被告人林某2、许某丙共同持刀抢劫，价值1665352.5元，数额特别巨大。"
    "古力克孜·某（另案处理）称：“我没去。”后林某2系主犯；许某丙系从犯，系自首！"
)


def lines(text: str, width: int) -> list[str]:
    return [text[start : start + width] for start in range(0, len(text), width)]


def numbered(width: int, page: int) -> str:
    written = enumerate(lines(TEXT, width))
    return "\n".join(f"  {number % page + 1:>2}  {line}" for number, line in written)


WRITTEN: dict[str, Callable[[int], str]] = {
    "lines": lambda width: "\n".join(lines(TEXT, width)),
    "lines of Windows, indented": lambda width: "\r\n    ".join(lines(TEXT, width)),
    "line numbers": lambda width: numbered(width, 999),
    "pages": lambda width: numbered(width, 3),
}


def bare(text: str) -> str:
    """Return a text without the breaks that stay at ends of sentences, nor closing quotes there."""
    return "".join(text.split()).replace("”", "")


def bare_case(example: Example) -> tuple[object, ...]:
    case = marked(example, len(example.names))
    return bare(case.text), case.persons, [bare(own) for own in case.own]


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("width", range(6, 40))
def test_lines_change_nothing_but_the_text_itself(how: str, width: int) -> None:
    text = WRITTEN[how](width)
    example = Example(id=1, text=text, names=NAMES)
    assert bare(plain_text(text).text) == bare(TEXT)
    assert bare_case(example) == bare_case(Example(id=1, text=TEXT, names=NAMES))
    sentences = split_sentences(text, None, NAMES)
    assert "".join(sentences) == text
    assert len(sentences) == len(split_sentences(TEXT, None, NAMES)) == 4
    found = name_places(text, NAMES)
    assert [place.number for place in found] == [p.number for p in name_places(TEXT, NAMES)]
    for start, end, number in found:
        assert text[start] == NAMES[number][0]
        assert text[end - 1] == NAMES[number][-1]
    read = load_task("judgment").data.read({"id": 1, "fact": text, "defendants": [*NAMES]})
    assert text in load_task("judgment").ask.prompt(read)[0]["content"]


def test_what_a_page_shows_of_a_name_goes_with_it_when_a_case_is_shortened() -> None:
    filling = "证人证实，当日其在场，未见异常情况，随后离开。" * 40
    text = f"被告人林某2抢劫。{filling}林某\n2系主犯。{filling}"
    example = Example(id=1, text=text, names=("林某2",))
    short = shorten(example, 100, lambda one: len(one.text)).example
    assert "林某\n2系主犯。" in short.text, "it names somebody, so other sentences go first"


@pytest.mark.parametrize(
    "text",
    [
        "甲盗窃。\n  乙抢劫。",
        "一、盗窃事实\n\n甲盗窃。",
        "甲盗窃手机\n2、乙盗窃电脑。",
        "甲盗窃手机\n（二）乙盗窃电脑。",
        "甲：你好\n乙：再见",  # nothing else ends a sentence
        "[1] 甲：好。你来\n[2] 乙：嗯",
        "He stole.\nShe ran.",
        "R&D、AT&T；甲方",
    ],
)
def test_other_lines_stay(text: str) -> None:
    assert plain_text(text).text == text


def test_examples() -> None:
    assert plain_text("He stole a\nphone. In 1999\nhe ran.").text == (
        "He stole a phone. In 1999 he ran."
    )
    assert plain_text("王&times;、李&amp;times;、＆ｔｉｍｅｓ；&#215;").text == "王×、李×、××"
    assert plain_text("甲。\r\n乙").text == "甲。\n乙"
    assert plain_text("价值1.\n5万元。").text == "价值1.5万元。"
    assert plain_text("1 甲盗窃\n3 手机。").text == "1 甲盗窃3 手机。", "no line numbers"
    assert plain_text("1 甲盗\n2 窃。\n3\n4 乙。").text == "甲盗窃。\n乙。"


@given(st.text(st.sampled_from("甲乙。，\n\r 12&times;.a")))
def test_every_place_comes_from_the_text(text: str) -> None:
    plain = plain_text(text)
    end_of_last = 0
    for place, character in enumerate(plain.text):
        start = plain.old_start(place)
        end = plain.old_end(place + 1)
        assert end_of_last <= start <= end <= len(text)
        changed = any(edit.start <= place < edit.end for edit in plain.edits)
        assert changed or text[start:end] == character
        end_of_last = start if changed else end


@pytest.mark.parametrize("name", ["wrapped", "numbered"])
def test_the_shared_cases_are_read_like_the_plain_ones(name: str) -> None:
    if not CASES.exists():
        pytest.skip(f"{CASES} is absent")
    read = load_task("judgment").data.read
    with (CASES / f"{name}.jsonl").open("rb") as lines, (CASES / "plain.jsonl").open("rb") as plain:
        for line, other in zip(lines, plain, strict=True):
            example = read(json.loads(line))
            assert bare_case(example) == bare_case(read(json.loads(other)))


@pytest.mark.parametrize("part", [" ", "\n", " \n", "\n1", "&", "&amp;", "张 ", "。\n", "被告人"])
def test_a_text_made_to_take_long_comes_to_an_end(part: str) -> None:
    for text in (part * 50_000 + "x\n", "\n" + part * 50_000):
        assert "".join(split_sentences(text, 200, ["张某"])) == text
