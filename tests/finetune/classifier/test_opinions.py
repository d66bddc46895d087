"""The classifier's opinion: its sets, its text in prompts, and its answers beside a reply's."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import chain, combinations
from math import exp
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from panjue.finetune.classifier.label_sets import (
    LABELS_OF_SETS,
    MEMBERS,
    best_sets,
    highest_first,
    set_chances,
)
from panjue.finetune.classifier.opinions import Advisor, Opinion, case_key, opinion_text
from panjue.prompts.example import Example
from panjue.prompts.plumbing.files import dump
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from tests.records import believing

JUDGMENT = load_task("judgment")


def all_sets(labels: str, most: int) -> list[frozenset[str]]:
    sizes = (combinations(labels, size) for size in range(most + 1))
    return [frozenset(picked) for picked in chain.from_iterable(sizes)]


def expected_f1(chosen: frozenset[str], chances: dict[frozenset[str], float]) -> float:
    expected = 0.0
    for gold, p in chances.items():
        labels = len(chosen) + len(gold)
        expected += p * (2 * len(chosen & gold) / labels if labels else 1)
    return expected


CHANCES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 0.99), min_size=1)
SIZES = st.tuples(st.just(0.0) | st.floats(0.1, 3), *[st.floats(0.1, 3)] * 3)


def best_set(sizes: tuple[float, ...], opinion: dict[str, float], most: int) -> list[str]:
    [chosen] = best_sets(sizes, [opinion], most)
    return chosen


@given(CHANCES, SIZES, st.integers(1, 6))
def test_the_best_set_is_the_best_of_all_sets(
    opinion: dict[str, float], sizes: tuple[float, ...], most: int
) -> None:
    ranked = highest_first(opinion, opinion)
    sets = [frozenset(labels) for labels in all_sets("".join(ranked), 3)]
    sets += [frozenset(ranked[:size]) for size in range(4, len(ranked) + 1)]
    chances = dict(zip(sets, set_chances(sizes, opinion, sets), strict=True))
    chosen = best_set(sizes, opinion, most)
    assert len(chosen) <= most
    assert chosen or sizes[0], "only training's empty sets make an answer empty"
    assert chosen == highest_first(chosen, opinion)
    best = max(expected_f1(candidate, chances) for candidate in all_sets("abcdef", most))
    assert expected_f1(frozenset(chosen), chances) == pytest.approx(best)


@given(st.lists(CHANCES, max_size=5), SIZES, st.integers(0, 6))
def test_the_best_sets_of_many_items_are_those_of_each(
    opinions: list[dict[str, float]], sizes: tuple[float, ...], most: int
) -> None:
    alone = [best_set(sizes, opinion, most) for opinion in opinions]
    assert best_sets(sizes, opinions, most) == alone


def test_of_two_equally_good_sets_the_smaller_is_chosen() -> None:
    # Odds 1 and 1/4; P(a) = 4 P(b) = 2 P(ab), so {a}: 4 + 2/3 * 2 and {a, b}: 2/3 * 5 + 2.
    assert best_set((0, 1, 2, 1), {"a": 0.5, "b": 0.2}, 2) == ["a"]
    assert best_set((0, 1, 2.1, 1), {"a": 0.5, "b": 0.2}, 2) == ["a", "b"]
    assert best_set((0, 1, 1, 1), {"b": 0.4, "a": 0.4}, 1) == ["a"], "of equal labels the first"


def test_sets_of_independent_labels_worked_by_hand() -> None:
    opinion = {"a": 0.5, "b": 0.8}  # odds 1 and 4
    sets = [frozenset("a"), frozenset("b"), frozenset("ab")]
    assert set_chances((0, 1, 1, 1), opinion, sets) == pytest.approx([1 / 9, 4 / 9, 4 / 9])
    assert set_chances((1, 1, 1, 1), opinion, [frozenset()]) == pytest.approx([1 / 10])
    # Chances 0.5 of one label and 0.4 of two; training had sets of two half as often as that.
    rare = [0.1 / 0.7, 0.4 / 0.7, 0.2 / 0.7]
    assert set_chances((0, 1, 0.5, 1), opinion, sets) == pytest.approx(rare)


def test_the_example_of_best_sets() -> None:
    opinion = {"a": 0.5, "b": 0.8}
    sets = [frozenset("a"), frozenset("b"), frozenset("ab")]
    chances = dict(zip(sets, set_chances((0, 1, 1, 1), opinion, sets), strict=True))
    assert [*chances.values()] == pytest.approx([1 / 9, 4 / 9, 4 / 9])
    terms = {}
    for size in (1, 2):
        for label in "ab":
            parts = [2 * p / (size + len(gold)) for gold, p in chances.items() if label in gold]
            terms[label, size] = sum(parts)
    assert terms == pytest.approx(
        {("a", 1): 11 / 27, ("b", 1): 20 / 27, ("a", 2): 8 / 27, ("b", 2): 14 / 27}
    )
    assert expected_f1(frozenset("b"), chances) == pytest.approx(20 / 27)
    assert expected_f1(frozenset("ab"), chances) == pytest.approx(22 / 27)
    assert best_set((0, 1, 1, 1), opinion, 2) == ["b", "a"]
    assert best_set((0, 1, 1, 1), opinion, 1) == ["b"]


def test_not_all_sets_of_many_labels_are_formed() -> None:
    # Of more labels, six form sets of up to three, and one each of four, five and six.
    assert LABELS_OF_SETS == 6
    assert Counter(MEMBERS.sum(axis=1).tolist()) == {1: 6, 2: 15, 3: 20, 4: 1, 5: 1, 6: 1}
    opinion = dict.fromkeys("abcdefgh", 0.1)
    assert set(best_set((0, 0, 0, 1), opinion, 8)) <= set("abcdef")


@given(CHANCES, SIZES)
@example({"a": 1e-12}, (0, 0.6, 0.4, 0.8))
def test_all_sets_together_are_certain(opinion: Any, sizes: tuple[float, ...]) -> None:
    every = set_chances(sizes, opinion, all_sets("".join(opinion), len(opinion)))
    assert sum(every) == pytest.approx(1)


def test_every_process_has_the_same_sets_to_the_last_bit() -> None:
    """Texts have other hashes in each process, and a sum of floats depends on its order."""
    code = """
