"""Replies that are nearly right: nothing is lost that is there, and nobody goes unanswered."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panjue.prompts.example import Decoded, Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import flatten_forms
from panjue.prompts.plumbing.files import dump
from panjue.prompts.render import neutralize
from panjue.prompts.tasks.judgment.repair import PENALTIES
from panjue.prompts.tasks.judgment.task import check, decode, target, write

NAME = st.text(st.sampled_from("张王某甲A1１·（）“”\"\\{}[]<>|':,😀 　"), min_size=1, max_size=6)
NAMES = st.lists(
    NAME.filter(str.strip),
    min_size=1,
    max_size=4,
    # Two names that differ in their full-width forms only are one name to the decoder.
    unique_by=lambda name: flatten_forms(neutralize(name)),
)
GUESS = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": PENALTIES[10]}


@st.composite
def answered(draw: st.DrawFn, names: st.SearchStrategy[list[str]] = NAMES) -> Example:
    """Draw a case with its answer; the labels are those of the fixture."""
    charge = st.sampled_from(["盗窃罪", "诈骗罪", "掩饰、隐瞒犯罪所得、犯罪所得收益罪"])
    article = st.sampled_from(["264", "266", "303-2", "287.2"])
    charges = st.lists(charge, min_size=1, max_size=2, unique=True)
    articles = st.lists(article, min_size=1, max_size=3, unique=True)
    found = draw(names)
    judgments = [
        {
            "name": name,
            "charges": draw(charges),
            "articles": draw(articles),
            "penalty": draw(st.sampled_from(PENALTIES)),
        }
        for name in found
    ]
    return Example(id=1, text="事实", names=tuple(found), answer={"judgments": judgments})


def sound(decoded: Decoded, case: Example, labels: Labels) -> None:
    """Everybody is answered, in order and with labels that the contest takes."""
    assert [judgment["name"] for judgment in decoded.answer["judgments"]] == list(case.names)
    assert list(check(case, write(case, decoded.answer), labels)) == []


def gold(case: Example) -> list[dict[str, Any]]:
    assert case.answer is not None
    judgments: list[dict[str, Any]] = case.answer["judgments"]
    return judgments


WRAPPINGS = {
    "fence": "```json\n{}\n```",
    "remarks": "好的，判断如下：\n{}\n以上判断仅供参考，[1] 详见 {{法条}}。",
    "think block": "<think>\n先看罪名：“盗窃”？\n</think>\n\n{}",
    "think block without its start": "嗯…… </think>{}",
    "fence not closed": "```\n{}",
    "said twice": "{0}\n{0}",
    "missing the last brackets": "{}",
    "under a key": '{{"answer":{},"confidence":0.9}}',
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@settings(max_examples=50)
@given(case=answered())
def test_nothing_is_lost_in_wrappings(labels: Labels, wrapping: str, case: Example) -> None:
    reply = WRAPPINGS[wrapping].format(target(case))
    reply = reply.removesuffix("]}") if "missing" in wrapping else reply
    decoded = decode(reply, case, labels)
    assert decoded.answer == case.answer
    assert decoded.repairs
    assert decoded.readable


def test_the_articles_of_a_known_charge_stand_in_for_missing_ones(labels: Labels) -> None:
    case = Example(id=1, text="事实", names=("甲",))
    for charge, article in (("故意伤害罪", "234"), ("诈骗罪", "266"), ("开设赌场罪", "303-2")):
        reply = dump({"name": "甲", "charges": [charge], "penalty": PENALTIES[3]})
        assert decode(reply, case, labels).answer == {
            "judgments": [
                {"name": "甲", "charges": [charge], "articles": [article], "penalty": PENALTIES[3]}
            ]
        }


def reply_of(*judgments: tuple[str, str, int]) -> str:
    rows = [
        {"name": name, "charges": [charge], "articles": ["266"], "penalty": PENALTIES[penalty]}
        for name, charge, penalty in judgments
    ]
    return dump({"judgments": rows})


def penalties(decoded: Decoded) -> list[int]:
    return [PENALTIES.index(judgment["penalty"]) for judgment in decoded.answer["judgments"]]


TWICE = "answered twice, the last complete answer counts"


def test_of_two_answers_the_last_complete_one_counts(case: Example, labels: Labels) -> None:
    reply = reply_of(("李某", "诈骗罪", 3), ("张某甲", "诈骗罪", 4), ("李某", "诈骗罪", 5))
    decoded = decode(reply, case, labels)
    assert penalties(decoded) == [4, 5]
    assert decoded.repairs == (f"李某: {TWICE}",)
    # The second one is cut, or lacks a field.
    for end in ('"}]}', f'"penalty":"{PENALTIES[5]}"}}]}}'):
        assert reply.endswith(end)
        decoded = decode(reply.removesuffix(end), case, labels)
        assert penalties(decoded) == [4, 3]
        assert decoded.repairs == (f"李某: {TWICE}",)
    lacking = reply.replace(f',"penalty":"{PENALTIES[5]}"', "")
    assert penalties(decode(lacking, case, labels)) == [4, 3]


def test_the_last_answer_counts_however_its_name_is_written(case: Example, labels: Labels) -> None:
    for name in ("李 某", "李某\u200b"):
        reply = reply_of(("李某", "诈骗罪", 3), ("张某甲", "诈骗罪", 4), (name, "诈骗罪", 5))
        decoded = decode(reply, case, labels)
        assert penalties(decoded) == [4, 5]
        assert decoded.repairs == (f"李某: {TWICE}",)


def test_a_stranger_is_dropped(case: Example, labels: Labels) -> None:
    reply = reply_of(("王某", "诈骗罪", 3), ("张某甲", "诈骗罪", 4), ("李某", "诈骗罪", 5))
    decoded = decode(reply, case, labels)
    assert penalties(decoded) == [4, 5]
    assert decoded.repairs == ("name '王某' is no defendant, dropped",)
    # Where their number is another, places say nothing.
    decoded = decode(reply_of(("王某", "诈骗罪", 3)), case, labels)
    assert penalties(decoded) == [10, 10]
    assert not decoded.readable
    # In the place of somebody who is answered elsewhere.
    decoded = decode(reply_of(("李某", "诈骗罪", 5), ("王某", "诈骗罪", 3)), case, labels)
    assert penalties(decoded) == [10, 5]


@pytest.mark.parametrize(
    ("field", "written", "read", "repair"),
    [
        ("charges", ["盗窃"], ["盗窃罪"], "charges '盗窃' -> '盗窃罪'"),
        ("charges", ["抢劫罪"], ["盗窃罪"], "charges '抢劫罪' unknown, dropped"),
        ("charges", ["诈骗罪", "诈骗罪"], ["诈骗罪"], "charges '诈骗罪' repeated"),
        (
            "charges",
            ["诈骗罪", "开设赌场罪", "盗窃罪"],
            ["诈骗罪", "开设赌场罪"],
            "charges cut to 2, the most in training",
        ),
        ("charges", "诈骗罪", ["诈骗罪"], "not the JSON that was asked for"),
        ("charges", [], ["盗窃罪"], "charges missing"),
        ("articles", ["第二百六十六条"], ["266"], "articles '第二百六十六条' -> '266'"),
        ("articles", ["303-1"], ["264"], "articles '303-1' unknown, dropped"),
        ("articles", ["264-1"], ["264"], "articles '264-1' -> '264'"),
        ("articles", [266, "266"], ["266"], "articles '266' repeated"),
        ("articles", 266, ["266"], "not the JSON that was asked for"),
        ("penalty", "3", PENALTIES[3], "penalty '3' -> '管制一年以上'"),
        ("penalty", "第3档", PENALTIES[3], "penalty '第3档' -> '管制一年以上'"),
        ("penalty", "有期徒刑 六个月以下", "有期徒刑六个月以下", "not the JSON that was asked for"),
        (
            "penalty",
            "6个月",
            PENALTIES[10],
            "penalty missing or of no class",
        ),
        ("articles", ["264、266"], ["264", "266"], "not the JSON that was asked for"),
        ("articles", ["26、4"], ["264"], "articles '26' unknown, dropped"),
        (
            "penalty",
            "免予刑事处罚",
            PENALTIES[14],
            "penalty '免予刑事处罚' -> '单处罚金或免予刑事处罚'",
        ),
        ("penalty", "单处罚金", PENALTIES[14], "penalty '单处罚金' -> '单处罚金或免予刑事处罚'"),
        ("penalty", 3.0, PENALTIES[3], "penalty '3.0' -> '管制一年以上'"),
        ("penalty", 15, PENALTIES[10], "penalty missing or of no class"),
        ("penalty", True, PENALTIES[10], "penalty missing or of no class"),
    ],
)
def test_one_thing_wrong(
    labels: Labels, field: str, written: object, read: object, repair: str
) -> None:
    case = Example(id=1, text="事实", names=("甲",))
    judgment = {"name": "甲", "charges": ["盗窃罪"], "articles": ["264"], "penalty": "拘役"}
    decoded = decode(dump({"judgments": [{**judgment, field: written}]}), case, labels)
    sound(decoded, case, labels)
    assert decoded.answer == {"judgments": [{**judgment, field: read}]}
    assert any(text.removeprefix("甲: ") == repair for text in decoded.repairs), decoded.repairs


def test_a_runaway_list_is_not_read_to_its_end(labels: Labels) -> None:
    case = Example(id=1, text="事实", names=("甲",))
    judgment = {"name": "甲", "articles": ["264"], "penalty": "拘役"}
    for junk, charges in ((7, ["诈骗罪"]), (8, ["盗窃罪"])):  # four times the two of training
        reply = dump({**judgment, "charges": ["抢劫罪"] * junk + ["诈骗罪"] * 10_000})
        decoded = decode(reply, case, labels)
        assert decoded.answer == {"judgments": [{**judgment, "charges": charges}]}
        assert len(decoded.repairs) <= 9


def test_chinese_keys_and_curly_quotes(labels: Labels) -> None:
    case = Example(id=1, text="事实", names=("甲", "乙"))
    reply = "［｛“姓名”：“乙”，“罪名”：［“诈骗”］，“法条”：［“２６６”］，“刑罚等级”：８｝］"
    decoded = decode(reply, case, labels)
    assert decoded.answer["judgments"][1] == {
        "name": "乙",
        "charges": ["诈骗罪"],
        "articles": ["266"],
        "penalty": PENALTIES[8],
    }
    assert decoded.answer["judgments"][0] == {"name": "甲", **GUESS}


LENGTH = 300_000
HOSTILE = {
    "quotes": '"',
    "backslashes": "\\",
    "escaped quotes": '\\"',
    "open brackets": "[",
    "open objects": '{"judgments":[',
    "names": '"name":"张某甲",',
    "names without end": '"name":"',
    "names with space": '"name"     :     ',
    "lists without end": '"name":"张某甲","charges":["',
    "lists of lists": '"name":"张某甲","articles":[[["1",',
    "labels": '"盗窃",',
    "digits": "9",
    "spaces": " ",
    "think": "<think>",
    "end of thinking": "</think>",
    "wide": "ﷺ",
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize(
    "head", ["", '{"judgments":[{"name":"张某甲","charges":["', '"name":"李某","articles":[']
)
def test_a_hostile_reply_comes_to_an_end(
    case: Example, labels: Labels, what: str, head: str
) -> None:
    # Were the reading quadratic in the reply, this would take an hour.
    piece = HOSTILE[what]
    sound(decode(head + piece * (LENGTH // len(piece)), case, labels), case, labels)
