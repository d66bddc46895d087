"""What a reply does not say is a guess, and what it says twice in two ways is not said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.example import Decoded, Example
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.files import dump
from panjue.prompts.tasks.judgment.repair import PENALTIES
from panjue.prompts.tasks.judgment.task import decode

FIELDS = ("charges", "articles", "penalty")
CASE = Example(id=1, text="事实", names=("甲",))


def reply_with(**fields: str) -> str:
    """Return a reply on 甲; the values of the fields are written as given."""
    own = {"charges": '["盗窃罪"]', "articles": '["264"]', "penalty": '"拘役"', **fields}
    inner = ",".join(f'"{key}":{value}' for key, value in own.items())
    return f'{{"judgments":[{{"name":"甲",{inner}}}]}}'


def value(decoded: Decoded, field: str) -> object:
    """Return what is read of a field; None if it is guessed."""
    return None if decoded.is_guess(0, field) else decoded.answer["judgments"][0][field]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        # Several classes.
        ('["死刑","有期徒刑六个月以下"]', None),
        ('[["死刑"],["拘役"]]', None),
        ('"死刑","拘役"', None),
        ('"死刑" 或 "拘役"', None),
        ('"死刑","刑罚":"拘役"', None),
        ('"死刑、拘役"', None),
        ("0,2", None),
        ('{"主刑":"死刑","附加刑":"拘役"}', None),
        # A number that is not the number of a class.
        ("3 个月", None),
        ("[3 4]", None),
        ("[-1]", None),
        ("1.5", None),
        # One class, in whatever form.
        ('["死刑"]', "死刑"),
        ('"死刑","刑罚":"死刑"', "死刑"),
        ('["死刑",0]', "死刑"),
        ('["单处罚金","免予刑事处罚"]', PENALTIES[14]),
        ('["死刑","剥夺政治权利终身"]', "死刑"),  # what is no class is dropped
        ("死刑", "死刑"),
    ],
)
def test_a_penalty_of_several_classes_is_no_answer(
    labels: Labels, written: str, read: str | None
) -> None:
    decoded = decode(reply_with(penalty=written), CASE, labels)
    assert value(decoded, "penalty") == read
    assert decoded.repairs
    assert value(decoded, "charges") == ["盗窃罪"]
    assert value(decoded, "articles") == ["264"]


@pytest.mark.parametrize("end", ["", " ", " 个", " 个月"])
def test_a_number_that_is_cut_from_its_unit_is_no_class(labels: Labels, end: str) -> None:
    reply = reply_with(penalty=f"3{end}").removesuffix("}]}")
    assert value(decode(reply, CASE, labels), "penalty") is None


KNOWN = collect(
    {"charges": [charge], "articles": [article], "penalty": [PENALTIES[10]]}
    for charge, article in (
        ("其他罪", "999"),
        ("其他罪", "999"),
        ("盗窃罪", "264"),
        ("诈骗罪", "266"),
        ("诈骗罪", "287"),
        ("帮助信息网络犯罪活动罪", "287.2"),
        ("走私国家禁止进出口的货物、物品罪", "152-2"),
    )
)


@pytest.mark.parametrize(
    ("field", "written", "read"),
    [
        ("articles", "[第287条之二]", ["287.2"]),  # without quotation marks
        ("articles", "[第287条之九]", None),
        ("articles", "[26 4]", None),
        ("articles", "[2 64]", None),
        ("articles", "264,266", None),  # nobody can say where the list ends
        ("articles", '["264"],["266"]', None),
        ("articles", '["264" "266"]', ["264"]),  # cut to one, the most in training
        ("articles", "[[264]]", ["264"]),
        ("charges", "[盗窃罪]", ["盗窃罪"]),
        ("charges", '"盗窃罪","诈骗罪"', None),
        ("charges", "null", None),
    ],
)
def test_a_value_counts_whole_or_not_at_all(
    field: str, written: str, read: list[str] | None
) -> None:
    assert value(decode(reply_with(**{field: written}), CASE, KNOWN), field) == read


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
        decoded = decode(reply, CASE, labels)
        assert decoded.guesses == tuple((0, field) for field in FIELDS)
        assert not decoded.readable


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
    decoded = decode(reply_with(charges=dump([charge]), articles=dump([article])), CASE, KNOWN)
    assert value(decoded, "articles") == read
    if read and read != [article]:
        assert f"甲: articles {article!r} -> '152-2'" in decoded.repairs
    if not read:
        assert f"甲: articles {article!r} unknown, dropped" in decoded.repairs


TWINS = collect(
    {"charges": [charge], "articles": [article], "penalty": [PENALTIES[10]]}
    for charge, article in (
        *(("其他罪", "999"),) * 3,
        ("盗窃", "303-2"),
        ("盗窃罪", "303－2"),
        ("掩饰、隐瞒犯罪所得罪", "264"),
        ("掩饰，隐瞒犯罪所得罪", "264"),
        ("抢劫罪", "264"),
        ("搶劫罪（未遂）", "264"),
        ("搶劫罪(未遂)", "264"),
    )
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
        assert value(decode(reply, CASE, TWINS), "charges") == [charge]


def test_what_may_be_either_of_two_labels_that_look_equal_is_unknown() -> None:
    for written in ("盗 窃", "“盗窃罪”", "掩饰隐瞒犯罪所得罪", "搶劫罪（未遂)"):
        decoded = decode(reply_with(charges=dump([written])), CASE, TWINS)
        assert value(decoded, "charges") is None
        assert f"甲: charges {written!r} unknown, dropped" in decoded.repairs
    for article, read in (("303-2", ["303-2"]), ("303－2", ["303－2"]), ("第303条第2款", None)):
        decoded = decode(reply_with(articles=dump([article])), CASE, TWINS)
        assert value(decoded, "articles") == read


def test_labels_that_look_equal_are_named() -> None:
    assert list(TWINS.look_alikes(["charges", "articles", "penalty"])) == [
        "charges '掩饰、隐瞒犯罪所得罪', '掩饰，隐瞒犯罪所得罪' look equal; keep one spelling",
        "charges '搶劫罪(未遂)', '搶劫罪（未遂）' look equal; keep one spelling",
        "charges '盗窃', '盗窃罪' look equal; keep one spelling",
        "articles '303-2', '303－2' look equal; keep one spelling",
    ]
    assert not list(KNOWN.look_alikes(["charges", "articles", "penalty"]))


def test_chinese_commas_and_colons_are_read_between_values(labels: Labels) -> None:
    reply = (
        '{"name"："甲"，"charges"：["盗窃罪"，"诈骗罪"],"articles":[264，"266"],"penalty":2，"x":1}'
    )
    decoded = decode(reply, CASE, labels)
    assert value(decoded, "charges") == ["盗窃罪", "诈骗罪"]
    assert value(decoded, "articles") == ["264", "266"]
    assert value(decoded, "penalty") == "拘役"
