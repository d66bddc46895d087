"""The text classifier: its n-grams, its file, and its probabilities."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from panjue.eval.classifier import (
    NUMBER,
    Classifier,
    FieldWeights,
    View,
    grams,
    load_classifier,
    magnitude,
    views,
)
from panjue.prompts.example import AnswerFields, Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256, write_json
from panjue.prompts.task import load_task

TASK = load_task("severity")
TEXT = "张某甲盗窃3万元，张某望风；李某销赃200元。"


def masked(text: str) -> str:
    return NUMBER.sub(magnitude, text)


def test_numbers_of_one_third_of_a_decade_are_one_character() -> None:
    assert masked("3万元") == masked("30000元") == masked("30,000.00元") == masked("3余万元")
    assert masked("30000元") == masked("31000元") != masked("60000元") != masked("3000元")
    assert len({masked(text) for text in ("0", "0.001", "1", "9" * 400)}) == 4


@given(st.text(), st.lists(st.text(min_size=1), max_size=3, unique=True))
def test_any_text_and_any_names_have_n_grams(text: str, names: list[str]) -> None:
    example = Example(id=1, text=text, names=tuple(names))
    assert len(views(example, len(names) or 1)) == (len(names) or 1)


@given(st.permutations(["赵甲", "钱乙", "孙丙"]))
def test_other_names_change_nothing(names: list[str]) -> None:
    before = views(Example(id=1, text=TEXT, names=("张某甲", "张某", "李某")), 3)
    new = dict(zip(("张某甲", "张某", "李某"), names, strict=True))
    text = re.sub("张某甲|张某|李某", lambda found: new[found[0]], TEXT)
    after = views(Example(id=1, text=text, names=tuple(names)), 3)
    for one, other in zip(before, after, strict=True):
        assert [part.tolist() for part in one] == [part.tolist() for part in other]


def test_an_item_s_own_clauses_name_it_and_no_longer_name() -> None:
    (whole, first), (same, second), (_, third) = views(
        Example(id=1, text=TEXT, names=("张某甲", "张某", "李某")), 3
    )
    assert whole is same
    has = {word: grams(word)[0] for word in ("盗", "望", "销")}
    assert [
        set(has) & {w for w, h in has.items() if h in own} for own in (first, second, third)
    ] == [
        {"盗"},
        {"望"},
        {"销"},
    ]
    assert all(h in whole for h in has.values())


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


def weights(*, is_set: bool, scale: float = 1.0, shift: float = 0.0) -> FieldWeights:
    """Return weights for the n-gram 甲, the only column of the first view."""
    stored = csr_array(np.array([[2.0, -1.0], [0.0, 0.0]], np.float32))
    bias = np.zeros(2, np.float32)
    return FieldWeights(("a", "b"), stored, bias, scale, shift, is_set)


def small(field: FieldWeights, name: str = "label") -> Classifier:
    """Return a classifier of one field that knows two n-grams."""
    one = View(np.array(sorted(grams("甲"))), np.ones(1, np.float32))
    decides = AnswerFields(sets=(name,)) if field.is_set else AnswerFields(classes=(name,))
    return Classifier(decides, (one, one), {name: field})


def test_probabilities_worked_by_hand() -> None:
    example = Example(id=1, text="甲")
    [of_class] = small(weights(is_set=False)).probabilities(example)
    assert of_class["label"] == pytest.approx(
        {"a": 1 / (1 + math.exp(-3)), "b": 1 / (1 + math.exp(3))}
    )
    [of_set] = small(weights(is_set=True, scale=0.5, shift=1)).probabilities(example)
    assert of_set["label"] == pytest.approx(
        {"a": 1 / (1 + math.exp(-2)), "b": 1 / (1 + math.exp(-0.5))}
    )


def stored(folder: Path, classifier: Classifier) -> Path:
    """Write a classifier as a training does."""
    classifier.save(folder / "classifier.npz")
    write_json(folder / "manifest.json", {"classifier_sha256": sha256(folder / "classifier.npz")})
    return folder / "classifier.npz"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    classifier, example = small(weights(is_set=False)), Example(id=1, text="甲乙")
    first = stored(tmp_path, classifier).read_bytes()
    read = load_classifier(tmp_path, TASK)
    assert read
    assert read.probabilities(example) == classifier.probabilities(example)
    assert stored(tmp_path, read).read_bytes() == first


def test_a_training_without_a_classifier_has_none(tmp_path: Path) -> None:
    assert load_classifier(tmp_path, TASK) is None
    write_json(tmp_path / "manifest.json", {})
    assert load_classifier(tmp_path, TASK) is None


def test_a_file_that_is_missing_or_another_is_one_line(tmp_path: Path) -> None:
    path = stored(tmp_path, small(weights(is_set=False)))
    for change, problem in (
        (lambda: path.write_bytes(path.read_bytes()[:-9]), "is not what the training wrote"),
        (path.unlink, "is missing"),
    ):
        change()
        with pytest.raises(UserError) as caught:
            load_classifier(tmp_path, TASK)
        assert str(caught.value) == f"{path}: {problem}; restore it, or train again"


@pytest.mark.parametrize("kind", ["no zip", "pickle", "other fields", "other form"])
def test_a_file_of_another_kind_is_one_line(kind: str, tmp_path: Path) -> None:
    path = stored(tmp_path, small(weights(is_set=False), "label" if "other f" not in kind else "x"))
    if kind == "no zip":
        path.write_bytes(b"no zip")
    elif kind == "pickle":
        np.savez(path, about=np.array([{"version": 1}], dtype=object))
    elif kind == "other form":
        with np.load(path) as arrays:
            np.savez(path, **{**arrays, "about": np.frombuffer(b'{"version":0}', np.uint8)})
    write_json(tmp_path / "manifest.json", {"classifier_sha256": sha256(path)})
    with pytest.raises(UserError) as caught:
        load_classifier(tmp_path, TASK)
    told = f"{path}: is no classifier of this version of panjue; train again"
    assert str(caught.value) == told


def test_a_classifier_is_part_of_the_adapter_s_hash(tmp_path: Path) -> None:
    from panjue.prompts.model import model_sha256

    write_json(tmp_path / "labels.json", {})
    before: Any = model_sha256(tmp_path)
    small(weights(is_set=True)).save(tmp_path / "classifier.npz")
    assert model_sha256(tmp_path) != before
