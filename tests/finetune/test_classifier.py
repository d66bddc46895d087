"""What the text classifier is fitted on, and what it learns."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from panjue.eval.classifier import Classifier, LabelField, read_classifier
from panjue.eval.opinions import Advisor, opinion_text
from panjue.eval.second_stage import PLACES, Array, Items, corrected_probabilities
from panjue.finetune.calibrate import FirstStage, fit_calibration
from panjue.finetune.classifier import (
    MIN_CASES,
    MIN_ITEMS,
    Fitted,
    _sample,
    save_fitted,
    size_weights,
    training_advisor,
)
from panjue.finetune.classifier import fit as fit_known
from panjue.finetune.second_stage import FOLDS, fit_second_stage
from panjue.prompts.example import Example
from panjue.prompts.task import Task, load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES

SEVERITY, JUDGMENT = load_task("severity"), load_task("judgment")
WORDS = {"偷": "一年以下", "抢": "三年以上五年以下", "杀": "十年以上"}


def examples(count: int, seed: int = 0) -> Iterator[Example]:
    """Yield cases whose class one character of the text tells."""
    draw = random.Random(seed)
    for i in range(count):
        deed = draw.choice(list(WORDS))
        text = "".join(draw.choices("某日在村口与人", k=12)) + deed + str(i)
        yield Example(id=i, text=text, answer={"label": WORDS[deed]})


CRIMES = {"盗窃罪": "264", "诈骗罪": "266", "赌博罪": "303"}
DEEDS = {"盗窃罪": "窃取", "诈骗罪": "骗得"}


def judgment(name: str, crime: str, penalty: int) -> dict[str, Any]:
    articles = [CRIMES[crime]]
    return {"name": name, "charges": [crime], "articles": articles, "penalty": PENALTIES[penalty]}


NAMES = ("赵甲", "钱乙", "孙丙", "李丁")


def case(
    key: int | str, text: str, crime: str, penalty: int, names: tuple[str, ...] = NAMES[:2]
) -> Example:
    """Return a case of defendants who are judged alike."""
    judgments = [judgment(name, crime, penalty) for name in names]
    return Example(key, text, names, answer={"judgments": judgments})


def fit(task: Task, train: Iterable[Example], mix: Iterable[Example], seed: int) -> Classifier:
    """Fit with the labels of all these cases."""
    return fitted_on(task, train, mix, seed).classifier


def fitted_on(
    task: Task, train: Iterable[Example], mix: Iterable[Example] = (), seed: int = 0
) -> Fitted:
    first, second = list(train), list(mix)
    return fit_known(task, first, second, task.ask.labels([*first, *second]), seed)


def test_labels_that_the_adapter_does_not_know_are_no_answers() -> None:
    train, labels = list(examples(100)), SEVERITY.ask.labels(examples(100))
    mix = [Example(id=f"m{i}", text=f"杀{i}", answer={"label": "没有刑期"}) for i in range(50)]
    [item] = fit_known(SEVERITY, train, mix, labels, 0).classifier.probabilities(mix[0])
    assert set(item["label"]) == set(WORDS.values())
    assert sum(item["label"].values()) == pytest.approx(1)


def test_a_set_of_labels_that_the_adapter_does_not_know_is_not_an_empty_set() -> None:
    train = [case(i, f"赵甲窃取{i}，钱乙望风", "盗窃罪", 13) for i in range(40)]
    mix = [case(f"m{i}", f"赵甲赌博{i}，钱乙望风", "赌博罪", 14) for i in range(40)]
    fitted = fit_known(JUDGMENT, train, mix, JUDGMENT.ask.labels(train), 0)
    assert fitted.classifier.fields["charges"].sizes[0] == 0


def test_what_the_text_tells_is_learnt() -> None:
    classifier = fit(SEVERITY, examples(200), (), seed=0)
    for example in examples(50, seed=1):
        [item] = classifier.probabilities(example)
        assert example.answer
        assert max(item["label"], key=lambda word: item["label"][word]) == example.answer["label"]
        assert sum(item["label"].values()) == pytest.approx(1)


def test_label_sets_with_the_empty_one_are_learnt() -> None:
    ecthr, answers = load_task("ecthr"), {"偷": ["Article 3"], "抢": ["Article 3", "Article 6"]}
    cases = [
        Example(id=e.id, text=e.text, answer={"labels": answers.get(e.text[12], [])})
        for e in examples(200)
    ]
    field = (classifier := fit(ecthr, cases, (), seed=0)).fields["labels"]
    assert field.sizes[0]
    for example in cases[:50]:
        [item] = classifier.probabilities(example)
        assert example.answer
        assert [name for name, p in item["labels"].items() if p > 0.5] == example.answer["labels"]


def test_an_empty_label_list_that_training_refuses_is_not_learnt() -> None:
    refused = case(0, "赵甲窃取0，钱乙望风", "盗窃罪", 13)
    assert refused.answer
    refused.answer["judgments"][0]["charges"] = []
    cases = [case(i, f"赵甲窃取{i}，钱乙望风", "盗窃罪", 13) for i in range(1, 20)]
    fields = fit(JUDGMENT, [refused, *cases], (), seed=0).fields
    assert not fields["charges"].sizes[0]


def test_two_defendants_are_told_apart_by_their_own_clauses() -> None:
    cases = []
    for i in range(120):
        names = [f"赵{i}", f"钱{i}"][:: 1 if i % 2 else -1]
        thief, other = names[:: 1 if i % 3 else -1]
        crimes = ["盗窃罪" if name == thief else "诈骗罪" for name in names]
        answer = {"judgments": [judgment(*one, 13) for one in zip(names, crimes, strict=True)]}
        text = f"{thief}窃取手机，{other}骗取钱款。"
        cases.append(Example(id=i, text=text, names=tuple(names), answer=answer))
    classifier = fit(JUDGMENT, cases, (), seed=0)
    example = Example(id=0, text="孙乙骗取钱款，李丙窃取手机。", names=("孙乙", "李丙"))
    charges = [item["charges"] for item in classifier.probabilities(example)]
    assert [max(c, key=lambda label: c[label]) for c in charges] == ["诈骗罪", "盗窃罪"]


def test_a_rare_label_has_its_frequency_whatever_the_text() -> None:
    rare = [Example(id=f"r{i}", text=f"杀{i}", answer={"label": "没有刑期"}) for i in range(2)]
    classifier = fit(SEVERITY, [*examples(98), *rare], (), seed=0)
    place = classifier.fields["label"].labels.index("没有刑期")
    assert len(rare) < MIN_ITEMS
    for weights in classifier.weights:
        assert not weights.todense()[:, place].any()
    assert classifier.bias[place] == pytest.approx(np.log(2.5 / 98.5), abs=0.1)


def saved(classifier: Classifier, path: Path) -> bytes:
    classifier.save(path)
    return path.read_bytes()


def test_the_same_cases_give_the_same_file(tmp_path: Path) -> None:
    one, two, other = (
        saved(fit(SEVERITY, examples(60), (), seed), tmp_path / f"{i}.npz")
        for i, seed in enumerate((0, 0, 1))
    )
    assert one == two != other


def test_of_a_text_all_rows_are_taken_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = [replace(case, id=f"{case.id}{copy}") for case in examples(20) for copy in "abc"]
    for most in range(1, 62):
        monkeypatch.setattr("panjue.finetune.classifier.MAX_EXAMPLES", most)
        taken = _sample(doubled)
        assert len(taken) == min(60, most - most % 3)
        assert len({case.text for case in taken}) * 3 == len(taken)


@pytest.mark.parametrize("is_set", [True, False])
def test_scores_that_are_too_large_are_scaled_back(is_set: bool) -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(4000, 3))
    if is_set:
        gold = draw.random(logits.shape) < 1 / (1 + np.exp(-logits))
    else:
        gold = np.zeros(logits.shape, dtype=bool)
        likely = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        gold[np.arange(4000), [draw.choice(3, p=p) for p in likely]] = True
    scale, shift = fit_calibration(logits * 4 + (2 if is_set else 0), gold, is_set)
    assert scale == pytest.approx(1 / 4, rel=0.1)
    assert shift == pytest.approx(-0.5 if is_set else 0, abs=0.1)


def test_mixed_in_cases_are_learnt_from_and_not_calibrated_on() -> None:
    cases = list(examples(400))
    assert fit(SEVERITY, cases, (), 0).fields["label"].scale != 1
    mixed = fit(SEVERITY, cases[:20], cases[20:], 0)
    assert mixed.fields["label"].scale == 1, "too few cases of its own"
    assert mixed.weights[0].nnz


def test_cases_that_teach_nothing_are_fitted() -> None:
    for count in (1, 2):  # without a common n-gram
        cases = [Example(id=i, text="甲乙"[i], answer={"label": "十年以上"}) for i in range(count)]
        [item] = fit(SEVERITY, cases, (), 0).probabilities(cases[0])
        assert item == {"label": {"十年以上": 1.0}}
    empty = [Example(id=i, text=f"Text {i}", answer={"labels": []}) for i in range(3)]
    assert fit(load_task("ecthr"), empty, (), 0).probabilities(empty[0]) == [{"labels": {}}]


def thefts(count: int, seed: int = 0) -> list[Example]:
    """Return cases in which the amount alone tells the penalty, and a co-defendant the charge."""
    draw = random.Random(seed)
    cases = []
    for i in range(count):
        amount = draw.choice([2, 30, 400])
        crime = draw.choice([*DEEDS])
        penalty = {2: 13, 30: 8, 400: 6}[amount]
        text = f"赵甲{DEEDS[crime]}{amount + draw.random():.4f}万元。钱乙望风，编号{i}。"
        cases.append(case(i, text, crime, penalty))
    return cases


def without_sense(count: int) -> list[Example]:
    """Return cases whose answers are those of others."""
    cases = thefts(count)
    answers = [one.answer for one in cases]
    random.Random(0).shuffle(answers)
    return [replace(one, answer=answer) for one, answer in zip(cases, answers, strict=True)]


def test_the_second_stage_learns_from_evidence_and_is_stored(tmp_path: Path) -> None:
    classifier = fit(JUDGMENT, thefts(MIN_CASES), (), seed=0)
    assert classifier.second
    assert fit(JUDGMENT, thefts(MIN_CASES - 1), (), seed=0).second == {}
    right = 0
    for one in thefts(30, seed=1):
        assert one.answer
        for item, gold in zip(classifier.probabilities(one), one.answer["judgments"], strict=True):
            assert max(item["charges"], key=lambda c: item["charges"][c]) == gold["charges"][0]
            assert sum(item["penalty"].values()) == pytest.approx(1)
            right += max(item["penalty"], key=lambda c: item["penalty"][c]) == gold["penalty"]
    assert right > 50
    classifier.save(tmp_path / "classifier.npz")
    read = read_classifier(tmp_path / "classifier.npz", JUDGMENT.answer)
    assert read.probabilities(one) == classifier.probabilities(one)


SIZES = {13: "数额较大", 6: "数额特别巨大"}


def plain(count: int, crimes: Sequence[str], penalties: Sequence[int]) -> list[Example]:
    """Return cases of four in which a word tells the charge, and another one the penalty."""
    draw = random.Random(0)
    cases = []
    for i in range(count):
        crime, penalty = draw.choice(crimes), draw.choice(penalties)
        told = "".join(f"{name}{DEEDS[crime]}{SIZES[penalty]}财物。" for name in NAMES)
        cases.append(case(i, f"{told}编号{i}。", crime, penalty, NAMES))
    return cases


@pytest.mark.parametrize(("crimes", "penalties"), [(1, 1), (1, 2), (2, 1)])
def test_a_field_of_one_label_is_fitted(crimes: int, penalties: int, tmp_path: Path) -> None:
    cases = plain(MIN_CASES, [*DEEDS][:crimes], [*SIZES][:penalties])
    classifier = fit(JUDGMENT, cases, (), seed=0)
    assert classifier.second
    classifier.save(tmp_path / "classifier.npz")
    read = read_classifier(tmp_path / "classifier.npz", JUDGMENT.answer)
    for one in cases[:20]:
        assert one.answer
        items = read.probabilities(one)
        assert items == classifier.probabilities(one)
        for item, gold in zip(items, one.answer["judgments"], strict=True):
            assert item["charges"][gold["charges"][0]] > 0.9
            assert item["penalty"][gold["penalty"]] > 0.7


Beliefs = Array
"""Of each item the probabilities of theft and of the penalty of class 13, [items, 2]."""


def beliefs_on_the_last(cases: list[Example]) -> tuple[Beliefs, Beliefs]:
    """Return the cross-fitted beliefs on the last case, and those of the whole classifier."""
    fitted = fitted_on(JUDGMENT, cases)
    *_, (_, apart) = fitted.probabilities()
    whole = fitted.classifier.probabilities(cases[-1])
    return of_theft_and_class(apart), of_theft_and_class(whole)


def of_theft_and_class(items: list[dict[str, dict[str, float]]]) -> Beliefs:
    rows = [(of["charges"].get("盗窃罪", 0), of["penalty"][PENALTIES[13]]) for of in items]
    return np.array(rows)


@pytest.mark.parametrize("count", [100, MIN_CASES])
def test_no_cross_fitted_opinion_knows_the_answer_of_its_own_case(count: int) -> None:
    """Of a word that only this case has, only its own answer can tell what it means."""
    others, rare = plain(count, [*DEEDS], [*SIZES]), "".join(f"{name}麒麟。" for name in NAMES)
    of_theft = beliefs_on_the_last([*others, case("rare", rare, "盗窃罪", 13, NAMES)])
    of_fraud = beliefs_on_the_last([*others, case("rare", rare, "诈骗罪", 6, NAMES)])
    crossed, whole = (a - b for a, b in zip(of_theft, of_fraud, strict=True))
    assert (whole > 0.7).all()
    assert (crossed < 0.05).all()
    if count < MIN_CASES:
        assert crossed == pytest.approx(0), "without a second stage nothing has seen it"


def test_cases_that_are_mixed_in_again_have_the_same_opinions() -> None:
    train = thefts(MIN_CASES // 2)
    mix = [replace(one, id=f"m{one.id}", answer=thefts(1)[0].answer) for one in train]
    opinions = [items for _, items in fitted_on(JUDGMENT, train, mix).probabilities()]
    assert opinions[: len(train)] == opinions[len(train) :]
    assert opinions[0] != opinions[1]


def test_a_training_shows_cross_fitted_opinions_of_the_cases_that_were_fitted_on(
    tmp_path: Path,
) -> None:
    cases, (other,) = without_sense(60), thefts(1, seed=1)
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
    stage, _ = fit_second_stage(items, {"charges": gold}, ["charges"], fold)
    others, truth = cases(100)
    of_first = others.scores["charges"].sum(0).argmax(1) == truth.argmax(1)
    of_second = corrected_probabilities(stage, others)["charges"].argmax(1) == truth.argmax(1)
    assert of_first[1::2].mean() < 0.7
    assert of_second[1::2].mean() > 0.9


def test_sets_that_training_has_seldom_are_made_rare() -> None:
    # Of two independent labels of probability 0.5 a quarter of the items would have both.
    values = [["a"], ["b"], ["a"], ["a", "b"], ["unknown"]]
    gold = np.array([[label in value for label in "ab"] for value in values])
    stage = FirstStage(
        field=LabelField(["a", "b"], is_set=True, scale=1, shift=0),
        gold=gold,
        calibrates=np.ones(5, bool),
        scores=np.zeros((2, 5, 2), np.float32),
        weights=[],
        bias=np.zeros(2, np.float32),
    )
    sizes = size_weights(stage, values, np.full((5, 2), 0.5))
    assert sizes == pytest.approx((0, 0.75 / 0.5, 0.25 / 0.25, 0))
