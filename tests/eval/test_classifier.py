"""The text classifier: its n-grams, its file, and its probabilities."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from panjue.eval.classifier import (
    FILE_VERSION,
    NUMBER,
    Classifier,
    LabelField,
    View,
    facts,
    grams,
    load_classifier,
    magnitude,
    read_classifier,
    views,
)
from panjue.eval.second_stage import PLACES
from panjue.prompts.example import AnswerFields, Example
from panjue.prompts.model import CLASSIFIER, model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, sha256, write_json
from panjue.prompts.task import load_task

TASK = load_task("severity")
NAMES = ("张某甲", "张某", "李某")
TEXT = "张某甲盗窃3万元，张某望风；李某销赃200元。"
CASE = Example(id=1, text=TEXT, names=NAMES)


def masked(text: str) -> str:
    return NUMBER.sub(magnitude, text)


def test_numbers_of_one_third_of_a_decade_are_one_character() -> None:
    assert masked("3万元") == masked("30000元") == masked("30,000.00元") == masked("3余万元")
    assert masked("30000元") == masked("31000元") != masked("60000元") != masked("3000元")
    assert len({masked(text) for text in ("0", "0.001", "1", "9" * 400)}) == 4


@given(st.text(), st.lists(st.text(min_size=1), max_size=3, unique=True))
def test_any_text_and_any_names_have_n_grams(text: str, names: list[str]) -> None:
    example = Example(id=1, text=text, names=tuple(names))
    items = len(names) or 1
    _, own = views(example, items)
    assert len(own) == len(facts(example, items, lambda _: ())) == items


@given(st.permutations(["赵甲", "钱乙", "孙丙"]))
def test_other_names_change_nothing(names: list[str]) -> None:
    new = dict(zip(NAMES, names, strict=True))
    text = re.sub("|".join(NAMES), lambda found: new[found[0]], TEXT)
    whole, own = views(CASE, 3)
    same, also = views(Example(id=1, text=text, names=tuple(names)), 3)
    for one, other in zip([whole, *own], [same, *also], strict=True):
        assert one.tolist() == other.tolist()


def test_an_item_s_own_clauses_name_it_and_no_longer_name() -> None:
    whole, own = views(CASE, 3)
    hashes = [grams(word)[0] for word in ("盗", "望", "销")]
    assert np.isin(hashes, whole).all()
    assert [np.isin(hashes, of_item).tolist() for of_item in own] == np.eye(3).astype(bool).tolist()


def test_where_an_item_stands_worked_by_hand() -> None:
    rows = facts(CASE, 3, lambda text: [text.count("元")])
    marked = "甲盗窃3万元，乙望风；丙销赃200元。"  # with one character for each name
    length = len(marked)
    expected = [
        [0, 3, 0, length, 7, 1, 0, 2, 1],
        [1, 3, 0.5, length, 4, 1, 7 / length, 2, 0],
        [2, 3, 1, length, 8, 1, 11 / length, 2, 1],
    ]
    assert rows == [pytest.approx(row) for row in expected]
    assert len(rows[0]) == len(PLACES) + 2


def test_words_of_other_scripts_are_whole() -> None:
    assert grams("The court").tolist() == [*grams("the"), *grams("court"), grams("the court")[-1]]


def test_a_vector_worked_by_hand() -> None:
    a, b = grams("甲")[0], grams("乙")[0]
    order = np.argsort([a, b])
    view = View(np.array([a, b])[order], np.array([1.0, 2.0], np.float32)[order])
    texts = [np.array([a, a, b]), np.array([b]), grams("丙"), grams("")]
    rows = view.rows(texts).toarray()[:, np.argsort(order)]
    length = math.hypot(1 + math.log(2), 2)
    assert rows == pytest.approx(
        np.array([[(1 + math.log(2)) / length, 2 / length], [0, 1], [0, 0], [0, 0]])
    )


def small(*, is_set: bool, scale: float = 1.0, shift: float = 0.0) -> Classifier:
    """Return a classifier of two fields that knows one n-gram by each view."""
    view = View(np.array(sorted(grams("甲"))), np.ones(1, np.float32))
    names = ("label", "other")
    return Classifier(
        decides=AnswerFields(sets=names) if is_set else AnswerFields(classes=names),
        views=[view, view],
        weights=[csr_array([[2.0, -1.0, 5.0]]), csr_array((1, 3))],
        bias=np.zeros(3, np.float32),
        fields={
            "label": LabelField(["a", "b"], is_set, scale, shift),
            "other": LabelField(["c"], is_set, scale, shift),
        },
    )


def logistic(logits: Sequence[float]) -> list[float]:
    return [1 / (1 + math.exp(-logit)) for logit in logits]


def test_probabilities_worked_by_hand() -> None:
    example = Example(id=1, text="甲")
    [of_class] = small(is_set=False).probabilities(example)
    assert [*of_class["label"].values()] == pytest.approx(logistic([3, -3]))
    assert of_class["other"] == {"c": 1}
    [of_set] = small(is_set=True, scale=0.5, shift=1).probabilities(example)
    assert [*of_set["label"]] == ["a", "b"]
    assert [*of_set["label"].values()] == pytest.approx(logistic([2, 0.5]))
    assert of_set["other"] == pytest.approx({"c": logistic([3.5])[0]})


def stored(folder: Path, classifier: Classifier) -> Path:
    """Write a classifier as a training does."""
    classifier.save(folder / CLASSIFIER)
    write_json(folder / "manifest.json", {"classifier_sha256": sha256(folder / CLASSIFIER)})
    return folder / CLASSIFIER


DECIDES = AnswerFields(classes=("label", "other"))
TWO_CLASSES = replace(TASK, answer=DECIDES)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    classifier = small(is_set=False)
    example = Example(id=1, text="甲乙")
    first = stored(tmp_path, classifier).read_bytes()
    read = load_classifier(tmp_path, TWO_CLASSES)
    assert read
    assert read.probabilities(example) == classifier.probabilities(example)
    assert stored(tmp_path, read).read_bytes() == first


def test_a_training_without_a_classifier_has_none(tmp_path: Path) -> None:
    assert load_classifier(tmp_path, TASK) is None
    write_json(tmp_path / "manifest.json", {})
    assert load_classifier(tmp_path, TASK) is None


def test_a_file_that_is_missing_or_another_is_one_line(tmp_path: Path) -> None:
    path = stored(tmp_path, small(is_set=False))
    line = f"^{path}: is missing, or is not what the training wrote; restore it, or train again$"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=line):
        load_classifier(tmp_path, TWO_CLASSES)
    path.unlink()
    with pytest.raises(UserError, match=line):
        load_classifier(tmp_path, TWO_CLASSES)


@pytest.mark.parametrize("change", [{"version": FILE_VERSION - 1}, {"fields": {"label": {}}}])
def test_a_file_of_another_version_or_task_is_one_line(
    change: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / CLASSIFIER
    about = {"version": FILE_VERSION, "fields": {"label": {}, "other": {}}, **change}
    np.savez(path, about=np.frombuffer(dump(about).encode(), np.uint8))
    line = f"^{path}: is no classifier of this version of panjue; train again$"
    with pytest.raises(UserError, match=line):
        read_classifier(path, DECIDES)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / CLASSIFIER, about=np.array([{"version": FILE_VERSION}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        read_classifier(tmp_path / CLASSIFIER, DECIDES)


def test_a_classifier_is_part_of_the_adapter_s_hash(tmp_path: Path) -> None:
    write_json(tmp_path / "labels.json", {})
    before = model_sha256(tmp_path)
    small(is_set=True).save(tmp_path / CLASSIFIER)
    assert model_sha256(tmp_path) != before