from panjue.finetune.classifier.label_sets import best_sets, set_chances
opinion = {name: 0.1 + 0.07 * i for i, name in enumerate("abcdefgh")}
sets = [frozenset("abc"), frozenset("hgf"), frozenset("ah")]
chances = set_chances((0, 1, 1, 1), opinion, sets)
print([chance.hex() for chance in chances], best_sets((0, 1, 1, 1), [opinion], 5))
"""
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in "12"]
    command = [sys.executable, "-c", code]
    assert len({subprocess.check_output(command, env=given) for given in environments}) == 1


def test_opinions_in_a_prompt_worked_by_hand() -> None:
    penalty = {"x": 0.4, "y": 0.6}
    few = {"charges": {"a": 0.079, "b": 0.08, "c": 0.3, "d": 0.9}, "penalty": penalty}
    many = {"charges": dict.fromkeys("fedcba", 0.2), "penalty": penalty}
    answers = ((few, "d"), (many, "abc"), (many, "abcde"))
    told = [Opinion(of, {"charges": [*labels], "penalty": "y"}) for of, labels in answers]
    assert opinion_text(Example(1, "", ("甲", "乙", "丙")), told, JUDGMENT.answer).split("\n") == [
        "甲: d 90% | c 30%, b 8%; y 60% | x 40%",
        "乙: a 20%, b 20%, c 20% | d 20%; y 60% | x 40%",
        "丙: a 20%, b 20%, c 20%, d 20%, e 20%; y 60% | x 40%",
    ]
    ecthr = load_task("ecthr").answer
    for chance, line in ((0.07, "-"), (0.4, "- | a 40%")):
        none = Opinion({"labels": {"a": chance}}, {"labels": []})
        assert opinion_text(Example(1, "", ("甲",)), [none], ecthr) == line


OWN = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": PENALTIES[8]}
MODEL = {"charges": ["诈骗罪"], "articles": ["266"], "penalty": PENALTIES[13]}
CASE = Example(
    1, "事实。", ("甲", "乙"), answer={"judgments": [{"name": n, **MODEL} for n in "甲乙"]}
)
LABELS = JUDGMENT.ask.labels([CASE, Example(2, "", answer={"judgments": [OWN]})])
LOGITS = {"charges": {"盗窃罪": 4, "诈骗罪": -4}, "articles": {"264": 4, "266": -4}}
PENALTY = {PENALTIES[8]: 4, PENALTIES[13]: 0}
ADVISOR = Advisor(JUDGMENT, LABELS, believing(JUDGMENT, {**LOGITS, "penalty": PENALTY}))
WHOLE = JUDGMENT.ask.target(CASE)


@pytest.mark.parametrize(
    ("reply", "first", "second"),
    [
        (WHOLE, MODEL, MODEL),
        (dump({"judgments": [{"name": "甲", **MODEL}]}), MODEL, OWN),
        (WHOLE.replace(dump(PENALTIES[13]), '"?"', 1), {**MODEL, "penalty": PENALTIES[8]}, MODEL),
        (WHOLE.replace('["266"]', "[]", 1), {**MODEL, "articles": ["264"]}, MODEL),
        ("???", OWN, OWN),
    ],
)
def test_the_classifier_answers_what_a_reply_leaves_out(
    reply: str, first: Any, second: Any
) -> None:
    decoded = JUDGMENT.ask.decode(reply, CASE, LABELS)
    answer = ADVISOR.complete(decoded, ADVISOR.opinions(CASE))
    assert answer["judgments"] == [{"name": "甲", **first}, {"name": "乙", **second}]


def test_confidence_is_the_probability_of_what_was_answered() -> None:
    assert CASE.answer
    # The odds of 盗窃罪, of 诈骗罪 and of both; the same for the articles.
    charges = exp(-4) / (exp(4) + exp(-4) + 1)
    wanted = {"charges": charges, "articles": charges, "penalty": 1 / (1 + exp(4))}
    nothing = JUDGMENT.ask.decode("", CASE, ADVISOR.labels)
    told = ADVISOR.confidence(nothing, CASE.answer, ADVISOR.opinions(CASE), {})
    assert told == [pytest.approx(wanted)] * 2


def test_what_is_known_of_a_case_wins_over_the_classifier() -> None:
    knowing = replace(ADVISOR, known={case_key(CASE): "known"})
    assert knowing.show(replace(CASE, id=2)).inputs["opinions"] == "known"
    other = replace(CASE, names=("甲", "丙"))
    told = opinion_text(other, ADVISOR.opinions(other), JUDGMENT.answer)
    assert knowing.show(other).inputs["opinions"] == told
