"""Replies that are nearly right: nothing is lost that is there, what is not there is a guess."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panjue.prompts.example import Decoded, Example
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.decode import flatten_forms
from panjue.prompts.plumbing.files import dump
from panjue.prompts.render import neutralize
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.prompts.tasks.judgment.repair import decode
from panjue.prompts.tasks.judgment.task import check, target, write

NAME = st.text(st.sampled_from("张王某甲A1１·（）“”\"\\{}[]<>|':,😀 　"), min_size=1, max_size=6)
NAMES = st.lists(
    NAME.filter(str.strip),
    min_size=1,
    max_size=4,
    # Two names that differ in their full-width forms only are one name to the decoder.
    unique_by=lambda name: flatten_forms(neutralize(name)),
)
ONE = Example(id=1, text="事实", names=("甲",))
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


WRAPPINGS = {
    "fence": "```json\n{}\n```",
    "remarks": "好的，判断如下：\n{}\n以上判断仅供参考，[1] 详见 {{法条}}。",
    "think block": "<think>\n先看罪名：“盗窃”？\n</think>\n\n{}",
    "think block without its start": "嗯…… </think>{}",
    "fence not closed": "```\n{}",
    "said twice": "{0}\n{0}",
    "missing the last brackets": "{}",
    "under a key": '{{"answer":{},"confidence":0.9}}',
    "after a broken draft": '{{"judgments":[{{"name":"甲",}}]}}\n更正：{}',
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
    for charge, article in (("故意伤害罪", "234"), ("诈骗罪", "266"), ("开设赌场罪", "303-2")):
        reply = dump({"name": "甲", "charges": [charge], "penalty": PENALTIES[3]})
        assert decode(reply, ONE, labels).answer == {
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
        ("charges", ["抢劫罪"], None, "charges '抢劫罪' unknown, dropped"),
        ("charges", ["诈骗罪", "诈骗罪"], ["诈骗罪"], "charges '诈骗罪' repeated"),
        (
            "charges",
            ["诈骗罪", "开设赌场罪", "盗窃罪"],
            ["诈骗罪", "开设赌场罪"],
            "charges cut to 2, the most in training",
        ),
        ("charges", "诈骗罪", ["诈骗罪"], "not the JSON that was asked for"),
        ("charges", "诈骗罪、盗窃罪", None, "charges '诈骗罪、盗窃罪' unknown, dropped"),
        ("charges", [], None, "charges missing"),
        ("charges", None, None, "charges missing"),
        ("articles", ["第二百六十六条"], ["266"], "articles '第二百六十六条' -> '266'"),
        ("articles", ["303-1"], None, "articles '303-1' unknown, dropped"),
        ("articles", ["264-1"], ["264"], "articles '264-1' -> '264'"),
        ("articles", [266, "266"], ["266"], "articles '266' repeated"),
        ("articles", ["26、4"], None, "articles '26、4' unknown, dropped"),
        ("penalty", "有期徒刑 六个月以下", PENALTIES[13], None),
        ("penalty", "免予刑事处罚", PENALTIES[14], None),
        ("penalty", "单处罚金", PENALTIES[14], None),
        (
            "penalty",
            ["死刑", "剥夺政治权利终身"],
            "死刑",
            "penalty '剥夺政治权利终身' unknown, dropped",
        ),
        ("penalty", ["死刑", "拘役"], None, "penalty missing or of no class"),
        ("penalty", "死刑、拘役", None, "penalty missing or of no class"),
        ("penalty", "6个月", None, "penalty missing or of no class"),
        ("penalty", 2, None, "penalty missing or of no class"),
        ("penalty", True, None, "penalty missing or of no class"),
    ],
)
def test_one_thing_wrong(
    labels: Labels, field: str, written: object, read: object, repair: str | None
) -> None:
    """None is read where the answer is a guess."""
    judgment = {"name": "甲", "charges": ["盗窃罪"], "articles": ["264"], "penalty": "拘役"}
    decoded = decode(dump({"judgments": [{**judgment, field: written}]}), ONE, labels)
    assert list(check(ONE, write(ONE, decoded.answer), labels)) == []
    expected = {**judgment, field: GUESS[field] if read is None else read}
    assert decoded.answer == {"judgments": [expected]}
    assert decoded.guesses == (((0, field),) if read is None else ())
    repair = repair or f"penalty {written!r} -> {read!r}"
    assert any(text.removeprefix("甲: ") == repair for text in decoded.repairs), decoded.repairs


def test_a_runaway_list_is_not_read_to_its_end(labels: Labels) -> None:
    judgment = {"name": "甲", "articles": ["264"], "penalty": "拘役"}
    for junk, charges in ((7, ["诈骗罪"]), (8, ["盗窃罪"])):  # four times the two of training
        reply = dump({**judgment, "charges": ["抢劫罪"] * junk + ["诈骗罪"] * 10_000})
        decoded = decode(reply, ONE, labels)
        assert decoded.answer == {"judgments": [{**judgment, "charges": charges}]}
        assert len(decoded.repairs) <= 9


FIELDS = ("charges", "articles", "penalty")


def value(decoded: Decoded, field: str) -> object:
    """Return what is read of a field; None if it is guessed."""
    return None if decoded.is_guess(0, field) else decoded.answer["judgments"][0][field]


def reply_with(**fields: object) -> str:
    own = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": "拘役", **fields}
    return dump({"judgments": [{"name": "甲", **own}]})


def test_what_a_reply_has_is_kept_and_everything_else_is_a_guess(labels: Labels) -> None:
    """Every value that the reply does not have is listed, and nothing else."""
    own = {"charges": ["诈骗罪"], "articles": ["266"], "penalty": "死刑"}
    other = {"charges": ["未知罪"], "articles": ["9"], "penalty": "流放"}
    names = ("甲", "乙", "丙")
    case = Example(id=1, text="事实", names=names)

    @given(st.permutations(names), st.lists(st.sampled_from(["own", "no", "odd"]), min_size=9))
    def guesses(order: list[str], states: list[str]) -> None:
        ways = {
            (number, field): states[3 * number + place]
            for number in range(3)
            for place, field in enumerate(FIELDS)
        }
        rows = []
        for name in order:
            row: dict[str, object] = {"name": name}
            for field in FIELDS:
                way = ways[names.index(name), field]
                row |= {} if way == "no" else {field: (own if way == "own" else other)[field]}
            rows.append(row)
        decoded = decode(dump({"judgments": rows}), case, labels)
        assert set(decoded.guesses) == {place for place, way in ways.items() if way != "own"}
        for number, judgment in enumerate(decoded.answer["judgments"]):
            for field in FIELDS:
                assert (number, field) in decoded.guesses or judgment[field] == own[field]

    guesses()


def test_an_unreadable_reply_is_guessed_from_end_to_end(labels: Labels) -> None:
    for reply in ("", "不知道", '{"judgments":[]}', '{"name":"乙","charges":["盗窃罪"]}'):
        decoded = decode(reply, ONE, labels)
        assert decoded.guesses == tuple((0, field) for field in FIELDS)
        assert not decoded.readable


def labels_of(*pairs: tuple[str, str]) -> Labels:
    """Return the labels of a training whose defendants have these charges and articles."""
    return collect(
        {"charges": [charge], "articles": [article], "penalty": [PENALTIES[10]]}
        for charge, article in pairs
    )


KNOWN = labels_of(
    ("其他罪", "999"),
    ("其他罪", "999"),
    ("盗窃罪", "264"),
    ("诈骗罪", "266"),
    ("诈骗罪", "287"),
    ("帮助信息网络犯罪活动罪", "287.2"),
    ("走私国家禁止进出口的货物、物品罪", "152-2"),
)


@pytest.mark.parametrize(
    ("charge", "article", "read"),
    [
        ("走私国家禁止进出口的货物、物品罪", "152", ["152-2"]),
        ("走私国家禁止进出口的货物、物品罪", "第一百五十二条", ["152-2"]),
        ("盗窃罪", "152", None),  # its first paragraph is another crime
        ("走私淫秽物品罪", "152", None),  # the charge is unknown, and its guess says nothing
        ("盗窃罪", "152-2", ["152-2"]),
        ("盗窃罪", "152-1", None),
        ("盗窃罪", "287.2", ["287.2"]),
    ],
)
def test_an_article_becomes_its_paragraph_only_with_the_charge_of_that(
    charge: str, article: str, read: list[str] | None
) -> None:
    decoded = decode(reply_with(charges=[charge], articles=[article]), ONE, KNOWN)
    assert value(decoded, "articles") == read
    if read and read != [article]:
        assert f"甲: articles {article!r} -> '152-2'" in decoded.repairs
    if not read:
        assert f"甲: articles {article!r} unknown, dropped" in decoded.repairs


TWINS = labels_of(
    *(("其他罪", "999"),) * 3,
    ("盗窃", "303-2"),
    ("盗窃罪", "303－2"),
    ("掩饰、隐瞒犯罪所得罪", "264"),
    ("掩饰，隐瞒犯罪所得罪", "264"),
    ("抢劫罪", "264"),
    ("搶劫罪（未遂）", "264"),
    ("搶劫罪(未遂)", "264"),
)


@pytest.mark.parametrize(
    "charge",
    [
        "盗窃",
        "盗窃罪",
        "掩饰、隐瞒犯罪所得罪",
        "掩饰，隐瞒犯罪所得罪",
        "搶劫罪（未遂）",
        "搶劫罪(未遂)",
    ],
)
def test_of_two_labels_that_look_equal_neither_becomes_the_other(charge: str) -> None:
    row = {"name": "甲", "charges": [charge], "articles": ["264"], "penalty": "死刑"}
    for reply in (dump({"judgments": [row]}), f"```{dump(row)}```"):
        assert value(decode(reply, ONE, TWINS), "charges") == [charge]


def test_what_may_be_either_of_two_labels_that_look_equal_is_unknown() -> None:
    for written in ("盗 窃", "“盗窃罪”", "掩饰隐瞒犯罪所得罪", "搶劫罪（未遂)"):
        decoded = decode(reply_with(charges=[written]), ONE, TWINS)
        assert value(decoded, "charges") is None
        assert f"甲: charges {written!r} unknown, dropped" in decoded.repairs
    for article, read in (("303-2", ["303-2"]), ("303－2", ["303－2"]), ("第303条第2款", None)):
        decoded = decode(reply_with(articles=[article]), ONE, TWINS)
        assert value(decoded, "articles") == read


def test_labels_that_look_equal_are_named() -> None:
    assert list(TWINS.look_alikes(["charges", "articles", "penalty"])) == [
        "charges '掩饰、隐瞒犯罪所得罪', '掩饰，隐瞒犯罪所得罪' look equal; keep one spelling",
        "charges '搶劫罪(未遂)', '搶劫罪（未遂）' look equal; keep one spelling",
        "charges '盗窃', '盗窃罪' look equal; keep one spelling",
        "articles '303-2', '303－2' look equal; keep one spelling",
    ]
    assert not list(KNOWN.look_alikes(["charges", "articles", "penalty"]))


def test_a_last_answer_too_far_away_is_not_replaced_by_a_draft(labels: Labels) -> None:
    draft = '{"name":"甲","charges":["诈骗罪"],"articles":["266"],"penalty":"死刑"}'
    assert decode(draft, ONE, labels).readable
    assert not decode(draft + "{x}" * 2000, ONE, labels).readable


def test_of_two_equally_complete_answers_the_last_one_counts(labels: Labels) -> None:
    twice = '{"name":"甲","charges":["诈骗罪"]}{"name":"甲","charges":["盗窃罪"]}'
    [judgment] = decode(twice, ONE, labels).answer["judgments"]
    assert judgment["charges"] == ["盗窃罪"]
