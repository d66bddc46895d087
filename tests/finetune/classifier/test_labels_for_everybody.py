"""Everybody gets a label and a confidence that can be true, whatever the training and the text."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from panjue.finetune.classifier.calibration import UNSURE
from panjue.finetune.classifier.fit import MIN_CASES, fit
from panjue.finetune.classifier.opinions import Advisor
from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, load_task
from tests.finetune.classifier.test_fit import NAMES, WORDS, examples, thefts

JUDGMENT = load_task("judgment")
SEVERITY = load_task("severity")
ECTHR = load_task("ecthr")

ARTICLES = ("Article 2", "Article 3", "Article 5")

UNSEEN = "龘靐齉爩鱻麤龗灪"
"""Words that no training has."""


def real_cases(path: Path) -> Sequence[Example]:
    cases = list(Reader(JUDGMENT).read(path))
    frequent = set(islice(JUDGMENT.ask.labels(cases).counts["charges"], 5))  # the fit is faster
    chosen = []
    for case in cases:
        assert case.answer
        charges = [item["charges"] for item in case.answer["judgments"]]
        if frequent.issuperset(chain.from_iterable(charges)):
            chosen.append(case)
    return chosen[:MIN_CASES]


def violations() -> Sequence[Example]:
    """Return cases with one label each, of a task whose cases may have none."""
    cases = []
    for one in examples(120):
        assert one.answer
        number = [*WORDS.values()].index(one.answer["label"])
        cases.append(Example(one.id, one.text, answer={"labels": [ARTICLES[number]]}))
    return cases


TRAININGS: Mapping[str, tuple[Task, Callable[[], Sequence[Example]]]] = {
    "separable": (JUDGMENT, lambda: thefts(120)),
    "separable, with a second stage": (JUDGMENT, lambda: thefts(MIN_CASES)),
    "classes": (SEVERITY, lambda: examples(120)),
    "a set that may be empty but is not": (ECTHR, violations),
    "tiny": (JUDGMENT, lambda: thefts(6)),
    "one case": (JUDGMENT, lambda: thefts(1)),
    "one label": (JUDGMENT, lambda: thefts(120, 0, ["盗窃罪"], [2])),
    "one label, with a second stage": (JUDGMENT, lambda: thefts(MIN_CASES, 0, ["盗窃罪"], [2])),
}
REAL = pytest.param("real", marks=pytest.mark.real_data)
ALL = [*TRAININGS, REAL]
SEVERAL_LABELS = [*(name for name in TRAININGS if not name.startswith("one")), REAL]

Training = tuple[Advisor, Sequence[Example]]


@pytest.fixture(scope="module")
def training(request: pytest.FixtureRequest) -> Training:
    """Return the advisor of the training that a test names, and its cases."""
    if request.param == "real":
        task = JUDGMENT
        cases = real_cases(request.getfixturevalue("real_data") / "drdz/train.jsonl")
    else:
        task, cases_of = TRAININGS[request.param]
        cases = cases_of()
    labels = task.ask.labels(cases)
    return Advisor(
        task, labels, fit(task, cases, [], labels, 0, Console(quiet=True)).classifier
    ), cases


def answered(advisor: Advisor, example: Example) -> list[tuple[Mapping[str, Any], Any, Any]]:
    """Return the answer to each item, the probabilities of its labels, and the confidences."""
    opinions = advisor.opinions(example)
    answer = advisor.alone(example, opinions)
    nothing = advisor.task.ask.decode("", example, advisor.labels)
    confidence = advisor.confidence(nothing, answer, opinions, {})
    items = advisor.task.answer.items_of(answer)
    probabilities = [opinion.probabilities for opinion in opinions]
    return list(zip(items, probabilities, confidence, strict=True))


def texts(cases: Sequence[Example], words: str = UNSEEN) -> st.SearchStrategy[str]:
    """Return texts of the training's characters, of `words`, of names and of numbers."""
    seen = "".join(case.text for case in cases[:20])
    pieces = st.sampled_from([*seen, *words, "甲1", "甲2", "3万元", "，", "。"])
    return st.lists(pieces, max_size=40).map("".join)


@pytest.mark.parametrize("training", ALL, indirect=True)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), persons=st.integers(1, 60))
def test_everybody_gets_a_label(training: Training, data: st.DataObject, persons: int) -> None:
    advisor, cases = training
    names = tuple(f"甲{number}" for number in range(persons))
    example = Example("?", data.draw(texts(cases)), names)
    items = answered(advisor, example)
    assert len(items) == (persons if advisor.task.answer.items else 1)
    for item, probabilities, confidence in items:
        for field in advisor.task.answer.fields:
            assert item[field], "training has no item without"
            of_labels = probabilities[field].values()
            assert all(0 < chance <= 1 + 1e-6 for chance in of_labels)
            assert UNSURE <= confidence[field] <= 1 - UNSURE


@pytest.mark.parametrize("training", ALL, indirect=True)
def test_cases_of_the_training_have_labels_too(training: Training) -> None:
    advisor, cases = training
    for example in cases[:20]:
        for item, _, confidence in answered(advisor, example):
            assert all(item[field] for field in advisor.task.answer.fields)
            assert all(UNSURE <= chance <= 1 - UNSURE for chance in confidence.values())


@pytest.mark.parametrize("training", ALL, indirect=True)
def test_predictions_of_many_cases_are_those_of_each(training: Training) -> None:
    advisor, cases = training
    several = [*cases[:30], Example("?", UNSEEN, NAMES), Example("!", "", ("甲", *NAMES))]
    alone = [advisor.classifier.probabilities(example) for example in several]
    for items, items_alone in zip(advisor.classifier.predict(several), alone, strict=True):
        for item, item_alone in zip(items, items_alone, strict=True):
            for field, of_labels in item.items():
                assert of_labels == pytest.approx(item_alone[field], rel=0, abs=1e-9)


@pytest.mark.parametrize("training", SEVERAL_LABELS, indirect=True)
def test_unseen_words_are_no_reason_to_be_sure(training: Training) -> None:
    advisor, cases = training
    about = [f"{person}{UNSEEN}" for person in NAMES]
    for text in (UNSEEN, "，".join(about)):
        unseen = answered(advisor, Example("?", text, NAMES))
        seen = chain.from_iterable(answered(advisor, example) for example in cases[:10])
        surest = dict.fromkeys(advisor.task.answer.fields, 0.0)
        for _, _, confidence in seen:
            surest = {field: max(surest[field], chance) for field, chance in confidence.items()}
        for _, _, confidence in unseen:
            for field, chance in confidence.items():
                assert chance < min(0.7, surest[field])
