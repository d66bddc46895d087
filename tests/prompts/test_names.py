"""Where a text names its persons, and where it has a word instead."""

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.finetune.classifier.features import marked
from panjue.prompts.example import Example
from panjue.prompts.names import (
    STEMS,
    WITH_STEM,
    NameCount,
    name_key,
    name_places,
    names_not_in,
    split_at_names,
)
from panjue.prompts.shorten import leaving_order


def named(text: str, *names: str) -> str:
    """Return the text with brackets around each name."""
    pieces = split_at_names(text, names)
    return "".join(piece if number is None else f"[{piece}]" for piece, number in pieces)


@pytest.mark.parametrize(
    "text",
    [
        "[甲]、[乙]共谋贩卖甲基苯丙胺。[甲]将甲基苯丙胺卖给[乙]，[乙]醉酒，查获乙醚、乙醇、乙酸酐。",
        "[甲]基于报复，打伤[乙]；[甲]因酸痛就医。",
        "[乙]卖给[甲]甲卡西酮和1,4-丁二醇，还有二甲苯",
        "[甲]开装甲车，指甲受伤；合同的甲方是[乙]，乙方是[甲]。",
        "[甲]伙同甲某、王某甲打[乙]",
        "贩卖甲类毒品；患甲肝、乙脑、甲流；[乙]饮甲酸、乙酸乙酯，服甲硝唑；乙方向甲方付款",
    ],
)
def test_a_name_within_a_word_is_no_name(text: str) -> None:
    assert named(re.sub(r"[\[\]]", "", text), "甲", "乙") == text


@pytest.mark.parametrize(
    "text",
    [
        "[乙]的手段与[甲]类似，比照[乙]类推；给[丁]酸奶、香烟",
        "致[甲]肝脏破裂、[乙]脑部受伤；[甲]流血不止；[乙]脑震荡；打得[甲]酸痛",
        "卖给[甲]氯胺酮，卖给[乙]硝铵炸药；朝[丙]硫酸泼去",
        "[甲]见状告知[己]，[己]见面后逃跑，[己]有自首情节；据为己有，占为己用，固执己见",
        "自己、红颜知己、异己都不是[己]",
    ],
)
def test_a_name_before_a_word_is_a_name(text: str) -> None:
    """Although its character and the first one of the word are another word: 甲类, 丁酸, 知己."""
    assert named(re.sub(r"[\[\]]", "", text), *"甲乙丙丁己") == text


def test_examples_of_other_names() -> None:
    assert split_at_names("张某与张某甲打架。", ["张某", "张某甲"]) == [
        *[("张某", 0), ("与", None), ("张某甲", 1), ("打架。", None)]
    ]
    assert named("A在ATM上取款，B在KA1路等A", "A", "B") == "[A]在ATM上取款，[B]在KA1路等[A]"
    assert named("Ann and Joanna met Ann.", "Ann") == "[Ann] and Joanna met [Ann]."
    assert named("丁某、庚", "丁某", "庚") == "[丁某]、[庚]", "a name with a stem stays a name"
    assert named("甲基苯丙胺", "张某") == "甲基苯丙胺"


NAMES = st.lists(st.text("甲乙某*.（", max_size=3), max_size=4)


@given(st.text("甲乙某基*.（", max_size=20), NAMES)
def test_the_pieces_are_the_text_and_only_words_keep_names(text: str, names: list[str]) -> None:
    pieces = split_at_names(text, names)
    assert "".join(piece for piece, _ in pieces) == text
    for piece, number in pieces:
        if number is None:
            without_words = WITH_STEM.sub("|", piece)
            assert not any(name and name in without_words for name in names)
        else:
            assert name_key(piece) == name_key(names[number])


@given(st.text(), st.lists(st.text(max_size=3), max_size=4))
def test_any_text_and_any_names_have_places(text: str, names: list[str]) -> None:
    end_of_last = 0
    for start, end, number in name_places(text, names):
        assert start >= end_of_last
        assert name_key(text[start:end]) == name_key(names[number])
        end_of_last = end


