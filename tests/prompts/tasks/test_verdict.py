"""A judgment in words is read, or refused with the reason; never read as something else."""

import pytest

from panjue.prompts.plumbing.errors import NotSaid
from panjue.prompts.tasks.judgment.charges import charges_in, inserted_article, is_article
from panjue.prompts.tasks.judgment.citations import cited_articles
from panjue.prompts.tasks.judgment.terms import money_of, penalty_of
from panjue.prompts.tasks.judgment.verdict import verdict_of

READ = {
    "张某犯盗窃罪，有期徒刑三年。刑法第264条": [("张某", ["盗窃罪"], ["264"], 36)],
    "被告人张某犯盗窃罪未遂，从轻判处有期徒刑一年半。刑法第264条": [
        ("张某", ["盗窃罪"], ["264"], 18)
    ],
    "被告人张某的行为触犯了刑法第二百六十四条，构成盗窃罪，应判处三年有期徒刑。": [
        ("张某", ["盗窃罪"], ["264"], 36)
    ],
    (
        "被告人张某犯盗窃罪、诈骗罪，分别判处有期徒刑三年、二年，"
        "数罪并罚决定执行有期徒刑四年。第264条、266条"
    ): [("张某", ["盗窃罪", "诈骗罪"], ["264", "266"], 48)],
    (
        "被告人张某犯盗窃罪，判处有期徒刑三年，犯诈骗罪，判处有期徒刑二年，"
        "合并执行有期徒刑四年。第264条"
    ): [("张某", ["盗窃罪", "诈骗罪"], ["264"], 48)],
    (
        "被告人张某犯盗窃罪，判处有期徒刑三年；与前罪尚未执行的刑罚并罚，"
        "决定执行有期徒刑三年六个月。第264条"
    ): [("张某", ["盗窃罪"], ["264"], 42)],
    (
        "辩护人认为应适用刑法第266条。依照《刑法》第264条，判决如下：1.张某犯盗窃罪，"
        "判处有期徒刑3年；2.陈和平犯盗窃罪，判处有期徒刑2年。"
    ): [
        ("张某", ["盗窃罪"], ["264"], 36),
        ("陈和平", ["盗窃罪"], ["264"], 24),
    ],
    (
        "被告人张某违反刑法第264条，犯盗窃罪，判处有期徒刑一年。"
        "被告人李某违反刑法第312条，犯掩饰、隐瞒犯罪所得罪，判处有期徒刑二年。"
    ): ("a crime without a person"),
    "被告人张某犯盗窃罪，判处有期徒刑三年；被告人李某犯诈骗罪，判处有期徒刑二年。刑法第264条": (
        "articles of several persons together"
    ),
    (
        "被告人张某犯盗窃罪，判处有期徒刑三年。参照刑法第二百六十四条至第二百六十七条"
    ): "a range of articles",
    "被告人张某犯盗窃罪，判处有期徒刑三年。刑法第四百六十四条": (
        "an article that the Criminal Law does not have"
    ),
    (
        "被告人张某犯盗窃罪，判处有期徒刑三年，减刑至二年。刑法第264条"
    ): "a clause that is not understood",
    (
        "被告人张某犯盗窃罪，判处有期徒刑三年或者拘役六个月。刑法第264条"
    ): "a penalty that cannot be read",
    "张某没有犯盗窃罪，判处有期徒刑三年。刑法第264条": "a name that is not certain",
    "张某可能构成盗窃罪，判处有期徒刑三年。刑法第264条": "a name that is not certain",
    "张某犯盗窃罪，李某系从犯，判处有期徒刑三年。刑法第264条": "a penalty without one person",
    "张某伙同李某犯盗窃罪，判处有期徒刑三年。刑法第264条": "a name that is not certain",
    (
        "被告人张某犯盗窃罪，被告人李某系从犯，判处有期徒刑三年。刑法第264条"
    ): "a penalty without one person",
    "被告人张某的行为触犯《刑法》第264条，判处有期徒刑三年。": "a person without a crime",
    "被告人张某的行为触犯《刑法》第264条，分别判处拘役三个月、二个月。": "a person without a crime",
    "被告人张某犯盗窃罪，判处有期徒刑三年\n六个月。刑法第264条": [
        ("张某", ["盗窃罪"], ["264"], 42)
    ],
}
"""Text -> name, charges, articles and months of each person; or the kind of the reason."""


@pytest.mark.parametrize("text", READ)
def test_judgments_in_words(text: str) -> None:
    expected = READ[text]
    if isinstance(expected, str):
        with pytest.raises(NotSaid) as refused:
            verdict_of(text)
        assert refused.value.kind == expected
        return
    outcomes = verdict_of(text).outcomes
    read = [
        (o["name"], o["charges"], o["articles"], o["penalty"]["imprisonment"]) for o in outcomes
    ]
    assert read == expected


