"""Why the text classifier gives a label its probability: the parts, by hand and once more."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from panjue.finetune.classifier.classifier import Classifier
from panjue.finetune.classifier.features import View
from panjue.finetune.classifier.fit import MIN_CASES
from panjue.finetune.classifier.grams import token_places
from panjue.finetune.classifier.label_sets import LabelField
from panjue.finetune.classifier.why import (
    ANY_NAME,
    EVERY_CASE,
    OWN_NAME,
    FieldReasons,
    Most,
    Why,
    reasons,
    trees_of_classes,
)
from panjue.prompts.example import Example, LabelFields
from panjue.prompts.shorten import split_sentences
from panjue.prompts.task import Task
from tests.finetune.classifier import recompute
from tests.finetune.classifier.recompute import Stored
from tests.finetune.classifier.test_classifier import CHARACTERS, hashes, masked
from tests.finetune.classifier.test_fit import (
    ECTHR,
    JUDGMENT,
    SEVERITY,
    classifier_of,
    examples,
    thefts,
)

ALL = Most(*[10**6] * 4)
FEW = Most(words=1, sentences=1, of_classes=1, of_sets=0)
TOLERANCE = 1e-6


def all_labels(classifier: Classifier, items: int) -> list[dict[str, Sequence[str]]]:
    of_item = {name: of_field.labels for name, of_field in classifier.fields.items()}
    return [of_item] * items


def of_one(
    classifier: Classifier,
    example: Example,
    answered: Sequence[Mapping[str, Sequence[str]]],
    most: Most,
) -> list[dict[str, FieldReasons]]:
    [of_items] = reasons(classifier, [example], [answered], most)
    return of_items


def why_all(classifier: Classifier, example: Example) -> list[dict[str, FieldReasons]]:
    """Return why all labels of all items have their probabilities, with all words."""
    items = len(example.names) if classifier.label_fields.items else 1
    return of_one(classifier, example, all_labels(classifier, items), ALL)


@pytest.fixture(scope="module")
def judging() -> Classifier:
    """Return a classifier with trees."""
    return classifier_of(JUDGMENT, thefts(MIN_CASES))


@pytest.fixture(scope="module")
def classifying() -> Classifier:
    """Return a classifier of one class, without trees."""
    return classifier_of(SEVERITY, examples(100))


def whys(of_items: Sequence[Mapping[str, FieldReasons]]) -> list[Why]:
    return [why for item in of_items for field in item.values() for why in field.answered]


def test_what_words_contribute_is_the_score(judging: Classifier, classifying: Classifier) -> None:
    cases = [(judging, one) for one in thefts(3, seed=1)]
    cases += [(classifying, one) for one in examples(3, seed=1)]
    for classifier, example in cases:
        for why in whys(why_all(classifier, example)):
            words = sum(word.contribution for word in why.words)
            assert why.bias + words == pytest.approx(why.score, abs=1e-4)
            marks = [word for word in why.words if re.search(r"list\]|every case", word.text)]
            sentences = sum(one.contribution for one in why.sentences)
            assert sentences + sum(mark.contribution for mark in marks) == pytest.approx(
                words, abs=TOLERANCE
            )


def test_the_probability_is_that_which_the_classifier_gives(
    judging: Classifier, classifying: Classifier
) -> None:
    unknown = Example(1, "Nothing that training has.")
    for classifier, example in [
        *[(judging, one) for one in thefts(3, seed=1)],
        *[(classifying, one) for one in (*examples(3, seed=1), unknown)],
    ]:
        for of_item, given_item in zip(
            why_all(classifier, example), classifier.probabilities(example), strict=True
        ):
            for name, of_field in of_item.items():
                assert len(of_field.answered) == len(classifier.fields[name].labels)
                for why in of_field.answered:
                    given_probability = given_item[name].get(why.label, 0)
                    assert why.probability == pytest.approx(given_probability, abs=TOLERANCE)
                    assert why.frequency is not None
                    drawn = why.known * why.before + (1 - why.known) * why.frequency
                    assert why.probability == pytest.approx(drawn, abs=TOLERANCE)
                most = sorted(given_item[name].values(), reverse=True)[:3]
                assert [chance for _, chance in of_field.likeliest] == pytest.approx(most)


def test_what_features_contribute_is_what_the_trees_give(judging: Classifier) -> None:
    for example in thefts(3, seed=1):
        for why in whys(why_all(judging, example)):
            assert why.trees, "all labels are candidates"
            features = sum(feature.contribution for feature in why.trees.features)
            assert why.trees.given == pytest.approx(features + why.trees.average)
    penalties = judging.second["penalty"].trees
    rows = np.random.default_rng(0).normal(size=(5, penalties.num_feature()))
    apart = [trees.predict(rows, pred_contrib=True) for trees in trees_of_classes(penalties)]
    whole = penalties.predict(rows, pred_contrib=True)
    assert np.hstack(apart) == pytest.approx(whole, abs=1e-12)


def test_all_is_the_same_once_more_from_the_stored_file(
    judging: Classifier, classifying: Classifier, tmp_path: Path
) -> None:
    task: Task
    for task, classifier, cases in (
        (JUDGMENT, judging, thefts(3, seed=1)),
        (SEVERITY, classifying, examples(3, seed=1)),
    ):
        classifier.save(tmp_path / "classifier.npz")
        stored = Stored.read(tmp_path / "classifier.npz")
        for example in cases:
            compare(stored, classifier, example, task.answer)


def compare(
    stored: Stored, classifier: Classifier, example: Example, label_fields: LabelFields
) -> int:
    """Compare all that is said of an example with what follows from the file; return how much."""
    of_items = why_all(classifier, example)
    linear, fields = recompute.recompute(stored, example, len(of_items), label_fields.evidence)
    columns = {pair: number for number, pair in enumerate(stored.labels)}
    compared = 0
    for item, (of_item, of_linear) in enumerate(zip(of_items, linear, strict=True)):
        for name, of_field in of_item.items():
            for number, why in enumerate(of_field.answered):
                column = columns[name, why.label]
                compared += compare_words(why, of_linear, column, example)
                assert why.score == pytest.approx(of_linear.scores[:, column].sum(), abs=TOLERANCE)
                again = fields[name]
                assert why.before == pytest.approx(again.before[item, number], abs=TOLERANCE)
                assert why.probability == pytest.approx(again.after[item, number], abs=TOLERANCE)
                assert (why.trees is not None) == ((item, number) in again.trees)
                if why.trees:
                    compare_trees(why, again.trees[item, number])
    return compared


def compare_words(why: Why, linear: recompute.Recomputed, column: int, example: Example) -> int:
    again = {gram: one for gram, one in linear.words(column).items() if one}
    if any(word.text == EVERY_CASE for word in why.words):  # the marks are one word
        marks = {gram for gram in again if re.fullmatch(r"(place|of) \d|last True", gram)}
        again[EVERY_CASE] = sum(again.pop(gram) for gram in marks)
    assert [word.contribution for word in why.words] == pytest.approx(
        sorted(again.values(), reverse=True), abs=TOLERANCE
    )
    spans = split_sentences(example.text, None, example.names)
    by_sentence = linear.by_sentence(column)
    for sentence in why.sentences:
        text = example.text[sentence.start : sentence.end]
        same = [by_sentence[number] for number, one in enumerate(spans) if one == text]
        assert min(abs(one - sentence.contribution) for one in same) < TOLERANCE
    return len(again)


def compare_trees(why: Why, again: tuple[float | None, Any, Any]) -> None:
    assert why.trees
    logit, contributions, values = again
    if logit is None:
        assert why.trees.scaled is None
    else:
        assert why.trees.scaled == pytest.approx(logit, abs=TOLERANCE)
    assert why.trees.average == pytest.approx(contributions[-1], abs=TOLERANCE)
    order = np.argsort(-contributions[:-1], kind="stable")
    order = order[contributions[:-1][order] != 0]
    given = [(feature.value, feature.contribution) for feature in why.trees.features]
    assert np.array(given) == pytest.approx(
        np.column_stack([values[order], contributions[order]]), abs=TOLERANCE
    )


@given(st.lists(st.text(CHARACTERS, max_size=12), min_size=1, max_size=5))
def test_tokens_stand_where_they_are_read(texts: list[str]) -> None:
    for text in texts:
        places = token_places(text)
        tokens = [masked(text[start:end].lower()) for start, end in places]
        assert hashes(text)[: len(tokens)].tolist() == [hashes(one)[0] for one in tokens]
        assert len(hashes(text)) == max(0, 2 * len(tokens) - 1)


def knowing(weights: Mapping[str, float], own: Mapping[str, float]) -> Classifier:
    """Return a classifier of one label of persons that knows these n-grams of the two texts."""
    views = []
    arrays = []
    for of_view in (weights, own):
        by_hash = {}
        for gram, weight in of_view.items():
            is_mark = " " in gram
            hashed = crc32(gram.encode()) if is_mark else int(hashes(gram)[-1])
            by_hash[hashed] = weight
        kept = np.array(sorted(by_hash), np.uint32)
        views.append(View(kept, np.ones(len(kept), np.float32)))
        arrays.append(csr_array([[by_hash[hashed]] for hashed in sorted(by_hash)]))
    return Classifier(
        label_fields=LabelFields("judgments", sets=("charges",)),
        views=views,
        weights=arrays,
        bias=np.array([-1], np.float32),
        fields={"charges": LabelField(["盗窃罪"], is_set=True, scale=1, shift=0)},
    )


def test_words_and_sentences_worked_by_hand() -> None:
    text = "赵甲盗窃。钱乙与赵甲盗窃，拒捕。路人无事。"
    example = Example(1, text, ("赵甲", "钱乙"))
    # The vectors of the texts have two and one n-grams that count, of which one stands twice.
    classifier = knowing({"盗窃": 3.0, "拒捕": -2.0}, {"\ue000盗": 1.5, "\ue001盗": -0.5})
    twice = 1 + np.log(2)
    length = np.hypot(twice, 1)
    first, second = of_one(classifier, example, [{"charges": ["盗窃罪"]}] * 2, ALL)
    [why] = first["charges"].answered
    words = {"盗窃": 3 * twice / length, f"{OWN_NAME}盗": 1.5, "拒捕": -2 / length}
    assert [word.text for word in why.words] == [*words]
    assert dict(why.words) == pytest.approx(words)
    sentences = {text[one.start : one.end]: one.contribution for one in why.sentences}
    assert sentences == pytest.approx(
        {
            "赵甲盗窃。": 1.5 * twice / length + 0.75,
            "钱乙与赵甲盗窃，拒捕。": (1.5 * twice - 2) / length + 0.75,
        }
    )
    assert why.score == pytest.approx(-1 + (3 * twice - 2) / length + 1.5)
    [why] = second["charges"].answered
    assert dict(why.words)[f"{ANY_NAME}盗"] == pytest.approx(-0.5)
    assert (why.trees, why.is_left_out, why.known, why.frequency) == (None, False, 1, None)
    first, _ = of_one(classifier, example, [{"charges": ["盗窃罪"]}] * 2, FEW)
    [best] = first["charges"].answered
    assert [word.text for word in best.words] == ["盗窃", "拒捕"], "one for and one against"


def test_a_label_that_nobody_trained_has_no_reason() -> None:
    classifier = knowing({"盗窃": 3.0}, {"盗窃": 1.0})
    example = Example(1, "赵甲盗窃。", ("赵甲",))
    [of_item] = of_one(classifier, example, [{"charges": ["抢劫罪", "盗窃罪"]}], FEW)
    assert [why.label for why in of_item["charges"].answered] == ["盗窃罪"]
    assert [label for label, _ in of_item["charges"].likeliest] == ["盗窃罪"]


def test_sentences_are_those_of_the_text_as_it_was_given() -> None:
    """Line breaks, entities and spaces in names are no part of what the classifier reads."""
    text = "第一&times;句，\n赵 甲盗窃。第二\n句，İ赵　甲盗窃3万元，\n拒捕。第三句。"
    example = Example(1, text, ("赵甲",))
    classifier = knowing({"拒捕": 2.0, "窃3万": 1.0}, {"第二": 1.0})
    [of_item] = of_one(classifier, example, [{"charges": ["盗窃罪"]}], ALL)
    [why] = of_item["charges"].answered
    assert {word.text for word in why.words} == {"拒捕", "窃3万"}
    [sentence] = why.sentences
    assert text[sentence.start : sentence.end] == "第二\n句，İ赵　甲盗窃3万元，\n拒捕。"


NAMES = st.lists(st.text(CHARACTERS, min_size=1, max_size=2), min_size=1, max_size=3)


@given(st.text(CHARACTERS, min_size=1, max_size=40), NAMES)
def test_any_text_has_reasons(text: str, names: list[str]) -> None:
    classifier = knowing({"甲": 1.0}, {"甲": 1.0, "乙": -1.0})
    example = Example(1, text, tuple(names))
    answered = [{"charges": ["盗窃罪"]}] * len(example.names)
    for of_item in of_one(classifier, example, answered, ALL):
        [why] = of_item["charges"].answered
        words = sum(word.contribution for word in why.words)
        assert why.score == pytest.approx(why.bias + words, abs=1e-5)
        assert sum(one.contribution for one in why.sentences) == pytest.approx(words)


def test_many_at_once_have_the_same_reasons(judging: Classifier) -> None:
    cases = thefts(5, seed=1)
    answered = [all_labels(judging, 2)] * len(cases)
    assert reasons(judging, cases, answered, ALL) == [
        of_one(judging, example, of_case, ALL)
        for example, of_case in zip(cases, answered, strict=True)
    ]


def test_an_empty_set_has_its_likeliest_labels_and_no_reasons() -> None:
    cases = [replace(one, answer={"labels": ["Article 3"]}) for one in examples(40)]
    classifier = classifier_of(ECTHR, cases)
    [of_item] = of_one(classifier, cases[0], [{"labels": []}], FEW)
    assert not of_item["labels"].answered
    assert [label for label, _ in of_item["labels"].likeliest] == ["Article 3"]
