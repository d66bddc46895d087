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
OWN = {"charges": ["诈骗罪"], "articles": ["266"], "penalty": "死刑"}


@st.composite
def answered(draw: st.DrawFn, names: st.SearchStrategy[list[str]] = NAMES) -> Example:
    """Draw a case with its answer; the labels are those of the fixture."""
    charge = st.sampled_from(["盗窃罪", "诈骗罪", "掩饰、隐瞒犯罪所得、犯罪所得收益罪"])
    article = st.sampled_from(["264", "266", "303-2", "287.2"])
    charges = st.lists(charge, min_size=1, max_size=2, unique=True)
    articles = st.lists(article, min_size=1, max_size=3, unique=True)
    penalty = st.sampled_from(PENALTIES)
    drawn = tuple(draw(names))
    judgments = []
    for name in drawn:
        fields = {"charges": draw(charges), "articles": draw(articles), "penalty": draw(penalty)}
        judgments.append({"name": name, **fields})
    return Example(id=1, text="事实", names=drawn, answer={"judgments": judgments})


WRAPPINGS = {
    "fence": "```json\n{}\n```",
    "remarks": "好的，判断如下：\n{}\n以上判断仅供参考，[1] 详见 {{法条}}。",
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


def reply_with(**fields: object) -> str:
    """Return the reply of a judgment of 甲, with these fields instead of its own."""
    return dump({"judgments": [{"name": "甲", **GUESS, "penalty": "拘役", **fields}]})


def value(decoded: Decoded, field: str) -> object:
    """Return what is read of a field; None if it is guessed."""
    return None if decoded.is_fallback(0, field) else decoded.answer["judgments"][0][field]


@pytest.mark.parametrize(
    ("charges", "articles"),
    [
        (["开设赌场罪"], ["303-2"]),
        (["盗窃罪", "诈骗罪"], ["264", "266"]),
        ([], ["264"]),  # of the commonest charge
    ],
)
def test_the_articles_of_the_charges_stand_in_for_missing_ones(
    labels: Labels, charges: list[str], articles: list[str]
) -> None:
    decoded = decode(reply_with(charges=charges, articles=[]), ONE, labels)
    assert decoded.answer["judgments"][0]["articles"] == articles
    assert value(decoded, "articles") is None


def reply_of(*judgments: tuple[str, int]) -> str:
    """Return a reply of names and penalty classes."""
    rows = [{"name": name, **OWN, "penalty": PENALTIES[number]} for name, number in judgments]
    return dump({"judgments": rows})


def penalties(decoded: Decoded) -> list[int]:
    return [PENALTIES.index(judgment["penalty"]) for judgment in decoded.answer["judgments"]]


@pytest.mark.parametrize("name", ["李某", "李 某", "李某\u200b"])
def test_of_two_answers_the_last_complete_one_counts(
    case: Example, labels: Labels, name: str
) -> None:
    reply = reply_of(("李某", 3), ("张某甲", 4), (name, 5))
    twice = ("李某: answered twice, the last complete answer counts",)
    decoded = decode(reply, case, labels)
    assert penalties(decoded) == [4, 5]
    assert decoded.repairs == twice
    # The second one is cut, or lacks a field.
    penalty = f',"penalty":"{PENALTIES[5]}"'
    for worse in (reply.removesuffix('"}]}'), reply.replace(penalty, "")):
        decoded = decode(worse, case, labels)
        assert penalties(decoded) == [4, 3]
        assert decoded.repairs == twice
    # Both lack one.
    decoded = decode(
        '{"name":"李某","penalty":"死刑"}{"name":"李某","penalty":"拘役"}', case, labels
    )
    assert penalties(decoded) == [10, 2]


def test_a_last_answer_too_far_away_is_not_replaced_by_a_draft(labels: Labels) -> None:
    assert decode(reply_with(), ONE, labels).readable
    assert not decode(reply_with() + "{x}" * 2000, ONE, labels).readable


def test_a_stranger_is_dropped(case: Example, labels: Labels) -> None:
    decoded = decode(reply_of(("王某", 3), ("张某甲", 4), ("李某", 5)), case, labels)
    assert penalties(decoded) == [4, 5]
    assert decoded.repairs == ("name '王某' is no defendant, dropped",)
    # The place of a name says nothing.
    decoded = decode(reply_of(("李某", 5), ("王某", 3)), case, labels)
    assert penalties(decoded) == [10, 5]
    assert "张某甲: no answer" in decoded.repairs


@pytest.mark.parametrize(
    ("field", "written", "read", "repair"),
    [
        ("charges", ["盗窃"], ["盗窃罪"], "charges '盗窃' -> '盗窃罪'"),
        ("charges", ["抢劫罪"], None, "charges '抢劫罪' unknown, dropped"),
        ("charges", ["诈骗罪", "诈骗罪"], ["诈骗罪"], "charges '诈骗罪' repeated"),
        ("charges", "诈骗罪", ["诈骗罪"], "not the JSON that was asked for"),
        ("charges", "诈骗罪、盗窃罪", None, "charges '诈骗罪、盗窃罪' unknown, dropped"),
        ("charges", [], None, "charges missing"),
        ("charges", None, None, "charges missing"),
        ("articles", ["第二百六十六条"], ["266"], "articles '第二百六十六条' -> '266'"),
        ("articles", ["303-1"], None, "articles '303-1' unknown, dropped"),
        ("articles", ["264-1"], ["264"], "articles '264-1' -> '264'"),
        ("articles", [266, "266"], ["266"], "articles '266' repeated"),
        ("penalty", "有期徒刑 六个月以下", PENALTIES[13], None),
        ("penalty", "免予刑事处罚", PENALTIES[14], None),
        ("penalty", "单处罚金", PENALTIES[14], None),
        ("penalty", ["死刑", "政治权利"], "死刑", "penalty '政治权利' unknown, dropped"),
        ("penalty", ["死刑", "拘役"], None, "penalty missing or of no class"),
        ("penalty", "死刑、拘役", None, "penalty missing or of no class"),
        ("penalty", "6个月", None, "penalty missing or of no class"),
        ("penalty", 2, None, "penalty missing or of no class"),
    ],
)
def test_one_thing_wrong(
    labels: Labels, field: str, written: object, read: object, repair: str | None
) -> None:
    """None is read where the answer is a guess."""
    decoded = decode(reply_with(**{field: written}), ONE, labels)
    assert list(check(ONE, write(ONE, decoded.answer), labels)) == []
    expected = {**GUESS, "penalty": "拘役", field: GUESS[field] if read is None else read}
    assert decoded.answer == {"judgments": [{"name": "甲", **expected}]}
    assert decoded.from_fallback == (((0, field),) if read is None else ())
    repair = repair or f"penalty {written!r} -> {read!r}"
    assert repair in [text.removeprefix("甲: ") for text in decoded.repairs]


def test_more_labels_than_in_training_are_cut_and_a_runaway_list_is_not_read_to_its_end(
    labels: Labels,
) -> None:
    decoded = decode(reply_with(charges=["诈骗罪", "开设赌场罪", "盗窃罪"]), ONE, labels)
    assert value(decoded, "charges") == ["诈骗罪", "开设赌场罪"]
    assert decoded.repairs == ("甲: charges cut to 2, the most in training",)
    for junk, charges in ((7, ["诈骗罪"]), (8, None)):  # four times the two of training
        decoded = decode(reply_with(charges=["抢劫罪"] * junk + ["诈骗罪"] * 10_000), ONE, labels)
        assert value(decoded, "charges") == charges
        assert len(decoded.repairs) <= 9


UNKNOWN = {"charges": ["未知罪"], "articles": ["9"], "penalty": "流放"}
PERSON = st.fixed_dictionaries(
    {}, optional={field: st.sampled_from([OWN[field], UNKNOWN[field]]) for field in OWN}
)
PEOPLE = st.fixed_dictionaries({"甲": PERSON, "乙": PERSON, "丙": PERSON})


@given(PEOPLE, st.permutations("甲乙丙"))
def test_what_a_reply_has_is_kept_and_everything_else_is_a_guess(
    labels: Labels, people: dict[str, dict[str, object]], order: list[str]
) -> None:
    case = Example(id=1, text="事实", names=("甲", "乙", "丙"))
    reply = dump({"judgments": [{"name": name, **people[name]} for name in order]})
    decoded = decode(reply, case, labels)
    for number, judgment in enumerate(decoded.answer["judgments"]):
        for field, own in OWN.items():
            is_kept = people[judgment["name"]].get(field) == own
            assert ((number, field) in decoded.from_fallback) == (not is_kept)
            assert not is_kept or judgment[field] == own


@pytest.mark.parametrize("reply", ["", '{"judgments":[]}', '{"name":"乙","charges":["盗窃罪"]}'])
def test_an_unreadable_reply_is_guessed_from_end_to_end(labels: Labels, reply: str) -> None:
    decoded = decode(reply, ONE, labels)
    assert decoded.answer == {"judgments": [{"name": "甲", **GUESS}]}
    assert decoded.from_fallback == tuple((0, field) for field in GUESS)
    assert not decoded.readable
    without_labels = decode(reply, ONE, Labels()).answer["judgments"]
    assert without_labels == [
        {"name": "甲", "charges": [], "articles": [], "penalty": PENALTIES[10]}
    ]


def labels_of(*pairs: tuple[str, str]) -> Labels:
    """Return the labels of a training whose defendants have these charges and articles."""
    return collect(
        {"charges": [charge], "articles": [article], "penalty": [PENALTIES[10]]}
        for charge, article in pairs
    )


SMUGGLING = "走私国家禁止进出口的货物、物品罪"
KNOWN = labels_of(("盗窃罪", "264"), ("帮助信息网络犯罪活动罪", "287.2"), (SMUGGLING, "152-2"))


@pytest.mark.parametrize(
    ("charge", "article", "read"),
    [
        (SMUGGLING, "152", ["152-2"]),
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


TWINS = labels_of(
    ("盗窃", "303-2"),
    ("盗窃罪", "303－2"),
    ("掩饰、隐瞒犯罪所得罪", "264"),
    ("掩饰，隐瞒犯罪所得罪", "264"),
    ("搶劫罪（未遂）", "264"),
    ("搶劫罪(未遂)", "264"),
)


@pytest.mark.parametrize("charge", TWINS.counts["charges"])
def test_of_two_labels_that_look_equal_neither_becomes_the_other(charge: str) -> None:
    decoded = decode(f"```{reply_with(charges=[charge])}```", ONE, TWINS)
    assert value(decoded, "charges") == [charge]


@pytest.mark.parametrize(
    ("field", "written"),
    [
        ("charges", "盗 窃"),
        ("charges", "“盗窃罪”"),
        ("charges", "掩饰隐瞒犯罪所得罪"),
        ("charges", "搶劫罪（未遂)"),
        ("articles", "第303条第2款"),
    ],
)
def test_what_may_be_either_of_two_labels_that_look_equal_is_unknown(
    field: str, written: str
) -> None:
    decoded = decode(reply_with(**{field: [written]}), ONE, TWINS)
    assert value(decoded, field) is None
    assert f"甲: {field} {written!r} unknown, dropped" in decoded.repairs


def test_labels_that_look_equal_are_named() -> None:
    assert list(TWINS.look_alikes(["charges", "articles", "penalty"])) == [
        "charges '掩饰、隐瞒犯罪所得罪', '掩饰，隐瞒犯罪所得罪' look equal; keep one spelling",
        "charges '搶劫罪(未遂)', '搶劫罪（未遂）' look equal; keep one spelling",
        "charges '盗窃', '盗窃罪' look equal; keep one spelling",
        "articles '303-2', '303－2' look equal; keep one spelling",
    ]
    assert not list(KNOWN.look_alikes(["charges", "articles", "penalty"]))
