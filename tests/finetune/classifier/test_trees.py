"""What the second stage of the text classifier looks at."""

from typing import Any

import numpy as np
import pytest

from panjue.finetune.classifier.features import PLACES, Array
from panjue.finetune.classifier.trees import (
    FieldTrees,
    Items,
    candidates,
    class_rows,
    corrected_probabilities,
)
from panjue.prompts.tasks.evidence import WORDS, evidence, written_number

SCORES = np.array(
    [
        [[2.0, 0.0, -1.0], [1.0, 1.0, -3.0], [0.0, 4.0, 0.0]],  # by the whole text
        [[1.0, 0.0, -1.0], [-1.0, 2.0, 0.0], [0.0, 0.0, 0.0]],  # by the own clauses
    ]
)
ITEMS = Items(np.array([2, 1]), {"charges": SCORES}, np.zeros((3, 7)))
"""A case of two items and a case of one."""


def test_candidates_worked_by_hand() -> None:
    found = candidates(ITEMS, "charges")
    assert found.item.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found.label.tolist() == [0, 1, 2, 1, 0, 2, 1, 0, 2], "by falling scores"
    for name, of_first, of_fifth in [
        ("score", 3, 0),
        ("score by the text", 2, 1),
        ("score by the own clauses", 1, -1),
        ("above the case's mean of own clauses", 1, -1),
        ("rank in the item", 0, 1),
        ("behind the item's best", 0, 3),
        ("mean of the case", 1.5, 1.5),
        ("best of the case", 3, 3),
        ("behind the case's best", 0, 0),
    ]:
        assert (found.columns[name][0], found.columns[name][4]) == (of_first, of_fifth), name
    assert found.columns["rank in the case"][[4, 6]].tolist() == [0, 0]
    assert found.columns["mean of the case"][6] == 4
    assert [*found.columns][:2] == ["label", "score"], "the order is that of the stored trees"
    assert [*found.columns][-len(PLACES) :] == [*PLACES]


def test_other_cases_change_nothing() -> None:
    alone = Items(np.array([1]), {"charges": SCORES[:, 2:]}, np.zeros((1, 7)))
    rows = candidates(alone, "charges").rows
    assert rows.tolist() == candidates(ITEMS, "charges").rows[6:].tolist()


class Trees:
    """In place of LightGBM's: they give the same for all rows, and keep these."""

    def __init__(self, given: list[Any]) -> None:
        self.given = np.array(given)

    def predict(self, rows: Array, **_: Any) -> Array:
        self.rows = rows
        return self.given


def test_the_example_of_corrected_probabilities() -> None:
    whole = {"charges": np.array([[2.0, 1.0]]), "penalty": np.array([[4.0, 5.0]])}
    own = {"charges": np.array([[1.0, -1.0]]), "penalty": np.array([[0.0, 1.0]])}
    scores = {name: np.stack([whole[name], own[name]]) for name in whole}
    items = Items(np.array([1]), scores, np.zeros((1, len(PLACES))))
    of_class = Trees([[0.6, 0.4]])
    stage = {
        "charges": FieldTrees(Trees([0.5, 0]), scaling=(0.5, -1), finish=(1, 0)),
        "penalty": FieldTrees(of_class, classes={"charges": np.array([[0.9, 0.1], [0.2, 0.8]])}),
    }
    found = corrected_probabilities(stage, items)
    assert found["charges"] == pytest.approx(np.array([[0.73, 0.27]]), abs=0.005)
    assert found["penalty"].tolist() == [[0.6, 0.4]]
    assert of_class.rows[0, :4] == pytest.approx([4, 6, 0.71, 0.29], abs=0.005)


def test_a_class_knows_what_to_expect_of_the_label_sets() -> None:
    items = Items(np.array([1]), {"penalty": np.ones((2, 1, 2))}, np.array([[9.0]]))
    believed = {"charges": np.array([[0.5, 0.25]])}
    tables = {"charges": np.array([[1.0, 0.0], [0.4, 0.6]])}
    assert class_rows(items, "penalty", believed, tables) == pytest.approx(
        np.array([[2, 2, (0.5 + 0.25 * 0.4) / 0.75, 0.25 * 0.6 / 0.75, 9]])
    )


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", [0] * 8),
        ("骗得3万元，又骗得2,000余元。", [np.log10(30001), np.log10(32001), 2, 0, 0, 0, 0, 0]),
        ("两次贩卖冰毒1.5千克", [0, 0, 0, np.log10(1501), np.log10(1501), 1, 1, 0]),
        ("获利1 000元，又获１．５万元", [np.log10(15001), np.log10(16001), 2, 0, 0, 0, 0, 0]),
        ("于2010 100元", [np.log10(101), np.log10(101), 1, 0, 0, 0, 0, 0]),
        ("得三千五百元、二十余万元", [np.log10(200001), np.log10(203501), 2, 0, 0, 0, 0, 0]),
        ("毒品叁拾克、一点五千克", [0, 0, 0, np.log10(1501), np.log10(1531), 2, 0, 0]),
        ("数十万元在三元里", [0] * 8),
        ("二○万元", [np.log10(200001), np.log10(200001), 1, 0, 0, 0, 0, 0]),
        ("一" * 5000 + "元", [np.log10(1e15 + 1), np.log10(1e15 + 1), 1, 0, 0, 0, 0, 0]),
        ("2020年3月，" + "9" * 400 + "元", [15, 15, 1, 0, 0, 0, 0, 1]),
        *[(digits, [0] * 8) for digits in ("1" + " " * 20_000, "1" * 20_000, "1," * 20_000)],
        *[(digits, [0] * 8) for digits in ("1 000 " * 20_000, "一" * 20_000, "一百" * 20_000)],
    ],
)
def test_amounts_weights_and_acts(text: str, numbers: list[float]) -> None:
    """Also a long number without a unit comes to an end."""
    assert evidence(text)[:8] == pytest.approx(numbers, abs=1e-6)
    assert len(evidence(text)) == 8 + len(WORDS)


@pytest.mark.parametrize(
    ("numeral", "value"),
    [
        *[("三千", 3000), ("十二万五千", 125_000), ("一万零五百", 10_500), ("二〇〇", 200)],
        *[("三亿五千万", 350_000_000), ("一万亿", 1e12), ("壹佰贰拾叁万肆仟", 1_234_000)],
        *[("一点五万", 15_000), ("十五点二五", 15.25), ("两", 2), ("三四千", 4000), ("五六", 6)],
        *[("二〇", 20), ("二〇万", 200_000), ("一百二〇", 120), ("二〇五万", 2_050_000)],
        *[("一百〇五", 105), ("四百四十四万零九百九十六", 4_440_996), ("一二三", 123)],
        *[("一二五万", 1_250_000), ("五六万零五十", 60_050), ("二○万", 200_000), ("貳拾參", 23)],
        *[("十点五", 10.5), ("零点二五", 0.25), ("一五点二", 15.2), ("一" * 5000, float("inf"))],
    ],
)
def test_chinese_numerals(numeral: str, value: float) -> None:
    assert written_number(numeral) == pytest.approx(value)