def test_articles_of_nobody_are_told() -> None:
    text = (
        "被告人张某犯盗窃罪，判处拘役一个月；被告人李某犯盗窃罪，判处拘役二个月。"
        "第264条、第25条第1款"
    )
    verdict = verdict_of(text)
    assert [outcome["articles"] for outcome in verdict.outcomes] == [["264"], ["264"]]
    assert verdict.of_nobody == ("25-1",)


@pytest.mark.parametrize(
    ("written", "charges"),
    [
        ("掩饰、隐瞒犯罪所得罪", ("掩饰、隐瞒犯罪所得罪",)),
        (
            "掩饰、隐瞒犯罪所得、犯罪所得收益罪和盗窃罪",
            ("掩饰、隐瞒犯罪所得、犯罪所得收益罪", "盗窃罪"),
        ),
        ("盗窃、诈骗、抢劫罪", ("盗窃罪", "诈骗罪", "抢劫罪")),
        ("[非法][制造、买卖]枪支", ("非法制造、买卖枪支罪",)),
        ("运送他人偷越国(边)境", ("运送他人偷越国（边）境罪",)),
        ("盗窃、抢夺枪支、弹药罪;寻衅滋事", ("盗窃、抢夺枪支、弹药罪", "寻衅滋事罪")),
        ("强奸、猥亵儿童罪", ("强奸罪", "猥亵儿童罪")),
        ("破坏风景罪", None),
        ("盗窃罪、破坏风景罪", None),
        ("走私", None),
        ("罪", None),
    ],
)
def test_the_names_of_the_law_decide(written: str, charges: tuple[str, ...] | None) -> None:
    assert charges_in(written) == charges


@pytest.mark.parametrize(
    ("text", "articles"),
    [
        (
            "《中华人民共和国刑法》（2020年修正）第二百六十四条、第六十七条第一款、第三款",
            ["264", "67-1", "67-3"],
        ),
        ("刑法第287条之二第1款和第三百四十七条第二款第（一）项", ["287.2-1", "347-2"]),
        ("《刑事诉讼法》第二百零一条、《刑法》第133条之1", ["133.1"]),
        ("《刑法修正案（十一）》第三条，香烟三百条", []),
        ("道路交通安全法第九十一条", []),
    ],
)
def test_citations(text: str, articles: list[str]) -> None:
    assert cited_articles(text) == articles


def test_a_range_at_the_beginning_is_shown() -> None:
    with pytest.raises(NotSaid, match="刑法第5条至第9条"):
        cited_articles("刑法第5条至第9条之规定，判处被告人有期徒刑三年")


def test_articles_of_the_law() -> None:
    assert all(map(is_article, ("1", "452", "303-2", "287.2", "120.6", "17.1")))
    assert not any(map(is_article, ("0", "453", "264.1", "287.3", "x", "")))
    assert inserted_article("帮助信息网络犯罪活动罪") == "287.2"
    assert inserted_article("虐待被监护人罪") == "260.1"  # a part of the whole name
    assert inserted_article("盗窃罪") is None


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("死刑，缓期二年执行", "death_penalty", True),
        ("无期徒刑", "life_imprisonment", True),
        ("有期徒刑十年零六个月", "imprisonment", 126),
        ("有期徒刑壹拾贰年", "imprisonment", 144),
        ("有期徒刑　３ 年", "imprisonment", 36),
        ("两年又三个月有期徒刑", "imprisonment", 27),
        ("拘役3个月", "detention", 3),
        ("管制半年", "surveillance", 6),
    ],
)
def test_terms(words: str, field: str, value: object) -> None:
    penalty = penalty_of(words)
    assert penalty is not None
    assert {key: one for key, one in penalty.items() if one} == {field: value}


@pytest.mark.parametrize(
    "words",
    [
        "三年",
        "有期徒刑",
        "有期徒刑三十六年",
        "有期徒刑一二年",
        "有期徒刑三年以下",
        "拘役一个月十五日",
        "拘役两年",
        "",
    ],
)
def test_what_is_no_term_of_the_law(words: str) -> None:
    assert penalty_of(words) is None


@pytest.mark.parametrize(
    ("text", "yuan"),
    [
        ("五千元", 5000),
        ("1.5万元", 15000),
        ("人民币壹拾壹万伍仟元", 115000),
        ("5000元", 5000),
        ("若干", None),
    ],
)
def test_money(text: str, yuan: float | None) -> None:
    assert money_of(text) == yuan