LISTED = {
    "谢某A": [
        *("谢　某A", "谢 某 A", "谢某Ａ", "被告人谢某A", "被告人：谢某A", "原审被告人谢某A"),
        *(
            "上诉人（原审被告人）谢某A",
            "上诉人(原审被告人)谢某A",
            "罪犯谢某A",
            "原审附带民事诉讼被告人谢某A",
        ),
        *(
            "谢某A（绰号“三哥”）",
            "谢某A(又名谢三)",
            "谢某A，又名谢三",
            "谢某A（女）",
            "谢某A（在逃）",
        ),
    ],
    "王××": ["王&times;&times;", "王&amp;times;&#215;", "王 ××", "王＆ｔｉｍｅｓ；×"],
    "古力克孜·某某": [
        "古力克孜•某某",
        "古力克孜・某某",
        "古力克孜‧某某",
        "古力克孜．某某",
        "古力克孜 · 某某",
    ],
    "Zoé Müller": ["Zoé  Müller", "Zoe\u0301 Mu\u0308ller", "Ｚｏé Müller"],
    "李某1": ["\uf9e1某1", "李某１", "李 某 1"],
    "某（集团）公司": ["某(集团)公司", "被告单位某（集团）公司"],
    "XX": ["X　X", "X X", "ＸＸ"],
}
"""Name -> how else it may be written."""


@pytest.mark.parametrize(("name", "other"), [(a, b) for a, more in LISTED.items() for b in more])
def test_a_name_is_found_however_the_list_and_the_facts_have_it(name: str, other: str) -> None:
    assert name_key(other) == name_key(name)
    text = f"经审理查明，{name}行窃。后{name}自首。"
    listed = name_places(text, [other])
    assert [text[place.start : place.end] for place in listed] == [name, name]
    if other[0] == name[0] and len(name_key(other)) > len(other) - 3:  # not a role nor an alias
        text = f"经审理查明，{other}行窃。"
        [place] = name_places(text, [name])
        assert text[place.start : place.end] == other


def test_what_tells_two_of_one_name_apart_stays() -> None:
    two = ["张某（甲）", "张某(乙)"]
    assert named("张某（甲）与张某（乙）打架", *two) == "[张某（甲）]与[张某（乙）]打架"
    assert named("张某打架", two[0]) == "[张某]打架", "a text may not need it"
    assert named("张某与A B打架，John Smith看", "A", "B", "John Smith") == (
        "张某与[A] [B]打架，[John Smith]看"
    )
    assert named("被告人打架", "被告人") == "[被告人]打架"


def test_two_that_differ_only_in_their_aliases_have_one_key() -> None:
    example = Example(1, "张某行窃。", ("张某（绰号“三哥”）", "张某（绰号“四哥”）"))
    assert marked(example, 2).persons == [0, 0]
    assert names_not_in(example.text, example.names) == []


def test_names_that_texts_do_not_have_are_counted_in_one_line() -> None:
    count = NameCount()
    count.add(Example(1, "张　某与李某。", ("张某", "李某")))
    assert not [*count.lines()]
    examples = [Example(2, "张某甲行窃。", ("张某", "张某甲")), Example(3, "无。", ("A", "甲"))]
    assert list(count.of(examples)) == examples
    said = "3 of 6 names do not occur in their facts, first: id 2, 张某"
    assert [*count.lines()] == [said]


def test_every_reader_of_names_takes_the_same_places() -> None:
    sentences = ["乙供述。", "甲基苯丙胺被查获。", "甲望风。", "甲又望风。"]
    example = Example(1, "".join(sentences), ("甲", "乙"))
    case = marked(example, 2)
    assert "甲基苯丙胺" in case.text
    assert [clauses.count("。") for clauses in case.own] == [2, 1]
    assert leaving_order(sentences, example.names, "") == [1, 3], "the drug introduces nobody"


def test_real_names_are_found_under_other_names_and_no_drug_is(real_data: Path) -> None:
    """Each defendant of a real case gets a stem for a name; the words of the case stay words."""
    places = 0
    missed = 0
    wrong = 0
    with (real_data / "drdz/dev.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if len(row["defendants"]) > len(STEMS):
                continue
            stems = random.Random(0).sample(STEMS, len(row["defendants"]))
            renamed = [
                (piece if number is None else stems[number], number)
                for piece, number in split_at_names(row["fact"], row["defendants"])
            ]
            text = "".join(piece for piece, _ in renamed)
            expected = set()
            start = 0
            for piece, number in renamed:
                if number is not None:
                    expected.add((start, start + len(piece), number))
                start += len(piece)
            found = set(map(tuple, name_places(text, stems)))
            places += len(expected)
            missed += len(expected - found)
            wrong += len(found - expected)
    assert places > 1000
    assert missed < 0.005 * places
    assert wrong < 0.02 * places, "mostly other persons, whose names have a stem"
