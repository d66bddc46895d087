"""What the text classifier is fitted on, and what it learns."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from panjue.finetune.classifier.calibration import FOLDS, fit_calibration
from panjue.finetune.classifier.classifier import Classifier, read_classifier
from panjue.finetune.classifier.features import PLACES, Array
from panjue.finetune.classifier.fit import (
    MIN_CASES,
    Fitted,
    _sample,
    fit,
    save_fitted,
    training_advisor,
)
from panjue.finetune.classifier.label_sets import size_weights
from panjue.finetune.classifier.linear import MIN_ITEMS
from panjue.finetune.classifier.opinions import Advisor, opinion_text
from panjue.finetune.classifier.trees import Items, corrected_probabilities, fit_second_stage
from panjue.prompts.example import Example
from panjue.prompts.labels import merged_labels
from panjue.prompts.task import Task, load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES

SEVERITY = load_task("severity")
JUDGMENT = load_task("judgment")
ECTHR = load_task("ecthr")
WORDS = {"偷": "一年以下", "抢": "三年以上五年以下", "杀": "十年以上"}
CRIMES = {"盗窃罪": "264", "诈骗罪": "266", "放火罪": "114"}
DEEDS = {"盗窃罪": "窃取", "诈骗罪": "骗得"}
PENALTY_OF = {2: 13, 400: 6, 30: 8}  # of an amount in 万元
NAMES = ("赵甲", "钱乙")


def examples(count: int, seed: int = 0) -> list[Example]:
    """Return cases whose class one character of the text tells."""
    draw = random.Random(seed)
    cases = []
    for i in range(count):
        deed = draw.choice(list(WORDS))
        text = "".join(draw.choices("某日在村口与人", k=12)) + deed + str(i)
        cases.append(Example(id=i, text=text, answer={"label": WORDS[deed]}))
    return cases


def judgment(name: str, crime: str, penalty: int) -> dict[str, Any]:
    articles = [CRIMES[crime]]
    return {"name": name, "charges": [crime], "articles": articles, "penalty": PENALTIES[penalty]}


def case(key: int | str, text: str, crime: str, penalty: int) -> Example:
    """Return a case of defendants who are judged alike."""
    judgments = [judgment(name, crime, penalty) for name in NAMES]
    return Example(key, text, NAMES, answer={"judgments": judgments})


def thefts(
    count: int,
    seed: int = 0,
    crimes: Sequence[str] = tuple(DEEDS),
    amounts: Sequence[int] = tuple(PENALTY_OF),
) -> list[Example]:
    """Return cases in which the amount alone tells the penalty, and a co-defendant the charge."""
    draw = random.Random(seed)
    cases = []
    for i in range(count):
        amount = draw.choice(amounts)
        crime = draw.choice(crimes)
        text = f"赵甲{DEEDS[crime]}{amount + draw.random():.4f}万元。钱乙望风，编号{i}。"
        cases.append(case(i, text, crime, PENALTY_OF[amount]))
    return cases


def fitted_on(
    task: Task, train: Sequence[Example], mix: Sequence[Example] = (), seed: int = 0
) -> Fitted:
    """Fit with the labels of all these cases."""
    return fit(task, train, mix, task.ask.labels([*train, *mix]), seed, Console(quiet=True))


def classifier_of(task: Task, train: Sequence[Example], mix: Sequence[Example] = ()) -> Classifier:
    return fitted_on(task, train, mix).classifier


def likeliest(probabilities: Mapping[str, float]) -> str:
    return max(probabilities, key=lambda label: probabilities[label])


def test_labels_that_the_adapter_does_not_know_are_no_answers() -> None:
    train = examples(100)
    mix = [Example(id=f"m{i}", text=f"杀{i}", answer={"label": "没有刑期"}) for i in range(50)]
    fitted = fit(SEVERITY, train, mix, SEVERITY.ask.labels(train), 0, Console(quiet=True))
    [item] = fitted.classifier.probabilities(mix[0])
    assert set(item["label"]) == set(WORDS.values())
    assert sum(item["label"].values()) == pytest.approx(1)


@pytest.mark.parametrize("count", [60, MIN_CASES])
def test_labels_of_an_earlier_training_that_no_case_has_are_unlikely(
    count: int, tmp_path: Path
) -> None:
    """A training that starts from an adapter knows the labels of that one too."""
    train = thefts(count)
    earlier = case(0, "赵甲放火。", "放火罪", 3)
    known = merged_labels([JUDGMENT.ask.labels([earlier]), JUDGMENT.ask.labels(train)])
    fitted = fit(JUDGMENT, train, [], known, 0, Console(quiet=True))
    assert bool(fitted.classifier.second) == (count == MIN_CASES)
    save_fitted(fitted, JUDGMENT, known, tmp_path / "kept")
    advisor = training_advisor(tmp_path / "kept", JUDGMENT, known)
    alone = {"charges": "放火罪", "articles": "114", "penalty": PENALTIES[3]}
    for example in (*train[:20], earlier):
        for opinion in advisor.opinions(example):
            for name, label in alone.items():
                probabilities = opinion.probabilities[name]
                assert probabilities.get(label, 0.0) < min(0.05, max(probabilities.values()))
                assert label not in opinion.answer[name]
    assert all("放火罪" not in text for text in advisor.known.values())


def test_label_sets_with_the_empty_one_are_learnt() -> None:
    sets = {"偷": ["Article 3"], "抢": ["Article 3", "Article 6"], "杀": []}
    cases = [replace(one, answer={"labels": sets[one.text[12]]}) for one in examples(200)]
    classifier = classifier_of(ECTHR, cases)
    assert classifier.fields["labels"].sizes[0]
    for example in cases[:50]:
        [item] = classifier.probabilities(example)
        assert {"labels": [name for name, p in item["labels"].items() if p > 0.5]} == example.answer


def test_an_empty_label_list_that_training_refuses_is_not_learnt() -> None:
    refused, *cases = [case(i, f"赵甲窃取{i}，钱乙望风", "盗窃罪", 13) for i in range(20)]
    assert refused.answer
    refused.answer["judgments"][0]["charges"] = []
    assert not classifier_of(JUDGMENT, [refused, *cases]).fields["charges"].sizes[0]


def test_two_defendants_are_told_apart_by_their_own_clauses() -> None:
    draw = random.Random(0)
    cases = []
    for i in range(120):
        crimes = dict(zip(NAMES, draw.sample([*DEEDS], 2), strict=True))
        text = "，".join(f"{name}{DEEDS[crime]}财物" for name, crime in crimes.items())
        judgments = [judgment(name, crime, 13) for name, crime in crimes.items()]
        cases.append(Example(i, text, NAMES, answer={"judgments": judgments}))
    classifier = classifier_of(JUDGMENT, cases)
    items = classifier.probabilities(Example(0, "钱乙骗得财物，赵甲窃取财物", NAMES))
    assert [likeliest(item["charges"]) for item in items] == ["盗窃罪", "诈骗罪"]


def test_a_rare_label_has_its_frequency_whatever_the_text() -> None:
    rare = [Example(id=f"r{i}", text=f"杀{i}", answer={"label": "没有刑期"}) for i in range(2)]
    assert len(rare) < MIN_ITEMS
    classifier = classifier_of(SEVERITY, [*examples(98), *rare])
    place = classifier.fields["label"].labels.index("没有刑期")
    for weights in classifier.weights:
        assert not weights.todense()[:, place].any()
    assert classifier.bias[place] == pytest.approx(np.log(2.5 / 98.5), abs=0.1)


def test_the_same_cases_give_the_same_file(tmp_path: Path) -> None:
    files = []
    for seed in (0, 0, 1):
        fitted_on(SEVERITY, examples(60), seed=seed).classifier.save(tmp_path / "classifier.npz")
        files.append((tmp_path / "classifier.npz").read_bytes())
    assert files[0] == files[1] != files[2]


def test_the_same_examples_are_taken_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = examples(20)
    monkeypatch.setattr("panjue.finetune.classifier.fit.MAX_EXAMPLES", 8)
    taken = _sample(cases)
    assert len(taken) == 8
    assert taken == [one for one in cases if one in _sample(cases[::-1])]


@pytest.mark.parametrize("is_set", [True, False])
def test_scores_that_are_too_large_are_scaled_back(is_set: bool) -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(4000, 3))
    if is_set:
        gold = draw.random(logits.shape) < 1 / (1 + np.exp(-logits))
    else:
        likely = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        gold = np.eye(3, dtype=bool)[[draw.choice(3, p=p) for p in likely]]
    scale, shift = fit_calibration(logits * 4 + (2 if is_set else 0), gold, is_set)
    assert scale == pytest.approx(1 / 4, rel=0.1)
    assert shift == pytest.approx(-0.5 if is_set else 0, abs=0.1)


def test_mixed_in_cases_are_learnt_from_and_not_calibrated_on() -> None:
    cases = examples(400)
    assert classifier_of(SEVERITY, cases).fields["label"].scale != 1
    mixed = classifier_of(SEVERITY, cases[:20], cases[20:])
    assert mixed.fields["label"].scale == 1, "too few cases of its own"
    assert mixed.weights[0].nnz


def test_cases_that_teach_nothing_are_fitted() -> None:
    for count in (1, 2):  # without a common n-gram
        cases = [Example(id=i, text="甲乙"[i], answer={"label": "十年以上"}) for i in range(count)]
        [item] = classifier_of(SEVERITY, cases).probabilities(cases[0])
        assert item == {"label": {"十年以上": 1.0}}
    empty = [Example(id=i, text=f"Text {i}", answer={"labels": []}) for i in range(3)]
    assert classifier_of(ECTHR, empty).probabilities(empty[0]) == [{"labels": {}}]


def test_the_second_stage_learns_from_evidence_of_enough_cases() -> None:
    classifier = classifier_of(JUDGMENT, thefts(MIN_CASES))
    assert classifier.second
    assert classifier_of(JUDGMENT, thefts(MIN_CASES - 1)).second == {}
    right = 0
    for one in thefts(30, seed=1):
        assert one.answer
        for item, gold in zip(classifier.probabilities(one), one.answer["judgments"], strict=True):
            assert likeliest(item["charges"]) == gold["charges"][0]
            assert sum(item["penalty"].values()) == pytest.approx(1)
            right += likeliest(item["penalty"]) == gold["penalty"]
    assert right > 50


@pytest.mark.parametrize(("crimes", "amounts"), [(1, 1), (1, 2), (2, 1)])
def test_a_field_of_one_label_is_fitted_and_stored(
    crimes: int, amounts: int, tmp_path: Path
) -> None:
    cases = thefts(MIN_CASES, 0, [*DEEDS][:crimes], [*PENALTY_OF][:amounts])
    classifier = classifier_of(JUDGMENT, cases)
    assert classifier.second
    classifier.save(tmp_path / "classifier.npz")
    read = read_classifier(tmp_path / "classifier.npz", JUDGMENT.answer)
    for one in cases[:20]:
        assert one.answer
        items = read.probabilities(one)
        assert items == classifier.probabilities(one)
        for item, gold in zip(items, one.answer["judgments"], strict=True):
            assert item["charges"][gold["charges"][0]] > 0.9
            if amounts == 1:
                assert item["penalty"] == {gold["penalty"]: 1}


def theft_in_the_last(cases: list[Example]) -> Array:
    """Return the chance of theft by the cross-fitted and by the whole classifier, [2, items]."""
    fitted = fitted_on(JUDGMENT, cases)
    *_, (_, apart) = fitted.probabilities()
    whole = fitted.classifier.probabilities(cases[-1])
    return np.array([[item["charges"].get("盗窃罪", 0) for item in of] for of in (apart, whole)])


@pytest.mark.parametrize("count", [100, MIN_CASES])
def test_no_cross_fitted_opinion_knows_the_answer_of_its_own_case(count: int) -> None:
    """Of a word that only this case has, only its own answer can tell what it means."""
    others = thefts(count, amounts=[2, 400])
    rare = "".join(f"{name}麒麟。" for name in NAMES)
    of_theft = theft_in_the_last([*others, case("rare", rare, "盗窃罪", 13)])
    of_fraud = theft_in_the_last([*others, case("rare", rare, "诈骗罪", 6)])
    crossed, whole = of_theft - of_fraud
    assert (whole > 0.7).all()
    assert (crossed < 0.2).all()
    if count < MIN_CASES:
        reason = "without a second stage nothing but the scale of all cases has seen it"
        assert crossed == pytest.approx(0, abs=1e-4), reason


def test_cases_that_are_mixed_in_again_have_the_same_opinions() -> None:
    train = thefts(MIN_CASES // 2)
    mix = [replace(one, id=f"m{one.id}", answer=thefts(1)[0].answer) for one in train]
    opinions = [items for _, items in fitted_on(JUDGMENT, train, mix).probabilities()]
    assert opinions[: len(train)] == opinions[len(train) :]
    assert opinions[0] != opinions[1]


def test_a_training_shows_cross_fitted_opinions_of_the_cases_that_were_fitted_on(
    tmp_path: Path,
) -> None:
    cases = thefts(60)
    other, *answered = thefts(61, seed=1)
    cases = [replace(one, answer=by.answer) for one, by in zip(cases, answered, strict=True)]
    labels = JUDGMENT.ask.labels(cases)
    fitted = fitted_on(JUDGMENT, cases)
    save_fitted(fitted, JUDGMENT, labels, tmp_path / "classifier")
    assert [path.name for path in tmp_path.iterdir()] == ["classifier"]
    advisor = training_advisor(tmp_path / "classifier", JUDGMENT, labels)
    whole = Advisor(JUDGMENT, labels, fitted.classifier)
    assert advisor.show(other) == whole.show(other)
    for example, items in fitted.probabilities():
        told = opinion_text(example, whole.with_answers(items), JUDGMENT.answer)
        assert advisor.show(example).inputs["opinions"] == told
    assert any(advisor.show(example) != whole.show(example) for example in cases)


def test_sets_that_training_has_seldom_are_made_rare() -> None:
    # Of two independent labels of probability 0.5 a quarter of the items would have both.
    values = [["a"], ["b"], ["a"], ["a", "b"], ["unknown"]]
    sizes = size_weights("ab", values, np.full((5, 2), 0.5))
    assert sizes == pytest.approx((0, 0.75 / 0.5, 0.25 / 0.25, 0))


def test_the_second_stage_of_a_label_set_learns_from_the_others_of_a_case() -> None:
    draw = np.random.default_rng(0)

    def cases(of: int) -> tuple[Items, Array]:
        """Return cases of two items with the same one of two labels, which the first one tells."""
        first = np.repeat(draw.integers(2, size=of), 2)
        own = draw.normal(size=(2 * of, 2)) * 0.5
        own[::2] += 3 * np.eye(2)[first[::2]]
        scores = {"charges": np.stack([np.zeros_like(own), own])}
        items = Items(np.full(of, 2), scores, np.zeros((2 * of, len(PLACES))))
        return items, np.eye(2, dtype=bool)[first]

    items, gold = cases(400)
    fold = np.repeat(np.arange(400) % FOLDS, 2)
    stage, _ = fit_second_stage(items, {"charges": gold}, ["charges"], fold, Console(quiet=True))
    others, truth = cases(100)
    of_first = others.scores["charges"].sum(0).argmax(1) == truth.argmax(1)
    of_second = corrected_probabilities(stage, others)["charges"].argmax(1) == truth.argmax(1)
    assert of_first[1::2].mean() < 0.7
    assert of_second[1::2].mean() > 0.9
