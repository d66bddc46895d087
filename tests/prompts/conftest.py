"""A small label set and a case of two defendants, for all tests of the contract."""

import pytest

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, collect
from panjue.prompts.tasks.judgment.penalties import PENALTIES

TRAINING = (
    (["盗窃罪"], ["264"], 13),
    (["盗窃罪"], ["264"], 10),
    (["盗窃罪", "诈骗罪"], ["264", "266"], 10),
    (["诈骗罪"], ["266"], 8),
    (["故意伤害罪"], ["234"], 2),
    (["开设赌场罪"], ["303-2"], 10),
    (["掩饰、隐瞒犯罪所得、犯罪所得收益罪"], ["312", "303", "287.2"], 0),
)


@pytest.fixture(scope="session")
def labels() -> Labels:
    """Return label sets with at most two charges and three articles; the commonest are
    盗窃罪, 264 and class 10."""
    return collect(
        {"charges": charges, "articles": articles, "penalty": [PENALTIES[penalty]]}
        for charges, articles, penalty in TRAINING
    )


@pytest.fixture(scope="session")
def case() -> Example:
    """Return a case of 张某甲 and 李某, with a gold answer."""
    return Example(
        id=7,
        text="被告人张某甲、李某共同行窃。李某另行骗。",
        names=("张某甲", "李某"),
        inputs={"defendants": "张某甲、李某"},
        answer={
            "judgments": [
                judgment("张某甲", ["盗窃罪"], ["264"], 12),
                judgment("李某", ["盗窃罪", "诈骗罪"], ["264", "303-2"], 8),
            ]
        },
    )


def judgment(name: str, charges: list[str], articles: list[str], penalty: int) -> dict[str, object]:
    return {"name": name, "charges": charges, "articles": articles, "penalty": PENALTIES[penalty]}
